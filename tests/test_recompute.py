"""The recompute row: what each policy runs again and sends again, by closed forms, in whole trace sets that verify."""

from collections import Counter
from typing import Any

import pytest

import stage
from stage.errors import StrategyError
from stage.recomputation import MODULES, parse_recomputation
from stage.trace.node import NodeType
from stage.traceset import TraceSet
from stage.verification import verify_set
from tests.small import MODELS, request

LAYERS, MICRO_BATCHES = 4, 2
SHAPE: dict[str, Any] = {"tp": 2, "pp": 2, "batch": MICRO_BATCHES, "vocab_multiple": 8}


def traces(model: str, recompute: str, **options: Any) -> TraceSet:
    sizes = MODELS[model] | {"layers": LAYERS} | options.pop("sizes", {})
    return stage.synthesize(model, "megatron_sp", recompute=recompute, sizes=sizes, **SHAPE | options)


def again(found: TraceSet, rank: int) -> list[Any]:
    """What a rank runs again."""
    return [node for node in found.nodes(rank) if node.get("phase") == "recompute"]


def collectives(found: TraceSet) -> Counter[str]:
    """The collectives that the first rank of each stage runs again, a layer and micro-batch."""
    nodes = [node for rank in (0, 2) for node in again(found, rank)]
    total = Counter(str(node.get("op")) for node in nodes if node.get("comm_size") is not None)
    assert all(count % (LAYERS * MICRO_BATCHES) == 0 for count in total.values())
    return Counter({op: count // (LAYERS * MICRO_BATCHES) for op, count in total.items()})


ROWS: dict[str, tuple[str, str, dict[str, int]]] = {
    "none": ("llama3-8b", "none", {}),
    "full per block": ("llama3-8b", "full", {"all_gather": 2, "reduce_scatter": 2}),
    "selective": ("llama3-8b", "selective", {}),
    "attention core": ("llama3-8b", "ops:attention", {}),
    "norm": ("llama3-8b", "ops:norm", {}),
    "up-projection": ("llama3-8b", "ops:up_proj", {"all_gather": 1}),
    "activation function": ("llama3-8b", "ops:act", {}),
    "mlp": ("llama3-8b", "ops:mlp", {"all_gather": 1, "reduce_scatter": 1}),
    "moe": ("mixtral-8x7b", "ops:moe", {"all_gather": 1, "all_to_all": 3}),
    "moe_act": ("mixtral-8x7b", "ops:moe_act", {}),
    "dispatch": ("mixtral-8x7b", "ops:dispatch", {"all_to_all": 2}),
    "mla_up_proj": ("deepseek-v3", "ops:mla_up_proj", {"all_gather": 2}),
}
"""Row: the model, the policy, and the collectives that a layer and micro-batch sends once more."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"recompute[{row}]")
def test_a_layer_sends_again_what_the_part_has_in_it(row: str) -> None:
    model, policy, expected = ROWS[row]
    found = traces(model, policy, **({"ep": 2} if "experts" in MODELS[model] else {}))
    assert verify_set(found).ok
    assert collectives(found) == expected
    assert bool(again(found, 0)) == (policy != "none")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved"])
@pytest.mark.parametrize("every", [1, 2, 3], ids=lambda k: f"recompute[every {k} blocks]")
def test_every_kth_layer_of_a_stage_is_recomputed_in_full(every: int, schedule: str) -> None:
    options: dict[str, Any] = {"schedule": schedule, "sizes": {"layers": 12}}
    found, full = traces("llama3-8b", f"every:{every}", **options), traces("llama3-8b", "full", **options)
    assert verify_set(found).ok
    per_stage = 3 if schedule in ("zb-v", "interleaved") else 6
    for rank in (0, 2):
        names = {layer: {n.name for n in again(full, rank) if n.get("layer") == layer} for layer in range(12)}
        own = {layer for layer in names if names[layer]}
        chosen = {layer for layer in own if (layer % per_stage + 1) % every == 0}
        assert len(chosen) == len(own) // per_stage * (per_stage // every) > 0
        assert {n.name for n in again(found, rank)} == set().union(*(names[layer] for layer in chosen))


def test_every_first_layer_is_full_recomputation() -> None:
    one, full = traces("llama3-8b", "every:1"), traces("llama3-8b", "full")
    assert [one.rank(rank) for rank in one.ranks] == [full.rank(rank) for rank in full.ranks]


def test_selective_is_the_attention_core() -> None:
    for attention in ("fused", "unfused"):
        sets = [traces("llama3-8b", p, attention=attention) for p in ("selective", "ops:core_attn")]
        assert sets[0].rank(0) == sets[1].rank(0)


@pytest.mark.parametrize("policy", ["full", "selective", "ops:attention"])
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_that_is_recomputed_sends_its_blocks_round_again(cp: int, policy: str) -> None:
    found = traces("llama3-8b", policy, cp=cp, context="ring", sizes={"heads": 8, "kv_heads": 4})
    assert verify_set(found).ok
    forward, repeated = (
        sum(
            ".kv" in n.name and n.type == NodeType.COMM_SEND
            for n in found.nodes(0)
            if n.get("phase") == phase
        )
        for phase in ("forward", "recompute")
    )
    assert forward == repeated == (cp - 1) * LAYERS // 2 * MICRO_BATCHES


def test_layers_of_two_kinds_are_each_recomputed_or_not() -> None:
    """Of DeepSeek's layers the first is dense; the second of each stage is recomputed, whatever its kind."""
    found = traces("deepseek-v3", "every:2", sizes={"first_k_dense": 2})
    assert verify_set(found).ok
    assert {n.get("layer") for rank in (0, 2) for n in again(found, rank)} == {1, 3}


REFUSALS = {
    "every:0": "recompute is 'every:0' (did you mean 'every:K'?); known: none, full, selective, every:K, ops:NAME,...",
    "every:9999999": "recompute is 'every:9999999' (did you mean 'every:K'?); known: none, full, selective, every:K, ops:NAME,...",
    "every:\u0663": "recompute is 'every:\u0663' (did you mean 'every:K'?); known: none, full, selective, every:K, ops:NAME,...",
    "all": "recompute is 'all'; known: none, full, selective, every:K, ops:NAME,...",
    "full:2": "recompute is 'full:2' (did you mean 'full'?); known: none, full, selective, every:K, ops:NAME,...",
    "ops:norms": f"recompute is 'ops:norms': unknown op 'norms' (did you mean 'norm'?); known: {', '.join(MODULES)}",
    "ops:attention,core_attn": "recompute is 'ops:attention,core_attn'; each op may appear once",
    "ops:": f"recompute is 'ops:': unknown op ''; known: {', '.join(MODULES)}",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_policy_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(StrategyError) as refused:
        parse_recomputation(text)
    assert str(refused.value) == REFUSALS[text]


def test_parts_that_no_layer_has_are_refused() -> None:
    with pytest.raises(StrategyError) as refused:
        request("llama3-8b", "megatron", recompute="ops:norm,moe")
    assert str(refused.value) == (
        "recompute is 'ops:norm,moe', but no layer of llama3-8b has moe; "
        "it has attention, core_attn, norm, layernorm, up_proj, act, mlp"
    )


def test_a_number_that_no_stage_reaches_is_refused() -> None:
    with pytest.raises(StrategyError) as refused:
        traces("llama3-8b", "every:3")
    assert str(refused.value) == (
        "recompute is 'every:3', but no stage of llama3-8b has more than 2 layers; choose a smaller number"
    )
