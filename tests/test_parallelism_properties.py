"""Whatever is drawn of model, mesh, schedule and options: it is refused in one line, or every invariant holds.

To draw a new option of `stage.synthesize` add its line to `OPTIONS`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stage.counting import count_parameters
from stage.errors import StageError
from stage.pipeline.bubble import run_schedule
from stage.pipeline.schedules import SCHEDULES
from stage.request import Request
from stage.synthesis import job
from stage.trace.node import NodeType, TraceNode
from stage.trace.verify import verify
from stage.traceset import TraceSet
from tests import expected
from tests import expected_communication as sent_by
from tests.small import MODELS, STRATEGIES, request, uses
from tests.test_conservation import ADAM_FLOPS, MATMULS, build_padded

FP32 = 4
FAMILIES = ("llama3-8b", "gpt3-125m", "qwen3-8b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v3")

SEQ = 4096
LARGE = {
    "d_model": 1024, "heads": 8, "head_dim": 128, "d_ff": 4096, "vocab": 4096, "seq": SEQ, "positions": SEQ,
    "experts": 8, "expert_d_ff": 4096, "shared_d_ff": 4096, "q_lora_rank": 512, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
"""Sizes that divide by whatever is drawn; nothing is computed with them."""

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "recompute": st.sampled_from(
        [
            "none",
            "full",
            "selective",
            "every:2",
            "ops:attention,norm",
            "ops:up_proj,act",
            "ops:mlp",
            "ops:moe",
        ]
    ),
    "zero": st.integers(0, 3),
    "attention": st.sampled_from(["fused", "unfused"]),
    "mask": st.sampled_from(["causal", "full"]),
    "dropout": st.booleans(),
    "mtp": st.booleans(),
    "grad_reduce": st.sampled_from(["step", "microbatch"]),
    "overlap_grad": st.booleans(),
    "bucket_size": st.sampled_from([0, 1000, 5000]),
    "bucket_first_stage": st.booleans(),
    "reshard_after_forward": st.sampled_from([True, False, 2]),
    "dp_shard": st.sampled_from([1, 2]),
    "tp_x": st.sampled_from([1, 2, 4]),
    "context": st.sampled_from(["ring", "ulysses", "ring:2x2", "all_gather"]),
    "context_balance": st.sampled_from(["zigzag", "none"]),
    "prefetch": st.integers(0, 2),
    "regather": st.sampled_from([(), ("tp",), ("cp", "tp")]),
    "fuse": st.booleans(),
    "fp8": st.sampled_from(["none", "tensorwise", "blockwise", "mxfp8"]),
    "grad_dtype": st.sampled_from(["fp32", "bf16"]),
    "clip": st.booleans(),
    "steps": st.sampled_from([1, 1, 2]),
}
"""Options of a job beside its model, mesh, schedule and batch; each is drawn or left at its default."""

ONLY: dict[str, Callable[[str, str, dict[str, int]], bool]] = {
    "mtp": lambda model, _, __: model == "deepseek-v3",
    "tp_x": lambda _, strategy, mesh: uses(strategy, {"tp_x": 2}) and "tp" in mesh,
    "dp_shard": lambda _, strategy, mesh: strategy == "hsdp" and "dp" in mesh,
    "reshard_after_forward": lambda _, strategy, __: strategy == "fsdp",
    "prefetch": lambda _, strategy, __: strategy in ("fsdp", "hsdp"),
    "context": lambda _, __, mesh: "cp" in mesh,
    "context_balance": lambda _, __, mesh: "cp" in mesh,
}
"""Options that few models, strategies or meshes have; elsewhere they are drawn once in a while, to be refused."""


@st.composite
def degrees(draw: st.DrawFn, axes: list[str], *, experts: bool) -> dict[str, int]:
    """Up to 16 ranks: each factor of two goes to one of these axes; those of experts are carved out of the rest."""
    found = dict.fromkeys(axes, 1)
    count = draw(st.sampled_from([0, 1, 2, 3, 3, 4, 4, 4]))
    for axis in draw(st.lists(st.sampled_from(axes), min_size=count, max_size=count)):
        found[axis] *= 1 if found["pp"] == 4 and axis == "pp" else 2
    inner = 1
    for axis in ("dp", "cp", "tp"):
        inner *= found.get(axis, 1)
    carved = st.lists(st.sampled_from(["ep", "ep", "etp"]), max_size=inner.bit_length() - 1)
    for axis in draw(carved) if experts else ():
        found[axis] = 2 * found.get(axis, 1)
    return {axis: n for axis, n in found.items() if n > 1}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A model, a strategy and the options of a job, most of which can be."""
    model, strategy = draw(st.sampled_from(FAMILIES)), draw(st.sampled_from(STRATEGIES))
    axes = [axis for axis in ("pp", "dp", "cp", "tp") if uses(strategy, {axis: 2})]
    moe = "experts" in MODELS[model] and uses(strategy, {"ep": 2})
    mesh = draw(degrees(axes, experts=moe))
    schedule, ranks = draw(st.sampled_from(sorted(SCHEDULES))), mesh.get("pp", 1)
    least, most = SCHEDULES[schedule].chunks
    chunks = draw(st.integers(least, least + 1 if most is None else most))
    stages = ranks * chunks
    layers = draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages))
    if stages > 1 and draw(st.booleans()):
        layers[draw(st.sampled_from([0, -1]))] = 0
    micro_batch, counts = draw(st.integers(1, 2)), [1, 2, 3, ranks, 2 * ranks, 3 * ranks]
    sizes = {name: n for name, n in LARGE.items() if name in MODELS[model]} | {"layers": max(1, sum(layers))}
    every_head = model in ("gpt3-125m", "deepseek-v3")
    sizes |= {"kv_heads": 8 if every_head else draw(st.sampled_from([1, 2, 4, 8]))}
    sizes |= draw(st.sampled_from([{}, {"tied": 1}]))
    rare = draw(st.integers(0, 15)) == 15
    known = {
        name: values
        for name, values in OPTIONS.items()
        if rare or name not in ONLY or ONLY[name](model, strategy, mesh)
    }
    options = draw(st.fixed_dictionaries({}, optional=known))
    batch = micro_batch * draw(st.sampled_from(counts)) * mesh.get("dp", 1)
    shape = {"micro_batch": micro_batch, "batch": batch, "seq": SEQ}
    return {
        "model": model, "strategy": strategy, "sizes": sizes, "schedule": schedule, "vpp": chunks,
        "stage_layers": tuple(layers), **mesh, **shape, **options,
    }  # fmt: skip


def check_deadlock_and_rules(traces: TraceSet) -> None:
    report = verify(traces)
    assert report.ok, report.defects[:3]
    assert not report.unchecked


@dataclass(frozen=True)
class Alike:
    """Ranks of one class: their rank of the pipeline, how many they are, and the nodes of the first of them."""

    rank: int
    count: int
    nodes: list[TraceNode]


def alike(asked: Request, traces: TraceSet) -> list[Alike]:
    classes, width = traces.classes, asked.mesh.world // asked.pipeline.ranks
    firsts = [classes.first(number) for number in range(classes.count)]
    return [Alike(first // width, classes.ranks_per_class, list(traces.nodes(first))) for first in firsts]


def number(node: TraceNode, name: str) -> int:
    return int(str(node.get(name)))


def check_work(asked: Request, classes: list[Alike]) -> None:
    found = sum(
        same.count * number(n, "num_ops") for same in classes for n in same.nodes if n.get("op") in MATMULS
    )
    assert found == expected.work(asked)


def check_parameters(asked: Request, classes: list[Alike]) -> None:
    """Parameters of all stages are the model's, and ranks update those that they are to hold the state of."""
    whole = {(rank, w.name) if w.shared else (rank, w.name, i): w.whole
             for rank in range(asked.pipeline.ranks) for i, w in enumerate(expected.stored(asked, rank))}  # fmt: skip
    again = sum(whole.values()) - count_parameters(build_padded(asked))
    table = asked.sizes["vocab"] * asked.sizes["d_model"]
    first, last = asked.pipeline.place(0)[0], asked.pipeline.place(asked.pipeline.stages - 1)[0]
    assert again == (table if asked.model.tied and first != last else 0)
    for same in classes:
        updated = sum(number(n, "num_ops") for n in same.nodes if n.get("op") == "adam")
        assert updated % (ADAM_FLOPS * asked.steps) == 0
        exact, padding = expected.states(asked, same.rank)
        assert exact <= updated // (ADAM_FLOPS * asked.steps) <= exact + padding


MESSAGES: dict[int, str] = {NodeType.COMM_SEND: "send", NodeType.COMM_RECV: "recv"}
OF_PARAMETERS = (".parameters", ".gradients", "bucket", "optimizer.")


def check_communication(asked: Request, classes: list[Alike]) -> None:
    """Collectives of activations are those of the layouts, messages those of the boundaries."""
    for same in classes:
        own = [
            n
            for n in same.nodes
            if n.get("comm_size") is not None and not any(p in n.name for p in OF_PARAMETERS)
        ]
        found = Counter(
            (str(n.get("phase")), str(n.get("op")), str(n.get("axes")), number(n, "comm_size"))
            for n in own
            if n.type not in MESSAGES
        )
        assert found == sent_by.activations(asked, same.rank)
        rings: Counter[tuple[str, str]] = Counter()
        for n in own:
            if n.type in MESSAGES and n.get("phase") != "pipeline":
                rings[str(n.get("phase")), MESSAGES[n.type]] += number(n, "comm_size")
        assert rings == sent_by.circulated(asked, same.rank)
        width = asked.mesh.world // asked.pipeline.ranks
        found_messages = Counter(
            (str(n.get("op")), number(n, "comm_dst" if n.get("op") == "send" else "comm_src") // width)
            for n in own
            if n.get("phase") == "pipeline"
        )
        assert found_messages == sent_by.messages(asked, same.rank)


def check_gradients(asked: Request, classes: list[Alike]) -> None:
    """Bytes of all gradient reductions of a rank: its parameters, by the axes over which each is partial."""
    times = asked.steps * (asked.micro_batches if asked.grad_reduce == "microbatch" else 1)
    width = {"fp32": 4, "bf16": 2}[asked.grad_dtype]
    for same in classes:
        held = expected.stored(asked, same.rank)
        if asked.strategy.zero == 0:
            sums: Counter[str] = Counter()
            for w in held:
                if w.data:
                    sums[" ".join(w.data)] += w.elements * width * times
            found: Counter[str] = Counter()
            for n in same.nodes:
                if "bucket" in n.name and n.get("op") == "all_reduce":
                    found[str(n.get("axes"))] += number(n, "comm_size")
            assert found == sums
        if asked.strategy.zero < 3:
            sums = Counter()
            for w in held:
                if w.model:
                    sums[" ".join(w.model)] += w.elements * width * asked.steps
            found = Counter()
            for n in same.nodes:
                if ".replicated_" in n.name:
                    found[str(n.get("axes"))] += number(n, "comm_size")
            assert found == sums


def check_bubble(asked: Request) -> None:
    """On unit costs the published share of the makespan, where micro-batches are enough for it."""
    p, m, v = asked.pipeline.ranks, asked.micro_batches, asked.pipeline.chunks
    name = asked.strategy.schedule
    units, least = {
        "gpipe": (m, 1), "1f1b": (m, 1), "interleaved": (v * m, p), "looped-bfs": (v * m, p),
        "zb-h1": (3 * m, p), "zb-v": (6 * m, 2 * p - 1), "dualpipe-v": (6 * m, 2 * p),
    }[name]  # fmt: skip
    if m >= least and not (name == "zb-h1" and v > 1) and not (name == "interleaved" and m % p):
        timeline = run_schedule(name, asked.pipeline)
        assert 1 - Fraction(sum(timeline.busy), p * timeline.makespan) == Fraction(p - 1, units + p - 1)


def check(drawn: dict[str, Any]) -> None:
    """The job is refused in one line, or all that must hold for it does."""
    options = dict(drawn)
    try:
        asked = request(options.pop("model"), options.pop("strategy"), **options)
        traces = TraceSet.of(job(asked))
    except StageError as refused:
        text = str(refused)
        event("refused")
        assert text
        assert "\n" not in text
        return
    event("synthesized")
    check_deadlock_and_rules(traces)
    classes = alike(asked, traces)
    check_work(asked, classes)
    check_parameters(asked, classes)
    check_communication(asked, classes)
    check_gradients(asked, classes)
    check_bubble(asked)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=QUIET)
@given(drawn=jobs())
def test_a_drawn_job_keeps_what_every_job_must(drawn: dict[str, Any]) -> None:
    check(drawn)


@pytest.mark.full
@settings(max_examples=1500, deadline=None, suppress_health_check=QUIET)
@given(drawn=jobs())
def test_many_drawn_jobs_keep_what_every_job_must(drawn: dict[str, Any]) -> None:
    check(drawn)
