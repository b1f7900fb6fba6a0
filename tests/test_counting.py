"""Counting: what masks, fusion, recomputation of scores and repetition do to the numbers, exactly."""

from fractions import Fraction

import pytest

from stage import catalog
from stage.counting import Flops, closed_forms, count_block_parameters, count_flops, count_parameters
from stage.graph import Graph, Options
from stage.model import Model, SizeValue
from stage.passes.backward import differentiate
from stage.sizes import build_model
from stage.symbols import evaluate, size

NAMES = [entry.name for entry in catalog.list_models()]
FAMILIES = [
    "gpt3-175b",
    "llama3-8b",
    "mistral-7b",
    "qwen2-7b",
    "qwen3-8b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "deepseek-v3",
]
SEQ = 2048


def built(
    name: str, sizes: dict[str, SizeValue] | None = None, *, mask: str = "causal", attention: str = "fused"
) -> Model:
    return build_model(name, sizes, options=Options(attention=attention, mask=mask))[0]


def attention_flops(model: Model, seq: int) -> Flops:
    """The part of the count that a mask changes."""
    sizes = {**model.values, "batch": 1, "seq": seq, "sources": 1}

    def total(graph: Graph) -> int:
        return sum(evaluate(expr, sizes) for node, expr in closed_forms(graph) if "mask" in node.attrs)

    both = [differentiate(model.graph(block)) for block in model.layers]
    return Flops(sum(total(one.forward) for one in both), sum(total(one.backward) for one in both))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_causal_mask_halves_exactly_the_attention(name: str) -> None:
    sizes: dict[str, SizeValue] = {"layers": 4}
    if "window" in catalog.load_model(name).sizes:
        sizes["window"] = 0
    full, causal = built(name, sizes, mask="full"), built(name, sizes, mask="causal")
    part, whole, halved = (
        attention_flops(full, SEQ),
        count_flops(full, 1, SEQ),
        count_flops(causal, 1, SEQ),
    )
    assert part.forward > 0
    assert 2 * (whole.forward - halved.forward) == part.forward
    assert 2 * (whole.backward - halved.backward) == part.backward


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fused_and_unfused_attention_count_the_same(name: str, mask: str) -> None:
    fused, unfused = built(name, mask=mask), built(name, mask=mask, attention="unfused")
    assert count_flops(fused, 2, SEQ) == count_flops(unfused, 2, SEQ)


@pytest.mark.parametrize("name", NAMES)
def test_backward_counts_twice_forward(name: str) -> None:
    flops = count_flops(built(name), 1, SEQ)
    assert flops.backward == 2 * flops.forward
    assert flops.total == 3 * flops.forward


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fused_backward_executes_the_scores_again(name: str) -> None:
    model = built(name)
    both = differentiate(model.graph(model.layers[-1]))
    sizes = {**model.values, "batch": 1, "seq": SEQ, "sources": 1}

    def executed(graph: Graph) -> int:
        found = [expr for node, expr in closed_forms(graph, executed=True) if "mask" in node.attrs]
        return evaluate(sum(found), sizes)

    ratio = Fraction(executed(both.backward), executed(both.forward))
    if name == "deepseek-v3":  # q.k again, dv and dp over 128 values, dq and dk over 192 of queries and keys
        assert ratio == Fraction(3 * 192 + 2 * 128, 192 + 128)
    else:
        assert ratio == Fraction(5, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_other_matrix_multiplications_execute_what_is_counted(name: str) -> None:
    model = built(name)
    for block in dict.fromkeys(model.blocks):
        both = differentiate(model.graph(block))
        for graph in (both.forward, both.backward):
            counted = [(node.name, expr) for node, expr in closed_forms(graph) if "mask" not in node.attrs]
            executed = closed_forms(graph, executed=True)
            assert counted == [(node.name, expr) for node, expr in executed if "mask" not in node.attrs]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_count_is_linear_in_the_batch(name: str) -> None:
    model = built(name)
    one, seven = count_flops(model, 1, SEQ), count_flops(model, 7, SEQ)
    assert (seven.forward, seven.backward) == (7 * one.forward, 7 * one.backward)


def test_a_window_limits_the_keys_of_a_query() -> None:
    model = built("mistral-7b", {"layers": 1})
    pairs = {seq: attention_flops(model, seq).forward // (2 * 2 * 32 * 128) for seq in (2048, 4096, 8192)}
    assert pairs == {2048: 2048**2 // 2, 4096: 4096**2 // 2, 8192: 8192 * 4096 - 4096**2 // 2}
    assert (
        attention_flops(built("mistral-7b", {"layers": 1}, mask="full"), 8192).forward
        == 4 * 32 * 128 * 8192**2
    )


def test_only_layers_with_a_window_are_cheaper() -> None:
    whole = attention_flops(built("gpt-oss-20b", {"layers": 2, "window": 0}), SEQ).forward
    sliding = attention_flops(built("gpt-oss-20b", {"layers": 2}), SEQ).forward
    assert whole - sliding == 4 * 64 * 64 * (SEQ**2 // 2 - (SEQ * 128 - 128**2 // 2))


def test_closed_forms_of_a_layer() -> None:
    model = built("llama3-8b")
    found = {node.name: str(expr) for node, expr in closed_forms(model.graph(model.layers[0]))}
    assert found == {
        "attn.q_proj": "2*batch*d_model*head_dim*heads*seq",
        "attn.k_proj": "2*batch*d_model*head_dim*kv_heads*seq",
        "attn.v_proj": "2*batch*d_model*head_dim*kv_heads*seq",
        "attn.core": "2*batch*head_dim*heads*seq**2",
        "attn.o_proj": "2*batch*d_model*head_dim*heads*seq",
        "mlp.gate_proj": "2*batch*d_ff*d_model*seq",
        "mlp.up_proj": "2*batch*d_ff*d_model*seq",
        "mlp.down_proj": "2*batch*d_ff*d_model*seq",
    }


def test_every_routed_token_is_computed_once_for_each_of_its_experts() -> None:
    model = built("mixtral-8x7b")
    forms = {node.name: expr for node, expr in closed_forms(model.graph(model.layers[0]))}
    tokens = size("batch") * size("seq") * size("top_k")
    assert forms["moe.experts.up_proj"] == 2 * tokens * size("d_model") * size("expert_d_ff")
    assert forms["moe.router"] == 2 * size("batch") * size("seq") * size("d_model") * size("experts")


def test_a_tied_head_counts_once_in_parameters_and_still_in_flops() -> None:
    tied, untied = built("llama3-8b", {"tied": True}), built("llama3-8b")
    assert count_parameters(untied) - count_parameters(tied) == 128256 * 4096
    assert count_flops(untied, 1, SEQ) == count_flops(tied, 1, SEQ)
    assert count_block_parameters(tied, tied.head) == count_block_parameters(untied, untied.head)


def test_an_embedding_is_a_gather() -> None:
    model = built("gpt3-175b")
    assert closed_forms(model.graph(model.embedding)) == []
    assert closed_forms(differentiate(model.graph(model.embedding)).backward) == []


def test_blocks_add_up_to_the_model() -> None:
    model = built("deepseek-v3")
    assert sum(count_block_parameters(model, block) for block in model.blocks) == count_parameters(model)
