"""Peak memory: lifetimes by hand, sums over a schedule by a slow count, what is stored, and orders that must hold."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stage.blocks import cross_entropy, mlp
from stage.cost.block_memory import BlockMemory
from stage.cost.chunk_memory import CATEGORIES
from stage.cost.memory import RankMemory
from stage.cost.runtime import Runtime
from stage.graph import Builder, Graph
from stage.memory import JobMemory, job_memory
from stage.mesh import build_mesh
from stage.passes.backward import differentiate
from stage.passes.shard import shard
from stage.pipeline.schedules import SCHEDULES, get_schedule
from stage.trace.concrete import Concrete
from tests.small import MODELS, request

BARE = Runtime(fused_accumulation=True, workspace=0, fraction_reserved=0, context=0)
SIZES = {"batch": 2, "seq": 8, "d_model": 4, "d_ff": 16, "vocab": 32}
TOKENS, D, F, V = 16, 4, 16, 32


def block(graph: Graph, runtime: Runtime = BARE) -> BlockMemory:
    mesh = build_mesh()
    both = differentiate(shard(graph, (), mesh, SIZES))
    return BlockMemory(both, Concrete(SIZES, mesh, {"compute": "bf16", "gradient": "fp32"}), runtime)


def totals(found: BlockMemory, kind: str) -> dict[str, int]:
    run = found.runs[kind]
    return dict(zip(run.nodes, run.levels.sum(axis=1).tolist(), strict=True))


def test_an_mlp_by_hand() -> None:
    """Two bytes an element; backward frees what it has read, and adds gradients of weights to buffers of their own."""
    b = Builder("mlp")
    found = block(b.graph(mlp(b, b.input("x", "batch", "seq", "d_model"))))
    x, hidden = 2 * TOKENS * D, 2 * TOKENS * F
    assert found.kept == {"x": x, "up_proj": hidden, "act": hidden}
    assert totals(found, "F") == {
        "up_proj": x + hidden,
        "act": x + 2 * hidden,
        "down_proj": 2 * x + 2 * hidden,
    }
    assert totals(found, "B") == {
        "down_proj.dgrad": 2 * x + 3 * hidden,  # dy and d.act beside what is kept
        "down_proj.wgrad": 2 * x + 3 * hidden,
        "act.backward": x + 3 * hidden,  # act and dy are gone, d.up_proj is new
        "up_proj.dgrad": 2 * x + hidden,
        "up_proj.wgrad": 2 * x + hidden,
    }


def test_gradients_that_no_product_adds_are_there_before_they_are_added() -> None:
    b = Builder("mlp")
    graph = b.graph(mlp(b, b.input("x", "batch", "seq", "d_model")))
    apart = totals(block(graph, Runtime(fused_accumulation=False, workspace=0)), "B")
    fused = totals(block(graph), "B")
    more = {name: apart[name] - fused[name] for name in fused}
    assert more == {name: 2 * D * F if name.endswith("wgrad") else 0 for name in fused}


@pytest.mark.parametrize("fused", [False, True])
def test_logits_by_hand(fused: bool) -> None:
    """Kept in fp32 while the first copy is there too, or in place of which the gradient is written."""
    b = Builder("head")
    logits, labels = (
        b.input("logits", "batch", "seq", "vocab"),
        b.input("labels", "batch", "seq", dtype="int64"),
    )
    found = block(b.graph(cross_entropy(b, logits, labels)), Runtime(fused_loss=fused, workspace=0))
    rows = {"labels": 8 * TOKENS, "loss.max": 4 * TOKENS, "loss.sum_exp": 4 * TOKENS}
    assert found.kept == {"logits": (2 if fused else 4) * TOKENS * V} | rows
    first = totals(found, "F")["loss.max"]
    assert first == (2 if fused else 6) * TOKENS * V + 4 * TOKENS
    backward = totals(found, "B")["loss.sum_exp.backward"]
    gradients = 0 if fused else 2 * TOKENS * V
    assert backward == found.kept["logits"] + gradients + 8 * TOKENS + 3 * 4 * TOKENS


def ranks(model: str = "llama3-8b", strategy: str = "megatron_sp", **options: Any) -> JobMemory:
    return job_memory(request(model, strategy, **options), BARE)


def documented(name: str, p: int, v: int, m: int) -> int:
    """The last column of the table in docs/pipeline.md."""
    table = {"gpipe": m, "1f1b": p, "interleaved": p * (v + 1) - 1, "looped-bfs": v * m, "zb-h1": p}
    return (table | {"zb-v": 2 * p, "dualpipe-v": 2 * p + 1})[name]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 4])
def test_chunks_of_activations_kept_are_those_of_the_documentation(name: str, p: int) -> None:
    v, m = get_schedule(name).chunks[0], 2 * p + 2 * (name == "zb-v")
    found = ranks(pp=p, schedule=name, batch=m, sizes={"layers": p * v})
    assert max(rank.kept_chunks for rank in found.ranks) == documented(name, p, v, m)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_activations_of_a_stage_are_those_of_its_chunks_in_flight(name: str) -> None:
    """A stage between the first and the last has one layer a chunk, all alike."""
    p, v, m = 4, get_schedule(name).chunks[0], 8
    rank = ranks(pp=p, schedule=name, batch=m, sizes={"layers": p * v}).ranks[1]
    layer = sum(rank.chunks[0].kept.values())
    assert max(rank.curve()["activations"]) == rank.kept_chunks * layer
    assert rank.curve()["activations"][-1] == 0


def slowly(rank: RankMemory) -> Iterator[int]:
    """The most bytes within each action besides what is stored, span by span and node by node."""
    held: dict[tuple[int, int, int], int] = {}
    for action in rank.actions:
        chunk = rank.chunks[action.chunk]
        units = chunk.units if action.kind == "F" else chunk.units[::-1]
        most = 0
        for at in units:
            key, block = (action.chunk, action.micro_batch, at), chunk.blocks[at]
            run = block.runs[action.kind]
            beside = sum(size for other, size in held.items() if other != key or action.kind == "F")
            for node in range(len(run.nodes)):
                alive = [span.bytes for span in run.spans if span.first <= node <= span.last]
                most = max(most, beside + sum(alive))
            left = {"F": block.kept, "I": block.handed if action.kind == "I" else {}}.get(action.kind, {})
            held[key] = sum(left.values())
        yield most
    assert not any(held.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_over_a_schedule_are_those_of_a_slow_count(schedule: str) -> None:
    chunks = get_schedule(schedule).chunks[0]
    found = ranks(
        "gpt3-125m", pp=2, tp=2, schedule=schedule, batch=6, dropout=True, sizes={"layers": 4 * chunks}
    )
    for rank in found.ranks:
        stored = rank.stored.total + rank.most[0, CATEGORIES.index("parameters")] - rank.stored.parameters
        placeholders = int(rank.after[-1].sum()) - rank.stored.total
        assert stored == rank.stored.total
        expected = [most + rank.stored.total + placeholders for most in slowly(rank)]
        assert rank.most.sum(axis=1).tolist() == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_categories_sum_to_the_peak_which_is_the_most_of_all(model: str, zero: int) -> None:
    strategy = "fsdp" if zero == 3 else "megatron_sp"
    found = ranks(model, strategy, dp=2, pp=2 if zero < 3 else 1, batch=8, zero=zero)
    for rank in found.ranks:
        peak = rank.peak
        assert sum(peak.categories.values()) == peak.bytes == rank.most.sum(axis=1).max()
        assert peak.bytes >= rank.after.sum(axis=1).max()
        assert peak.tensors[0][1] <= peak.bytes - rank.stored.total
        assert peak.node
        assert sum(peak.in_flight.values()) <= rank.after[:, CATEGORIES.index("activations")].max()


def test_what_is_stored_by_hand() -> None:
    """18 bytes a parameter without sharding: bf16, an fp32 gradient, master and two moments; Adam's over dp after."""
    job = request("llama3-8b", "megatron", dp=2, zero=0)
    concrete = Concrete(dict(job.sizes), job.mesh, {})
    count = sum(
        int(concrete.whole(p).elements) for unit in job.model.blocks for p in job.model.graph(unit).parameters
    )
    plain = job_memory(job, BARE).ranks[0].stored
    assert (plain.parameters, plain.gradients, plain.optimizer) == (2 * count, 4 * count, 12 * count)
    sharded = ranks("llama3-8b", "megatron", dp=2, zero=1).ranks[0].stored
    assert 0 <= sharded.optimizer - 6 * count < 12 * 64 * 20  # parameters start at multiples of 64 elements
    whole = ranks("llama3-8b", "fsdp", dp=2).ranks[0].stored  # the shard is the master: 4 + 4 + 8 over dp
    assert (whole.parameters, whole.gradients, whole.optimizer) == (2 * count, 2 * count, 4 * count)
    fp32 = ranks("llama3-8b", "megatron", dp=2, zero=0, param_dtype="fp32").ranks[0].stored
    assert (fp32.parameters, fp32.optimizer) == (4 * count, 8 * count)  # which is its own master


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_more_zero_stores_less(model: str) -> None:
    found = [ranks(model, dp=4, batch=8, zero=zero).ranks[0].stored.total for zero in (0, 1, 2)]
    found.append(ranks(model, "fsdp", dp=4, batch=8).ranks[0].stored.total)
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


def test_more_micro_batches_in_flight_never_need_less() -> None:
    found = [ranks(pp=2, schedule="gpipe", batch=m).peak.bytes for m in range(1, 6)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_more_recomputation_needs_less() -> None:
    found = [
        ranks("gpt3-125m", pp=2, batch=4, recompute=policy, attention="unfused", dropout=True, seq=64,
              sizes={"layers": 8, "positions": 64}).peak.bytes
        for policy in ("none", "selective", "full")
    ]  # fmt: skip
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


def test_fsdp_gathers_a_block_and_those_ahead() -> None:
    """While a layer runs its parameters are whole beside the shards, and one ahead is in a buffer."""
    sizes = {"layers": 4}
    alone, ahead = (ranks("llama3-8b", "fsdp", dp=2, prefetch=n, sizes=sizes).ranks[0] for n in (0, 1))
    layer = alone.chunks[0].gathered(1)
    own = sum(p.elements for p in alone.chunks[0].plan.units[1].parameters)
    assert layer == 2 * own
    assert ahead.peak.categories["communication"] - alone.peak.categories["communication"] in (0, layer)
    assert ahead.peak.bytes > alone.peak.bytes
    kept = ranks("llama3-8b", "fsdp", dp=2, reshard_after_forward=False, sizes=sizes)
    assert kept.peak.bytes > ahead.peak.bytes


def test_gradients_that_wait_for_the_last_micro_batch_stay_whole_under_fsdp() -> None:
    step = ranks("llama3-8b", "fsdp", dp=2, batch=4, grad_reduce="step").ranks[0]
    micro = ranks("llama3-8b", "fsdp", dp=2, batch=4, grad_reduce="microbatch").ranks[0]
    whole = sum(step.chunks[0].whole(at) for at in step.chunks[0].units)
    assert step.curve()["gradients"][-1] - micro.curve()["gradients"][-1] == 4 * whole


def test_what_the_allocator_never_sees_is_reserved_besides() -> None:
    job = request("llama3-8b", "megatron")
    bare, own = (
        job_memory(job, BARE),
        job_memory(job, Runtime(workspace=0, fraction_reserved=0.5, context=1000)),
    )
    fleeting = bare.peak.bytes - bare.ranks[0].stored.total
    assert bare.reserved == bare.peak.bytes
    assert own.reserved == round(bare.peak.bytes + 0.5 * fleeting) + 1000


def test_weights_quantised_once_are_stored_for_the_step() -> None:
    sizes = {"d_model": 128, "d_ff": 128, "heads": 8, "kv_heads": 8, "head_dim": 16, "seq": 128, "vocab": 128}
    plain, quantised = (ranks(dp=2, sizes=sizes, fp8=recipe) for recipe in ("none", "tensorwise"))
    more = quantised.peak.categories["parameters"] - plain.peak.categories["parameters"]
    layer = 4 * 128 * 128 + 3 * 128 * 128
    assert more == 2 * 2 * layer  # of two layers, a copy for each of forward and backward


def test_uneven_experts_need_more_on_the_rank_of_the_popular_ones() -> None:
    found = ranks("mixtral-8x7b", "megatron_moe", dp=2, ep=2, expert_load="zipf:1.5", batch=4)
    even = ranks("mixtral-8x7b", "megatron_moe", dp=2, ep=2, batch=4)
    assert len(found.ranks) == 2
    assert (
        max(rank.peak.bytes for rank in found.ranks)
        > even.peak.bytes
        > min(r.peak.bytes for r in found.ranks)
    )


@pytest.mark.parametrize("recompute", ["none", "every:2", "ops:norm,act", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("model", MODELS)
def test_memory_of_every_model_is_given_back(model: str, schedule: str, recompute: str) -> None:
    """Nothing is held after a step but what is stored, and no level is ever below that."""
    chunks = get_schedule(schedule).chunks[0]
    options: dict[str, Any] = {"pp": 2, "tp": 2, "batch": 4, "schedule": schedule, "recompute": recompute}
    for rank in ranks(model, "megatron_moe", **options, sizes={"layers": 4 * chunks}).ranks:
        assert not rank.after[-1, CATEGORIES.index("activations")]
        assert (rank.after >= rank.after[-1]).all()
        assert all(
            (run.levels >= 0).all()
            for block in rank.chunks[0].blocks
            for kind, run in block.runs.items()
            if kind in "FBIW"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "megatron_sp", "cp": 2, "context": "ring"},
        {"strategy": "megatron_sp", "cp": 2, "context": "ulysses", "tp": 2},
        {"strategy": "megatron_sp", "cp": 2, "context_balance": "none"},
        {"strategy": "hsdp", "dp": 4, "dp_shard": 2},
        {"strategy": "zero2", "dp": 2, "batch": 4},
        {"strategy": "tp_2d", "tp": 4, "tp_x": 2},
        {"strategy": "megatron_sp", "dp": 2, "fp8": "delayed", "fp8_param_gather": True, "zero": 1},
        {"strategy": "fsdp", "dp": 2, "pp": 2, "batch": 8, "reshard_after_forward": False},
    ],
    ids=str,
)
def test_other_ways_to_split_have_a_peak(options: dict[str, Any]) -> None:
    wide = {"d_model": 64, "d_ff": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 128, "seq": 32}
    found = ranks("llama3-8b", **options, sizes=wide)
    for rank in found.ranks:
        assert rank.peak.bytes > rank.stored.total > 0
        assert not rank.after[-1, CATEGORIES.index("activations")]


def test_the_report_is_plain_and_says_where_the_peak_is() -> None:
    found = ranks(pp=2, batch=4)
    report = json.loads(json.dumps(found.describe()))
    assert report["peak_memory_bytes"] == max(one["peak_bytes"] for one in report["classes"])
    first = report["classes"][0]
    assert sum(first["categories"].values()) == first["peak_bytes"]
    assert len(first["curve"]["activations"]) == len(first["actions"]) == 8
    assert first["action"] in first["actions"]
    assert sum(one["bytes"] for one in first["in_flight"]) <= max(first["curve"]["activations"])
    assert first["tensors"][0]["bytes"] > 0


def test_messages_of_the_pipeline_are_communication() -> None:
    """A cotangent of one micro-batch waits to be used by the last block of the first stage; none does without stages."""
    found = ranks(pp=2, batch=4)
    first = found.ranks[0].chunks[0]
    at = CATEGORIES.index("communication")
    assert first.peak("B").bytes[at] == first.step.message == 2 * 16 * 32
    assert ranks(batch=4).ranks[0].chunks[0].peak("B").bytes[at] == 0
    turn = ranks(pp=2, batch=4, schedule="zb-v", sizes={"layers": 4}).ranks[1]
    assert turn.chunks[0].peak("I").bytes[at] == 0  # the second chunk is on the same rank
