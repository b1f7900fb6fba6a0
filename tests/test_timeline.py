"""The timeline: cases by hand, jobs against closed forms, and every node against what it waits for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stage.synthesis
from stage.cost.breakdown import break_down, total, union, without
from stage.cost.timeline import Span, Track, run_tracks
from stage.cost.tracks import Nodes, job_tracks, program_nodes
from stage.errors import TraceError
from stage.pipeline.bubble import run_schedule
from stage.request import resolve_request
from stage.trace.job import Job
from stage.trace.template import Template

SMALL = {"d_model": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 48, "vocab": 64}


def track(seconds: list[float], after: list[list[int]], **links: Any) -> Track:
    width = max(map(len, after))
    rows = [[*deps, *[-1] * (width - len(deps))] or [-1] for deps in after]
    return Track(np.array(seconds), np.array(rows).reshape(len(seconds), -1), **links)


def make(model: str = "llama3-8b", **options: Any) -> Job:
    sizes = {"layers": options.pop("layers", 4)} | (SMALL if model == "llama3-8b" else {})
    options = {"batch": 8 * options.get("dp", 1), "seq": 32, **options}
    return stage.synthesis.job(resolve_request(model, sizes=sizes, **options))


def nodes_of(job: Job) -> list[Nodes]:
    return [program_nodes(program) for program in job.programs]


def test_streams_overlap_and_join() -> None:
    """Two kernels, a collective beside the second, and a kernel that waits for both."""
    one = track([1.0, 2.0, 5.0, 1.0], [[], [0], [0], [1, 2]])
    (span,) = run_tracks([one])
    assert span.start.tolist() == [0.0, 1.0, 1.0, 6.0]
    assert span.end.tolist() == [1.0, 3.0, 6.0, 7.0]
    found = break_down(span, ["all_reduce"], np.array([-1, -1, 0, -1]), 7.0)
    assert (found.compute, found.bubble) == (4.0, 0.0)
    assert found.communication == {"all_reduce": 5.0}
    assert found.exposed == {"all_reduce": 3.0}


def test_a_receive_ends_when_the_message_has_arrived() -> None:
    sender = track([2.0, 0.5], [[], [0]], sends={1: "m"})
    receiver = track([1.0, 0.0, 1.0], [[], [], [0, 1]], receives={1: "m"})
    spans = run_tracks([receiver, sender])
    assert spans[0].end.tolist() == [1.0, 2.5, 3.5]
    found = break_down(spans[0], ["send"], np.array([-1, 0, -1]), 3.5)
    assert (found.compute, found.exposed, found.bubble) == (2.0, {}, 1.5)


def test_a_collective_starts_with_its_last_member() -> None:
    tracks = [track([wait, 1.0], [[], [0]], meets={1: ("sum", 3)}) for wait in (1.0, 4.0, 2.0)]
    assert [span.end.tolist() for span in run_tracks(tracks)] == [[1.0, 5.0], [4.0, 5.0], [2.0, 5.0]]


def test_what_does_not_wait_goes_ahead_of_what_does() -> None:
    """Each device lists a receive before the send that the other waits for."""
    one = track([0.0, 1.0], [[], []], receives={0: "b"}, sends={1: "a"})
    other = track([0.0, 2.0], [[], []], receives={0: "a"}, sends={1: "b"})
    assert [span.end.tolist() for span in run_tracks([one, other])] == [[2.0, 1.0], [1.0, 2.0]]


def test_what_waits_for_ever_is_named() -> None:
    with pytest.raises(TraceError, match="node 1 of track 0 waits for ever"):
        run_tracks([track([1.0, 0.0], [[], [0]], receives={1: "nothing"})])


def unit(template: Template, _number: int) -> Any:
    """Every matrix multiplication of a layer takes a second, all else no time."""
    return np.array([float(n.matmul and "layer" in template.block) for n in template.nodes])


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("looped-bfs", 2),
        ("zb-h1", 1),
        ("zb-v", 2),
        ("dualpipe-v", 2),
    ],
)
def test_a_pipeline_takes_as_long_as_its_schedule_says(schedule: str, vpp: int) -> None:
    """With the same kernels in each layer, against the simulation of actions."""
    job = make(pp=4, vpp=vpp, schedule=schedule, layers=4 * vpp, batch=16, strategy="ddp")
    took = {
        t.phase + t.part: int(unit(t, 0).sum())
        for program in job.programs
        for t in program.templates
        if "layer" in t.block
    }
    kinds = {"F": "forward", "B": "backward", "I": "backwardinput", "W": "backwardweight"}
    costs = {kind: took.get(name, 0) for kind, name in kinds.items()}
    asked = resolve_request(
        "llama3-8b",
        "ddp",
        pp=4,
        vpp=vpp,
        schedule=schedule,
        batch=16,
        seq=32,
        sizes={**SMALL, "layers": 4 * vpp},
    )
    ends = [span.end.max() for span in run_tracks(job_tracks(job, nodes_of(job), unit))]
    assert max(ends) == pytest.approx(run_schedule(schedule, asked.pipeline, costs).makespan)


OPTIONS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "dp": 2},
    {"cp": 4, "context": "ring", "pp": 2},
    {"cp": 4, "context": "ring", "context_balance": "none", "pp": 2},
    {"strategy": "fsdp", "dp": 4, "pp": 2, "schedule": "zb-v"},
    {"model": "mixtral-8x7b", "dp": 4, "ep": 4, "alltoall": "p2p", "expert_load": "zipf:1.2", "seq": 128},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(map(str, o.values())))
def test_no_node_starts_before_what_it_waits_for(options: dict[str, Any]) -> None:
    """And every one starts as soon as the last of it has ended, unless another device is late."""
    job = make(**options)
    rng = np.random.default_rng(3)
    known: dict[tuple[int, int], Any] = {}

    def seconds(template: Template, number: int) -> Any:
        return known.setdefault((id(template), number), rng.random(len(template.nodes)))

    tracks = job_tracks(job, nodes_of(job), seconds)
    for one, program, span in zip(tracks, job.programs, run_tracks(tracks), strict=True):
        ends = np.append(span.end, 0.0)
        ready = ends[program_nodes(program).after].max(axis=1)
        assert (span.start >= ready).all()
        local = np.ones(len(ready), bool)
        local[[*one.receives, *one.meets]] = False
        assert np.array_equal(span.start[local], ready[local])
        assert np.allclose(span.end, span.start + one.seconds)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8).map(
    lambda pairs: np.array([(a, a + b) for a, b in pairs], float).reshape(-1, 2)
)


@given(spans, spans)
def test_sets_of_moments(first: Any, second: Any) -> None:
    """Against counting whole seconds."""

    def moments(rows: Any) -> set[int]:
        return {k for a, b in rows for k in range(int(a), int(b))}

    one, other = union(first), union(second)
    assert total(one) == len(moments(first))
    assert moments(without(one, other)) == moments(first) - moments(second)


def test_a_breakdown_adds_up_to_the_step() -> None:
    job = make(tp=2, pp=2, dp=2)
    tracks = job_tracks(job, nodes_of(job), lambda template, _: np.ones(len(template.nodes)))
    found = run_tracks(tracks)
    step = max(float(span.end.max()) for span in found)
    for program, span in zip(job.programs, found, strict=True):
        nodes = program_nodes(program)
        which = nodes.expand(
            [np.array([-1 if n.is_compute else 0 for n in t.nodes]) for t in program.templates]
        )
        parts = break_down(span, ["all"], which.astype(np.int64), step)
        assert parts.compute + sum(parts.exposed.values()) + parts.bubble == pytest.approx(step)
        assert parts.bubble >= 0
        assert isinstance(span, Span)
