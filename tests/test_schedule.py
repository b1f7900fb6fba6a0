"""Pipeline schedules: their orders are PyTorch's, run to the end, and leave the bubbles that the papers say."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.records.schedules import SCHEDULES as RECORDED
from stage.errors import StrategyError
from stage.pipeline.bubble import run_schedule
from stage.pipeline.schedule import Action, Pipeline
from stage.pipeline.schedules import SCHEDULES, order, plan_pipeline
from stage.strategy import SCHEDULES as NAMES

DATA = Path(__file__).parent / "data" / "groundtruth"
MARKS = {"fwd": "F", "bwd": "B", "bwd_input": "I", "bwd_weight": "W"}
ACTION = re.compile(r"\d+[FBIW]\d+")
Record = tuple[str, int, int, int, list[str]]


def records() -> Iterator[Record]:
    """Schedule, pp, vpp, micro-batches and each rank's order: of PyTorch's action tables, then of its runs.

    Its table of 1F1B counts the last rank's forwards from 1, which its own check rejects, so only runs have that.
    """
    for table in json.loads(gzip.decompress((DATA / "pp_schedules_torch.json.gz").read_bytes()))["schedules"]:
        name, orders = RECORDED[table["schedule"]], table["compute_order"].values()
        if name != "1f1b":
            found = [" ".join(ACTION.findall(" ".join(filter(None, cells)))) for cells in orders]
            yield name, table["pp"], table["virtual_stages_per_rank"], table["microbatches"], found
    for run in json.loads(gzip.decompress((DATA / "pp_runtime_torch.json.gz").read_bytes()))["runs"]:
        found = [
            " ".join(f"{op['stage']}{MARKS[op['mark']]}{op['mb']}" for op in ops if op.get("mark") in MARKS)
            for ops in run["step1"].values()
        ]
        yield RECORDED[run["schedule"]], run["pp"], run["virtual"], run["microbatches"], found


RECORDS = list(records())
RANKS = (1, 2, 3, 4, 6, 8)


def planned(name: str, ranks: int, micro_batches: int, chunks: int) -> Pipeline:
    """The pipeline with as many chunks as the schedule allows, or a draw that does not count."""
    least, most = SCHEDULES[name].chunks
    chunks = max(least, min(chunks, chunks if most is None else most))
    try:
        return plan_pipeline(name, ranks, micro_batches, chunks)
    except StrategyError:
        assume(False)
        raise


PIPELINES = st.tuples(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4)
)


def test_a_strategy_file_can_name_every_schedule() -> None:
    assert tuple(SCHEDULES) == NAMES
    assert all(name == schedule.name for name, schedule in SCHEDULES.items())


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r[0]}-pp{r[1]}-vpp{r[2]}-m{r[3]}")
def test_orders_are_those_of_pytorch(record: Record) -> None:
    name, pp, vpp, micro_batches, orders = record
    pipeline = plan_pipeline(name, pp, micro_batches, vpp)
    for rank, expected in enumerate(orders):
        found = [
            f"{pipeline.stage(rank, a.chunk)}{a.kind}{a.micro_batch}"
            for a in order(name, pipeline, rank).actions
        ]
        assert " ".join(found) == expected, rank


def test_records_cover_every_schedule() -> None:
    assert {record[0] for record in RECORDS} == set(SCHEDULES)
    assert all(all(orders) for *_, orders in RECORDS)


@given(PIPELINES)
def test_every_chunk_runs_every_micro_batch_once(drawn: tuple[str, int, int, int]) -> None:
    name = drawn[0]
    pipeline = planned(*drawn)
    runs = list(product(range(pipeline.chunks), range(pipeline.micro_batches)))
    for rank in range(pipeline.ranks):
        counts = Counter(order(name, pipeline, rank).actions)
        assert set(counts.values()) == {1}
        for run in runs:
            kinds = "".join(kind for kind in "FBIW" if Action(kind, *run) in counts)
            assert kinds in (("FIW", "FB") if SCHEDULES[name].splits else ("FB",))
        assert len(counts) == sum(2 + (Action("W", *run) in counts) for run in runs)


@given(PIPELINES, st.tuples(*[st.integers(1, 5)] * 4))
def test_no_schedule_waits_for_itself_whatever_actions_take(
    drawn: tuple[str, int, int, int], costs: tuple[int, int, int, int]
) -> None:
    timeline = run_schedule(drawn[0], planned(*drawn), dict(zip("FBIW", costs, strict=True)))
    assert timeline.makespan >= max(timeline.busy)


@given(PIPELINES)
def test_phases_fill_and_drain(drawn: tuple[str, int, int, int]) -> None:
    """The cool-down has no forwards but DualPipe-V's, and the warm-up no backwards but that of a V."""
    name = drawn[0]
    pipeline = planned(*drawn)
    for rank in range(pipeline.ranks):
        phases = order(name, pipeline, rank)
        assert all(action.kind != "F" for action in phases.cooldown) or name == "dualpipe-v"
        assert not phases.steady or phases.steady[0].kind in "FI"
        if not SCHEDULES[name].v_shaped:
            assert all(action.kind == "F" for action in phases.warmup)


@given(st.booleans(), st.integers(1, 6), st.integers(1, 4))
def test_every_stage_has_one_place(v_shaped: bool, ranks: int, chunks: int) -> None:
    pipeline = Pipeline(ranks, 1, chunks, v_shaped)
    places = [pipeline.place(stage) for stage in range(pipeline.stages)]
    assert sorted(places) == list(product(range(ranks), range(chunks)))
    assert [pipeline.stage(*place) for place in places] == list(range(pipeline.stages))
    jumps = {abs(a[0] - b[0]) for a, b in pairwise(places)}
    assert jumps <= ({0, 1} if v_shaped else {1, ranks - 1})


@pytest.mark.parametrize(("p", "rounds", "v"), [*product(RANKS, (1, 2, 5), (1, 2, 3))])
def test_the_bubble_is_the_published_closed_form(p: int, rounds: int, v: int) -> None:
    """Narayanan et al. 2021, section 2.2; Lamy-Poirier 2023; Qi et al. 2023, table 2 with F = I = W."""
    m = rounds * p

    def bubble(name: str, chunks: int) -> Fraction:
        timeline = run_schedule(name, plan_pipeline(name, p, m, chunks))
        return 1 - Fraction(sum(timeline.busy), p * timeline.makespan)

    if v == 1:
        assert bubble("1f1b", 1) == bubble("gpipe", 1) == Fraction(p - 1, m + p - 1)
        assert bubble("zb-h1", 1) == Fraction(p - 1, 3 * m + p - 1)
    else:
        assert bubble("interleaved", v) == bubble("looped-bfs", v) == Fraction(p - 1, v * m + p - 1)


@pytest.mark.parametrize(("p", "extra"), [*product(RANKS, (0, 1, 7))])
def test_the_bubbles_of_schedules_in_a_v(p: int, extra: int) -> None:
    """Of the makespan (p-1)/(6m+p-1), for both; within ranks' own windows none with ZB-V, as much with DualPipe-V."""
    for m in (2 * p - 1 + extra, 2 * p + extra):
        zb_v = run_schedule("zb-v", plan_pipeline("zb-v", p, m))
        assert zb_v.makespan == 6 * m + p - 1
        assert zb_v.window_bubble == 0
        if m >= 2 * p:
            dual = run_schedule("dualpipe-v", plan_pipeline("dualpipe-v", p, m))
            assert dual.makespan == 6 * m + p - 1
            assert dual.bubble == pytest.approx((p - 1) / (6 * m + p - 1))
            assert dual.window_bubble == pytest.approx((p - 1) / (6 * m + p - 1))


def in_flight(name: str, pipeline: Pipeline, rank: int) -> int:
    """The most chunks of activations that a rank keeps; those of a split backward until their `W`."""
    held = most = 0
    for action in order(name, pipeline, rank).actions:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, held)
    return most


@pytest.mark.parametrize("p", RANKS)
def test_how_many_activations_are_kept(p: int) -> None:
    """ZB-H1 keeps as much everywhere as 1F1B on its first rank; ZB-V as much, in chunks half the size."""
    m = 4 * p
    assert [in_flight("1f1b", Pipeline(p, m), r) for r in range(p)] == [p - r for r in range(p)]
    assert {in_flight("zb-h1", Pipeline(p, m), r) for r in range(p)} == {p}
    assert {in_flight("zb-v", Pipeline(p, m, 2, v_shaped=True), r) for r in range(p)} == {2 * p}
    assert max(in_flight("dualpipe-v", Pipeline(p, m, 2, v_shaped=True), r) for r in range(p)) == 2 * p + 1
    assert in_flight("gpipe", Pipeline(p, m), 0) == m
    for v in (2, 3):
        assert in_flight("interleaved", Pipeline(p, m, v), 0) == (v + 1) * p - 1
        assert in_flight("looped-bfs", Pipeline(p, m, v), 0) == v * m


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("zigzag", {}, "schedule 'zigzag' is not known; choose one of " + ", ".join(SCHEDULES)),
        (
            "1f1b",
            {"chunks": 2},
            "vpp = 2, but schedule 1f1b needs vpp = 1; "
            "set --vpp 1, or --schedule to one of interleaved, looped-bfs, zb-h1, zb-v, dualpipe-v",
        ),
        (
            "interleaved",
            {"chunks": 1},
            "vpp = 1, but schedule interleaved needs vpp of at least 2; "
            "set --vpp 2, or --schedule to one of 1f1b, gpipe, looped-bfs, zb-h1",
        ),
        (
            "zb-v",
            {"chunks": 3},
            "vpp = 3, but schedule zb-v needs vpp = 2; "
            "set --vpp 2, or --schedule to one of interleaved, looped-bfs, zb-h1",
        ),
        (
            "interleaved",
            {"micro_batches": 9},
            "schedule interleaved runs micro-batches in rounds of about pp = 4, but 9 do not divide into 2 rounds; "
            "change --batch or --micro-batch to make it 8 or 12",
        ),
        (
            "dualpipe-v",
            {"micro_batches": 7},
            "schedule dualpipe-v needs at least 2 pp = 8 micro-batches, but a step has 7; "
            "raise --batch, or lower --micro-batch or --pp",
        ),
    ],
)
def test_what_is_not_possible_is_said_in_one_line(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        plan_pipeline(name, **{"ranks": 4, "micro_batches": 8, **options})
    assert str(caught.value) == message
