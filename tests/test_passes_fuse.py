"""Fusing contractions of one operand: golden texts, equal work, and what must stay apart."""

from collections.abc import Callable

from stage.blocks import attention, gated_mlp, rms_norm
from stage.counting import closed_forms
from stage.graph import Builder, Graph, format_graph
from stage.passes.backward import differentiate
from stage.passes.fuse import fuse
from stage.symbols import evaluate
from tests.small import MODELS, request
from tests.test_passes_shard import SIZES, attend, mlp


def test_projections_are_fused_as_written_down(golden: Callable[[str, str], None]) -> None:
    for name, graph in (("mlp", mlp()), ("attention", attend()), ("attention-bias", biased())):
        pair = differentiate(fuse(graph))
        texts = (format_graph(g) for g in (graph, pair.forward, pair.backward))
        golden(f"fuse/{name}.txt", "\n\n".join(texts) + "\n")


def biased() -> Graph:
    b = Builder("attention")
    return b.graph(attention(b, b.input("x", "batch", "seq", "d_model"), bias=True))


def work(graph: Graph, sizes: dict[str, int]) -> int:
    return sum(evaluate(expr, sizes) for _, expr in closed_forms(graph))


def test_fused_graphs_do_the_same_work_in_fewer_kernels() -> None:
    for model in MODELS:
        job = request(model, "ddp")
        sizes = {**job.sizes, "sources": 1}
        for block in dict.fromkeys(job.model.blocks):
            plain, joint = differentiate(job.model.graph(block)), differentiate(fuse(job.model.graph(block)))
            assert work(plain.forward, sizes) == work(joint.forward, sizes)
            assert work(plain.backward, sizes) == work(joint.backward, sizes)
            if block in job.model.layers and model != "gpt3-125m":
                assert len(joint.forward.nodes) < len(plain.forward.nodes)


def test_what_has_no_twin_is_returned_as_it_is() -> None:
    b = Builder("norm")
    graph = b.graph(rms_norm(b, b.input("x", "batch", "seq", "d_model"), "norm"))
    assert fuse(graph) is graph


def test_projections_of_different_operands_stay_apart() -> None:
    b = Builder("two")
    x = b.input("x", "batch", "seq", "d_model")
    first = b.linear(x, "a_proj", ["d_model"], ["d_ff"])
    second = b.linear(rms_norm(b, x, "norm"), "b_proj", ["d_model"], ["d_ff"])
    graph = b.graph(b.add("sum", first, second))
    assert fuse(graph) is graph


def test_projections_with_and_without_bias_stay_apart() -> None:
    b = Builder("two")
    x = b.input("x", "batch", "seq", "d_model")
    first = b.linear(x, "a_proj", ["d_model"], ["d_ff"], bias=True)
    second = b.linear(x, "b_proj", ["d_model"], ["d_ff"])
    graph = b.graph(b.add("sum", first, second))
    assert fuse(graph) is graph


def test_latents_of_one_operand_stay_apart() -> None:
    job = request("deepseek-v3", "ddp")
    names = [node.name for node in fuse(job.model.graph(job.model.layers[0])).nodes]
    assert {"attn.q_a_proj", "attn.kv_a_proj", "mlp.gate_up_proj"} <= set(names)


def test_joint_names_are_those_of_production_code() -> None:
    b = Builder("both")
    x = b.input("x", "batch", "seq", "d_model")
    graph = fuse(b.graph(b.add("sum", attention(b, x), gated_mlp(b, x))))
    assert [n.name for n in graph.nodes if n.op == "contract_group"] == ["qkv_proj", "gate_up_proj"]
    assert SIZES["heads"] == 4
