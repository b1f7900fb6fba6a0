"""Split backward: the two parts are the whole, and the weight part is what nobody waits for."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import stage
from stage.graph import format_graph
from stage.passes.backward import Differentiated
from stage.passes.split import split_backward
from stage.request import resolve_request
from stage.synthesis import sharded_block
from stage.trace.node import NodeType, TraceNode

SMALL = {"d_model": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 48, "vocab": 64, "layers": 4}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama3-8b", "megatron_sp", {"tp": 2}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "recompute": "full"}),
    ("llama3-8b", "megatron", {"tp": 2, "recompute": "selective"}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "recompute": "ops:norm,up_proj,act"}),
    (
        "deepseek-v3",
        "megatron_moe",
        {"dp": 2, "tp": 2, "ep": 2, "recompute": "ops:norm,mla_up_proj,dispatch"},
    ),
    ("gpt3-125m", "megatron_sp", {"tp": 2}),
    ("deepseek-v3", "megatron_moe", {"tp": 2, "dp": 2, "ep": 4}),
    ("gpt-oss-20b", "megatron_moe", {"dp": 2, "ep": 2}),
    ("llama3-8b", "fsdp", {"dp": 2, "zero": 3}),
]


def blocks(model: str, strategy: str, options: dict[str, Any]) -> dict[str, Differentiated]:
    request = resolve_request(model, strategy, batch=4, seq=64, **options)
    return {b.kind: sharded_block(request, b) for b in dict.fromkeys(request.model.blocks)}


def test_the_parts_of_a_layer_as_text(golden: Callable[[str, str], None]) -> None:
    parts = split_backward(blocks("llama3-8b", "megatron_sp", {"tp": 2})["layer"])
    golden("llama3-8b-split.txt", f"{format_graph(parts.input)}\n\n{format_graph(parts.weight)}\n")


@pytest.mark.parametrize(("model", "strategy", "options"), CASES)
def test_the_parts_are_the_whole(model: str, strategy: str, options: dict[str, Any]) -> None:
    for block in blocks(model, strategy, options).values():
        parts = split_backward(block)
        assert Counter(n.name for n in parts.input.nodes) + Counter(
            n.name for n in parts.weight.nodes
        ) == Counter(n.name for n in block.backward.nodes)
        given = {*parts.input.outputs, *parts.weight.outputs}
        assert {*block.backward.outputs} <= given


@pytest.mark.parametrize(("model", "strategy", "options"), CASES)
def test_the_weight_part_makes_gradients_alone_and_reads_no_parameters(
    model: str, strategy: str, options: dict[str, Any]
) -> None:
    for kind, block in blocks(model, strategy, options).items():
        parts = split_backward(block)
        gradients = set(block.gradients.values())
        assert set(parts.weight.outputs) <= gradients
        assert not parts.weight.parameters
        assert all(node.phase == "backward" for node in parts.weight.nodes)
        assert set(block.cotangents) - {None} <= {*parts.input.outputs}
        left = {name for name in gradients if name not in parts.weight.outputs}
        assert all("norm" in name or "sink" in name for name in left), (kind, left)


def test_the_embedding_has_weight_gradients_alone() -> None:
    parts = split_backward(blocks("gpt3-125m", "megatron_sp", {"tp": 2})["embedding"])
    assert not parts.input.nodes
    assert [n.op for n in parts.weight.nodes] == ["reduce", "all_gather", "embedding_backward"]


def test_nodes_say_which_part_they_are() -> None:
    traces = stage.synthesize("llama3-8b", "megatron", pp=2, schedule="zb-h1", batch=4, seq=32, sizes=SMALL)
    for node in traces.nodes(0):
        backward = node.get("phase") == "backward" and node.type == NodeType.COMP
        weight = node.name.split("/")[0].endswith(("wgrad", "embedding.backward"))
        assert node.get("part") == (("weight" if weight else "input") if backward else None), node.name


def work(traces: Any, rank: int) -> Counter[tuple[str, str, int, int]]:
    """What a rank computes and communicates but for messages: operation, phase, size, work."""
    return Counter(
        (str(n.get("op")), str(n.get("phase")), n.get("comm_size", 0), n.get("num_ops", 0))
        for n in traces.nodes(rank)
        if n.type in (NodeType.COMP, NodeType.COMM_COLL)
    )


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"zero": 1}, {}])
def test_a_rank_does_the_same_work_with_and_without_a_split(options: dict[str, Any]) -> None:
    common = {"pp": 2, "tp": 2, "batch": 4, "seq": 32, "sizes": SMALL, **options}
    whole = stage.synthesize("llama3-8b", "megatron_sp", schedule="1f1b", **common)
    split = stage.synthesize("llama3-8b", "megatron_sp", schedule="zb-h1", **common)
    for rank in range(4):
        assert work(whole, rank) == work(split, rank)


def waits(nodes: list[TraceNode]) -> dict[int, set[int]]:
    """All that each node waits for, near and far."""
    found: dict[int, set[int]] = {}
    for node in nodes:
        found[node.id] = {*node.data_deps}.union(*(found[dep] for dep in node.data_deps))
    return found


def test_weight_gradients_wait_for_the_cotangents_of_their_layer() -> None:
    traces = stage.synthesize(
        "llama3-8b", "megatron", pp=2, schedule="zb-h1", batch=4, seq=32, sizes=SMALL | {"layers": 2}
    )
    nodes = list(traces.nodes(1))
    by_name = {node.name: node for node in nodes}
    for i in range(4):
        gradient = by_name[f"layer1.mlp.down_proj.wgrad/backward/mb{i}"]
        direct = {node.name for node in nodes if node.id in gradient.data_deps}
        assert f"layer1.mlp.act/forward/mb{i}" in direct
        assert f"head.norm.backward/backward/mb{i}" in direct
        late = by_name[f"layer1.attn.qkv_proj.wgrad/backward/mb{i}"]
        assert by_name[f"layer1.attn.core.backward/backward/mb{i}"].id in late.data_deps
    sent = by_name["pipeline.send_backward/pipeline/mb0"]
    assert not [n for n in nodes if n.id in waits(nodes)[sent.id] and n.name.endswith(".wgrad/backward/mb0")]
