"""The data row: what each member of data parallelism sends in a step, by closed forms, in trace sets that verify.

The model is the Llama of the FSDP2 record: 3 layers, D 64, F 176, 4 heads, 2 of them KV, vocabulary 1000. Expected
numbers are counted by hand from its parameters; where a record has the same case it is named.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import stage
from stage.catalog import load_strategy
from stage.errors import StrategyError
from stage.strategy import Strategy
from stage.trace.node import TraceNode
from stage.traceset import TraceSet
from stage.verification import verify_set

LAYERS, D, F, KV, VOCAB, DP = 3, 64, 176, 32, 1000, 8
SIZES = {"layers": LAYERS, "d_model": D, "d_ff": F, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": VOCAB}
TABLE, LAYER, HEAD = VOCAB * D, 2 * D + 2 * D * D + 2 * D * KV + 3 * D * F, D + VOCAB * D
MODEL = TABLE + LAYERS * LAYER + HEAD
MICRO_BATCHES = 3

Sent = Counter[tuple[str, int, int]]
"""Kind, ranks of the group and `comm_size`, and how often in a step."""


def traces(strategy: str | Strategy, **options: Any) -> TraceSet:
    shape: dict[str, Any] = {
        "dp": DP,
        "batch": DP * MICRO_BATCHES,
        "seq": 16,
        "vocab_multiple": 1,
        "clip": False,
    }
    return stage.synthesize("llama3-8b", strategy, sizes=SIZES, **shape | options)


def sent(found: TraceSet) -> Sent:
    """What the first rank sends."""
    names = {0: "all_reduce", 2: "all_gather", 7: "reduce_scatter"}
    groups = found.groups
    return Counter(
        (
            names[int(str(n.get("comm_type")))],
            len(groups[str(n.get("pg_name"))]),
            int(str(n.get("comm_size"))),
        )
        for n in found.nodes(0)
        if n.get("comm_type") is not None
    )


def bucket(elements: int) -> int:
    """A bucket of all parameters: each starts at a multiple of 64, the end is one of lcm(8, 128)."""
    assert all(count % 64 == 0 for count in (TABLE, LAYER, HEAD)), "no parameter needs padding here"
    return -(-elements // 128) * 128


def gathered(ranks: int, times: int, blocks: int, width: int) -> Sent:
    """Gathers of shards: embedding and head `times`, each layer `blocks` times."""
    found: Sent = Counter()
    found[("all_gather", ranks, TABLE // ranks * width)] += times
    found[("all_gather", ranks, LAYER // ranks * width)] += blocks * LAYERS
    found[("all_gather", ranks, HEAD // ranks * width)] += MICRO_BATCHES
    return +found


def scattered(ranks: int, width: int, times: int = 1) -> Sent:
    whole = {TABLE: 1, LAYER: LAYERS, HEAD: 1}
    return Counter({("reduce_scatter", ranks, size * width): count * times for size, count in whole.items()})


M = MICRO_BATCHES
ZERO1 = Counter(
    {("reduce_scatter", DP, 4 * bucket(MODEL)): 1, ("all_gather", DP, 2 * bucket(MODEL) // DP): 1}
)
OUTER: Sent = Counter(
    {("all_reduce", 2, 4 * size // 4): count for size, count in ((TABLE, 1), (LAYER, LAYERS), (HEAD, 1))}
)
ROWS: dict[str, tuple[str, dict[str, Any], Sent]] = {
    "DDP": ("ddp", {"bucket_size": 0}, Counter({("all_reduce", DP, 4 * MODEL): 1})),
    "DDP, bf16 gradients": (
        "ddp",
        {"bucket_size": 0, "grad_dtype": "bf16"},
        Counter({("all_reduce", DP, 2 * MODEL): 1}),
    ),
    "DDP without overlap": (
        "ddp",
        {"bucket_size": 0, "overlap_grad": False},
        Counter({("all_reduce", DP, 4 * MODEL): 1}),
    ),
    "ZeRO-1": ("ddp", {"zero": 1, "bucket_size": 0}, ZERO1),
    "ZeRO-2, gradients scattered every micro-batch": (
        "ddp",
        {"zero": 2, "bucket_size": 0},
        Counter(
            {("reduce_scatter", DP, 4 * bucket(MODEL)): M, ("all_gather", DP, 2 * bucket(MODEL) // DP): 1}
        ),
    ),
    "ZeRO-2, once a step": ("ddp", {"zero": 2, "bucket_size": 0, "grad_reduce": "step"}, ZERO1),
    "ZeRO-1, fp8 parameters": (
        "ddp",
        {"zero": 1, "bucket_size": 0, "param_dtype": "fp8"},
        Counter({("reduce_scatter", DP, 4 * bucket(MODEL)): 1, ("all_gather", DP, bucket(MODEL) // DP): 1}),
    ),
    "ZeRO-3": ("fsdp", {}, gathered(DP, 2 * M, 2 * M, 2) + scattered(DP, 4)),
    "ZeRO-3 without reshard": (
        "fsdp",
        {"reshard_after_forward": False},
        gathered(DP, M, M, 2) + scattered(DP, 4),
    ),
    "ZeRO-3, resharded over 2 ranks": (
        "fsdp",
        {"reshard_after_forward": 2},
        gathered(DP, M, M, 2)
        + scattered(DP, 4)
        + Counter({("all_gather", 2, TABLE // 2 * 2): M, ("all_gather", 2, LAYER // 2 * 2): M * LAYERS}),
    ),
    "ZeRO-3, gradients scattered every micro-batch": (
        "fsdp",
        {"grad_reduce": "microbatch"},
        gathered(DP, 2 * M, 2 * M, 2) + scattered(DP, 4, times=M),
    ),
    "ZeRO-3, fp32 parameters, bf16 gradients": (
        "fsdp",
        {"param_dtype": "fp32", "grad_dtype": "bf16"},
        gathered(DP, 2 * M, 2 * M, 4) + scattered(DP, 2),
    ),
    "HSDP, 4 of 8 ranks shard": (
        "hsdp",
        {"dp_shard": 4},
        gathered(4, 2 * M, 2 * M, 2) + scattered(4, 4) + OUTER,
    ),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"data[{row}]")
def test_a_step_sends_what_its_parameters_say(row: str) -> None:
    strategy, options, expected = ROWS[row]
    found = traces(strategy, **options)
    assert verify_set(found).ok
    assert sent(found) == expected


RECORD = Path(__file__).parent / "data" / "groundtruth" / "fsdp2_llama.json.gz"
RUNS = [
    run
    for run in json.loads(gzip.decompress(RECORD.read_bytes()))["runs"]
    if (run["config"]["tp"], run["config"]["wrap"], run["config"]["dims"]["vocab"]) == (1, "titan", VOCAB)
]


def named(run: dict[str, Any]) -> str:
    config = run["config"]
    parts = ("hsdp_replicate", "reshard_after_forward", "mp", "grad_accum")
    return "data[FSDP2 record: " + ", ".join(f"{part} {config[part]}" for part in parts) + "]"


@pytest.mark.parametrize("run", RUNS, ids=named)
def test_fsdp2_sends_the_same(run: dict[str, Any]) -> None:
    """The counts of the record by kind, group and bytes, without those of clipping; its order is compared elsewhere."""
    config = run["config"]
    dtype, reduced = ("fp32", "fp32") if config["mp"] == "fp32" else ("bf16", "fp32")
    replicas = config["hsdp_replicate"]
    found = traces(
        "fsdp",
        batch=DP * config["grad_accum"],
        dtype=dtype,
        grad_dtype=reduced,
        dp_shard=DP // replicas if replicas > 1 else None,
        reshard_after_forward=config["reshard_after_forward"],
    )
    ops = [op for op in run["ops"] if "op" in op and op["phase"] in ("fwd", "bwd")]
    recorded = Counter((op["op"], len(op["group"]), op["bytes"]) for op in ops)
    assert recorded
    assert sent(found) == recorded


def test_buckets_cut_the_same_bytes_into_more_collectives() -> None:
    whole, cut = (traces("ddp", bucket_size=size) for size in (0, 20_000))
    assert verify_set(cut).ok
    counts = sent(cut)
    assert sum(counts.values()) > 5
    assert sum(size * n for (_, _, size), n in counts.items()) == 4 * MODEL
    assert all(size // 4 >= 20_000 for _, _, size in counts if size != min(s for _, _, s in counts))
    assert sent(whole) == ROWS["DDP"][2]


def waits(nodes: list[TraceNode]) -> dict[int, set[int]]:
    """All that each node waits for, near and far."""
    found: dict[int, set[int]] = {}
    for node in nodes:
        found[node.id] = {*node.data_deps}.union(*(found[dep] for dep in node.data_deps))
    return found


def ahead(found: TraceSet, phase: str) -> set[int]:
    """How many blocks may not have begun when the parameters of one are gathered, of those that run before it.

    A layer has begun once its first kernel of the phase has run; blocks of the ends are left out.
    """
    nodes = list(found.nodes(0))
    near = waits(nodes)
    kernels: dict[int, int] = {}
    for node in nodes:
        layer = node.get("layer")
        if node.get("phase") == phase and node.get("num_ops") is not None and node.get("micro_batch") == 1:
            kernels.setdefault(-1 if layer is None else int(str(layer)), node.id)
    distances = set()
    for node in nodes:
        own = (
            "parameters.all_gather" in node.name
            and node.get("phase") == phase
            and node.get("micro_batch") == 1
        )
        if own and node.get("layer") is not None:
            layer = int(str(node.get("layer")))
            before = range(layer) if phase == "forward" else range(layer + 1, max(kernels) + 1)
            distances.add(sum(kernels[other] not in near[node.id] for other in before))
    return distances


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3], ids=lambda n: f"data[prefetch {n}]")
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_parameters_are_gathered_so_many_blocks_ahead(prefetch: int, phase: str) -> None:
    shape: dict[str, Any] = {"dp": 2, "batch": 4, "seq": 16, "clip": False, "prefetch": prefetch}
    found = stage.synthesize("llama3-8b", "fsdp", sizes=SIZES | {"layers": 8}, **shape)
    assert verify_set(found).ok
    assert max(ahead(found, phase)) == prefetch


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "prefetch": (
        {"prefetch": 2},
        "strategy ddp: prefetch = 2 is of gathered parameters, but zero = 0 gathers none before a block runs; "
        "set zero = 3, or leave it out",
    ),
    "reshard_after_forward": (
        {"reshard_after_forward": False, "zero": 1},
        "strategy ddp: reshard_after_forward = false is of gathered parameters, but zero = 1 gathers none before a "
        "block runs; set zero = 3, or leave it out",
    ),
    "a number that does not divide": (
        {"reshard_after_forward": 3, "zero": 3},
        "reshard_after_forward = 3 does not divide dp = 8; choose a number that does, true or false",
    ),
    "param_dtype": (
        {"param_dtype": "int8"},
        "param_dtype is 'int8'; choose one of bf16, fp16, fp32, fp64, fp8",
    ),
    "grad_reduce": (
        {"grad_reduce": "epoch"},
        "strategy ddp: grad_reduce is 'epoch'; known: step, microbatch",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_options_that_would_do_nothing_are_refused(what: str) -> None:
    options, message = REFUSALS[what]
    with pytest.raises(StrategyError) as refused:
        traces("ddp", **options)
    assert str(refused.value) == message


def test_resharding_over_all_ranks_is_resharding() -> None:
    one, other = (traces("fsdp", reshard_after_forward=value) for value in (8, True))
    assert one.rank(0) == other.rank(0)


def test_the_preset_of_torchtitan_is_what_is_compared_with_its_record() -> None:
    """FSDP x TP + SP of the FSDP2 record (`benchmarks.records`): nothing fused, nothing gathered twice."""
    compared = load_strategy("megatron_sp").replace(zero=3, fuse=False, regather=[], overlap_grad=True)
    one, other = (traces(strategy, dp=4, tp=2) for strategy in (load_strategy("torchtitan"), compared))
    assert [one.rank(rank) for rank in one.ranks] == [other.rank(rank) for rank in other.ranks]


def test_the_preset_of_zero_2_scatters_every_micro_batch() -> None:
    assert sent(traces("zero2")) == ROWS["ZeRO-2, gradients scattered every micro-batch"][2]
