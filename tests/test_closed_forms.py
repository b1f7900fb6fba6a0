"""What communication must be, as formulas: counted and summed over the nodes of synthesized traces.

L layers, t = tp, act = batch x seq x d_model elements of one micro-batch of one replica; 2 bytes an element (bf16).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import stage
from stage.catalog import load_strategy
from stage.trace.node import NodeType, TraceNode
from stage.traceset import TraceSet

BF16, FP32, INT64 = 2, 4, 8
SHAPES = [
    {"layers": 1, "d_model": 32, "seq": 16, "micro_batch": 1},
    {"layers": 3, "d_model": 64, "seq": 48, "micro_batch": 2},
]


def job(shape: dict[str, int], model: str = "llama3-8b", **options: Any) -> TraceSet:
    """A tiny Llama of this shape (or a Mixtral), with one micro-batch unless `batch` says otherwise."""
    dp, d_model = options.get("dp", 1), shape["d_model"]
    sizes = {
        "layers": shape["layers"],
        "d_model": d_model,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": d_model // 8,
        "vocab": 64,
    }
    sizes |= {"experts": 8, "top_k": 2, "expert_d_ff": 48} if model == "mixtral-8x7b" else {"d_ff": 96}
    options.setdefault("batch", shape["micro_batch"] * dp)
    return stage.synthesize(
        model, options.pop("strategy", "megatron"), sizes=sizes | options.pop("sizes", {}), seq=shape["seq"],
        micro_batch=shape["micro_batch"], vocab_multiple=1, **options,
    )  # fmt: skip


def act(shape: dict[str, int]) -> int:
    """Elements of an activation of one micro-batch of one replica."""
    return shape["micro_batch"] * shape["seq"] * shape["d_model"]


def communication(traces: TraceSet, rank: int = 0) -> Iterator[TraceNode]:
    return (node for node in traces.nodes(rank) if node.type != NodeType.COMP)


def table(traces: TraceSet, rank: int = 0, **where: str) -> Counter[tuple[str, str, int]]:
    """How many collectives or messages there are of each (phase, op, bytes), with these attributes."""
    return Counter(
        (str(node.get("phase")), str(node.get("op")), int(str(node.get("comm_size"))))
        for node in communication(traces, rank)
        if all(node.get(key) == value for key, value in where.items())
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel(shape: dict[str, int], tp: int) -> None:
    layers, tokens = shape["layers"], shape["micro_batch"] * shape["seq"]
    assert table(job(shape, tp=tp)) == {
        ("forward", "all_reduce", act(shape) * BF16): 2 * layers + 1,
        ("forward", "all_reduce", tokens * FP32): 3,
        ("backward", "all_reduce", act(shape) * BF16): 2 * layers + 1,
        ("optimizer", "all_reduce", FP32): 1,
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("regather", [True, False])
def test_sequence_parallel(shape: dict[str, int], tp: int, regather: bool) -> None:
    layers, tokens = shape["layers"], shape["micro_batch"] * shape["seq"]
    strategy = load_strategy("megatron_sp").replace(regather=["tp"] if regather else [])
    whole, part = act(shape) * BF16, act(shape) // tp * BF16
    assert table(job(shape, tp=tp, strategy=strategy)) == {
        ("forward", "reduce_scatter", whole): 2 * layers + 1,
        ("forward", "all_gather", part): 2 * layers + 1,
        ("forward", "all_reduce", tokens * FP32): 3,
        ("backward", "reduce_scatter", whole): 2 * layers + 1,
        ("backward", "all_gather", part): (4 if regather else 2) * layers + (2 if regather else 1),
        ("finalize", "all_reduce", (2 * layers + 1) * shape["d_model"] * FP32): 1,
        ("optimizer", "all_reduce", FP32): 1,
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sp", [False, True])
def test_recomputed_layers_repeat_their_forward(shape: dict[str, int], sp: bool) -> None:
    layers, whole, part = shape["layers"], act(shape) * BF16, act(shape) // 2 * BF16
    found = table(job(shape, tp=2, strategy="megatron_sp" if sp else "megatron", recompute="full"), axes="tp")
    again = {key: count for key, count in found.items() if key[0] == "recompute"}
    if sp:
        expected = {"reduce_scatter": (whole, 2 * layers), "all_gather": (part, 2 * layers)}
    else:
        expected = {"all_reduce": (whole, 2 * layers)}
    assert again == {("recompute", op, size): count for op, (size, count) in expected.items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_norms_of_queries_and_keys_are_summed_also_without_sequence_parallel(tp: int) -> None:
    shape = SHAPES[1]
    sizes = {"layers": 3, "d_model": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, "vocab": 64, "d_ff": 96}
    traces = stage.synthesize(
        "qwen3-8b", "megatron", tp=tp, batch=2, micro_batch=2, seq=shape["seq"], sizes=sizes, vocab_multiple=1
    )
    sums = {key: n for key, n in table(traces).items() if key[0] == "finalize"}
    assert sums == {("finalize", "all_reduce", 3 * 2 * 8 * FP32): 1}


@pytest.mark.parametrize(("dp", "tp", "pp", "zero"), [(2, 2, 1, 0), (2, 2, 2, 0), (4, 1, 1, 1), (2, 2, 2, 1)])
def test_gradient_norm_is_summed_over_all_whose_gradients_differ(
    dp: int, tp: int, pp: int, zero: int
) -> None:
    shape = {**SHAPES[1], "layers": 2}
    traces = job(shape, dp=dp, tp=tp, pp=pp, zero=zero, batch=2 * dp * pp)
    for rank in traces.ranks:
        (norm,) = [
            n
            for n in communication(traces, rank)
            if n.get("phase") == "optimizer" and n.get("comm_size") == 4
        ]
        group = traces.groups[str(norm.get("pg_name"))]
        replica = [r for r in traces.ranks if r // tp % dp == rank // tp % dp]
        assert group == (list(traces.ranks) if zero else replica)


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_once_a_step_however_many_micro_batches(zero: int) -> None:
    shape = SHAPES[1]
    counts = [
        table(job(shape, dp=4, zero=zero, batch=2 * 4 * m), axes="dp")
        - Counter({("optimizer", "all_reduce", 4): 1})
        for m in (1, 4)
    ]
    assert counts[0] == counts[1]
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    elements = 3 * layer + 2 * 64 * 64 + 64
    if zero:
        padded = -(-elements // 128) * 128
        expected = {
            ("backward", "reduce_scatter", padded * FP32): 1,
            ("optimizer", "all_gather", padded // 4 * BF16): 1,
        }
    else:
        expected = {("backward", "all_reduce", elements * FP32): 1}
    assert counts[0] == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dp", [2, 8])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_fsdp(shape: dict[str, int], dp: int, micro_batches: int) -> None:
    d_model, layers = shape["d_model"], shape["layers"]
    batch = shape["micro_batch"] * dp * micro_batches
    embedding, norm = 64 // dp * d_model, -(-d_model // dp)
    layer = (4 * d_model * d_model + 3 * d_model * 96) // dp + 2 * norm
    head = 64 // dp * d_model + norm
    expected: Counter[tuple[str, str, int]] = Counter({("optimizer", "all_reduce", FP32): 1})
    for block, count, again in ((embedding, 1, 1), (layer, layers, 1), (head, 1, 0)):
        expected["forward", "all_gather", block * BF16] += count * micro_batches
        expected["backward", "all_gather", block * BF16] += count * micro_batches * again
        expected["backward", "reduce_scatter", block * dp * FP32] += count
    assert table(job(shape, strategy="fsdp", dp=dp, batch=batch)) == +expected


def test_fsdp_that_keeps_parameters_gathers_them_once() -> None:
    shape = SHAPES[1]
    strategy = load_strategy("fsdp")
    counts = {}
    for reshard in (True, False, 2):
        traces = job(shape, strategy=strategy.replace(reshard_after_forward=reshard), dp=8)
        counts[reshard] = {
            key: n for key, n in table(traces).items() if key[:2] == ("backward", "all_gather")
        }
    layer = ((4 * 64 * 64 + 3 * 64 * 96) // 8 + 2 * 8) * BF16
    assert counts[True][("backward", "all_gather", layer)] == 3
    assert counts[False] == {}
    assert counts[2][("backward", "all_gather", layer * 4)] == 3


@pytest.mark.parametrize("shape", SHAPES)
def test_hsdp_sums_each_shard_over_its_replicas(shape: dict[str, int]) -> None:
    strategy = load_strategy("hsdp").replace(dp_shard=4)
    traces = job(shape, strategy=strategy, dp=8)
    scattered, summed = table(traces, op="reduce_scatter"), table(traces, op="all_reduce", phase="backward")
    assert {(size // 4, n) for (_, _, size), n in scattered.items()} == {
        (size, n) for (_, _, size), n in summed.items()
    }
    groups = {
        str(n.get("op")): traces.groups[str(n.get("pg_name"))]
        for n in communication(traces)
        if n.get("phase") == "backward"
    }
    assert groups == {"all_gather": [0, 1, 2, 3], "reduce_scatter": [0, 1, 2, 3], "all_reduce": [0, 4]}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dp", "tp", "ep"), [(2, 1, 2), (4, 1, 4), (4, 1, 2), (2, 2, 2), (2, 2, 4), (1, 2, 2)]
)
def test_experts(shape: dict[str, int], dp: int, tp: int, ep: int) -> None:
    """2 + 2 all-to-alls of k x tokens x d_model, and the probabilities of k x tokens with each dispatch."""
    sent = 2 * shape["micro_batch"] * shape["seq"] // tp
    traces = job(shape, "mixtral-8x7b", strategy="megatron_moe", dp=dp, tp=tp, ep=ep)
    layers, d_model = shape["layers"], shape["d_model"]
    assert table(traces, op="all_to_all") == {
        ("forward", "all_to_all", sent * d_model * BF16): 2 * layers,
        ("forward", "all_to_all", sent * BF16): layers,
        ("backward", "all_to_all", sent * d_model * BF16): 2 * layers,
        ("backward", "all_to_all", sent * BF16): layers,
    }
    counted = [n for n in communication(traces) if n.get("dtype") == "int64"]
    assert [n.get("comm_size") for n in counted] == [8 * INT64] * layers
    for node in [*counted, *(n for n in communication(traces) if n.get("op") == "all_to_all")]:
        assert len(traces.groups[str(node.get("pg_name"))]) == ep


@pytest.mark.parametrize(("dp", "ep"), [(4, 2), (4, 4), (2, 1)])
def test_gradients_of_experts_are_summed_over_their_replicas_alone(dp: int, ep: int) -> None:
    shape = SHAPES[1]
    traces = job(shape, "mixtral-8x7b", dp=dp, ep=ep, zero=0)
    expert = 3 * (8 // ep) * 3 * 64 * 48
    dense = 3 * (4 * 64 * 64 + 8 * 64 + 2 * 64) + 2 * 64 * 64 + 64
    reductions = {
        len(traces.groups[str(n.get("pg_name"))]): n.get("comm_size")
        for n in communication(traces)
        if "bucket" in n.name and n.get("op") == "all_reduce"
    }
    expected = {dp: (dense + (expert if ep == 1 else 0)) * FP32}
    assert reductions == expected | ({dp // ep: expert * FP32} if 1 < ep < dp else {})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "tp", "sp"), [(2, 1, False), (4, 1, False), (2, 2, False), (2, 2, True)])
def test_pipeline(schedule: str, pp: int, tp: int, sp: bool) -> None:
    """One message of act (act / t under SP) a micro-batch, boundary and direction."""
    shape, micro_batches = {**SHAPES[1], "layers": 4}, 3
    traces = job(
        shape,
        pp=pp,
        tp=tp,
        batch=2 * micro_batches,
        schedule=schedule,
        strategy="megatron_sp" if sp else "megatron",
    )
    size = act(shape) // (tp if sp else 1) * BF16
    for rank in traces.ranks:
        place = rank // tp
        found = Counter(
            (
                str(n.get("op")),
                int(str(n.get("comm_dst" if n.get("op") == "send" else "comm_src"))) // tp,
                n.get("comm_size"),
            )
            for n in communication(traces, rank)
            if n.get("phase") == "pipeline"
        )
        neighbours = [stage for stage in (place - 1, place + 1) if 0 <= stage < pp]
        assert found == {(op, stage, size): micro_batches for op in ("send", "recv") for stage in neighbours}


@pytest.mark.parametrize("pp", [2, 4])
def test_tied_embedding_is_summed_over_first_and_last_stage(pp: int) -> None:
    shape = {**SHAPES[1], "layers": 4}
    traces = job(shape, pp=pp, tp=2, sizes={"tied": True})
    for rank in traces.ranks:
        found = [n for n in communication(traces, rank) if "tied" in n.name]
        ends = rank // 2 in (0, pp - 1)
        assert [n.get("comm_size") for n in found] == [64 // 2 * 64 * FP32] * ends
        if ends:
            assert traces.groups[str(found[0].get("pg_name"))] == [rank % 2, rank % 2 + 2 * (pp - 1)]
