"""The proof by classes finds what the proof rank by rank finds: on healthy sets nothing, on broken ones the same."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stage
from stage.io.chakra import open_directory
from stage.io.recognise import recognise_classes
from stage.request import resolve_request
from stage.synthesis import job
from stage.trace.classes import RankClasses
from stage.trace.decode import read_messages
from stage.trace.expand import ClassImage
from stage.trace.groups import GroupTable
from stage.trace.report import Report
from stage.trace.spans import communication_spans
from stage.trace.template import TemplateNode
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from stage.traceset import Job, TraceSet
from stage.verification import verify_set

TINY = {"layers": 4, "d_model": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
Change = Callable[[ClassImage], ClassImage]


@cache
def tiny_job(**options: int) -> Job:
    model = "mixtral-8x7b" if "ep" in options else "llama3-8b"
    sizes = {**TINY, "expert_d_ff": 128, "experts": 4} if "ep" in options else {**TINY, "d_ff": 128}
    return job(resolve_request(model, sizes=sizes, seq=32, **options))


def small() -> TraceSet:
    return TraceSet.of(tiny_job(gpus=8, tp=2, pp=2, batch=8))


def with_images(traces: TraceSet, changes: dict[int, Change]) -> TraceSet:
    """The set with the images of some classes changed."""
    old = traces.classes

    def image(number: int) -> ClassImage:
        return changes.get(number, lambda same: same)(old.image(number))

    classes = RankClasses(old.mesh, old.groups.axes, old.count, image, old.placement)
    return TraceSet(classes, traces.description, traces.summaries)


def with_nodes(found: Job, stage_number: int, change: Callable[[TemplateNode], TemplateNode]) -> TraceSet:
    """The set of a job with the nodes of one stage changed."""
    programs = list(found.programs)
    program = programs[stage_number]
    templates = tuple(replace(t, nodes=tuple(map(change, t.nodes))) for t in program.templates)
    programs[stage_number] = replace(program, templates=templates)
    return TraceSet.of(replace(found, programs=tuple(programs)))


def both(traces: TraceSet) -> tuple[Report, Report]:
    return verify_classes(traces.classes), verify(traces)


def places(report: Report, traces: TraceSet) -> set[tuple[str, int | None, int | None]]:
    """Rule, class and node of each defect."""
    return {(d.rule, None if d.rank is None else traces.classes.of(d.rank), d.node) for d in report.defects}


def rules(report: Report) -> set[str]:
    return {defect.rule for defect in report.defects}


# ------------------------------------------------------------------------------------- healthy sets


@settings(max_examples=25, deadline=None)
@given(
    dp=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 3]),
    moe=st.booleans(),
    shuffle=st.integers(0, 2**32 - 1),
)
def test_healthy_sets_are_proved_by_both(
    dp: int, tp: int, pp: int, cp: int, zero: int, moe: bool, shuffle: int
) -> None:
    options = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "zero": zero, "batch": 2 * dp * pp}
    if moe:
        options |= {"ep": 2 if dp * cp * tp % 2 == 0 else 1}
    found = tiny_job(**options)
    order = np.random.default_rng(shuffle).permutation(found.mesh.world).astype(np.int64)
    traces = TraceSet.of(replace(found, placement=order if shuffle % 2 else None))
    by_class, by_rank = both(traces)
    assert by_class.defects == by_rank.defects == ()
    assert by_class.unchecked == by_rank.unchecked == ()
    assert (by_class.ranks, by_class.nodes) == (by_rank.ranks, by_rank.nodes)
    assert {warning.rule for warning in by_class.warnings} == {warning.rule for warning in by_rank.warnings}


def test_proof_of_131072_ranks_decodes_one_rank_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = stage.synthesize(
        "llama3.1-405b", sizes={"layers": 8}, gpus=131_072, tp=8, cp=2, pp=4, batch=16384, seq=8192
    )
    made: list[int] = []
    rank = RankClasses.rank
    monkeypatch.setattr(RankClasses, "rank", lambda self, number: made.append(number) or rank(self, number))
    report = verify_set(traces)
    assert (report.ok, report.unchecked, report.ranks) == (True, (), 131_072)
    assert report.nodes == sum(summary["nodes"] for summary in traces.summaries) * 131_072 // 4
    assert len(made) == 2 * 4, "the first rank of each class, and the last to compare with"
    assert {warning.rule for warning in report.warnings} == {"group-number", "descriptors"}


# -------------------------------------------------------------------------------------- broken programs


def larger(node: TemplateNode) -> TemplateNode:
    return replace(node, bytes=node.bytes + 2) if node.kind == "send" else node


def other_norm(node: TemplateNode) -> TemplateNode:
    return replace(node, kind="all_gather") if "gradient_norm" in node.name and node.axes else node


def no_work(node: TemplateNode) -> TemplateNode:
    return replace(node, flops=0) if node.kind == "compute" and "adam" in node.name else node


def longer_norm(node: TemplateNode) -> TemplateNode:
    return replace(node, bytes=8) if "gradient_norm" in node.name and node.axes else node


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (larger, "message-size"),
        (other_norm, "collective-mismatch"),
        (longer_norm, "collective-mismatch"),
        (no_work, "num-ops"),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_program_of_one_class_is_found_by_both(
    change: Callable[[TemplateNode], TemplateNode], rule: str, number: int
) -> None:
    traces = with_nodes(tiny_job(gpus=8, tp=2, pp=2, batch=8), number, change)
    by_class, by_rank = both(traces)
    assert rules(by_class) == rules(by_rank) == {rule}
    assert places(by_class, traces) == places(by_rank, traces)
    assert len(by_class.defects) < len(by_rank.defects), "one rank a class is named"
    assert all("as on all 4 ranks of its class" in defect.message for defect in by_class.defects)


# ---------------------------------------------------------------------------------------- broken images


def without(image: ClassImage, at: int) -> ClassImage:
    """The image without the node at a place of the file, its patches as well."""
    data = image.data.tobytes()
    bounds = list(read_messages(data))
    start, stop = bounds[at][1], bounds[at + 1][1]
    return ClassImage(
        np.concatenate([image.data[:start], image.data[stop:]]),
        {
            axes: np.array([moved(row, start, stop) for row in rows if not start <= row[0] < stop])
            for axes, rows in image.groups.items()
        },
        {
            distance: np.array([moved(at, start, stop) for at in found if not start <= at < stop])
            for distance, found in image.peers.items()
        },
    )


def moved(positions: np.ndarray, start: int, stop: int) -> np.ndarray:  # type: ignore[type-arg]
    return positions - np.where(positions >= stop, stop - start, 0)


@pytest.mark.parametrize("name", [b"pg_name", b"comm_src"])
def test_a_dropped_node_is_found_by_both(name: bytes) -> None:
    healthy = small()
    data = healthy.rank(0)
    at = [span.node for span in communication_spans(data) if span.name == name][-1]
    traces = with_images(healthy, {0: lambda image: without(image, at)})
    by_class, by_rank = both(traces)
    assert not by_class.ok
    assert rules(by_class) == rules(by_rank)
    assert places(by_class, traces) == places(by_rank, traces)


def test_a_dropped_node_that_only_its_class_misses_is_found_by_both() -> None:
    """Without one collective within a class, whose children now wait for a node that is not there."""
    healthy = small()
    at = next(span.node for span in communication_spans(healthy.rank(0)) if span.axes == ("tp",))
    traces = with_images(healthy, {0: lambda image: without(image, at)})
    by_class, by_rank = both(traces)
    assert rules(by_class) == rules(by_rank) == {"dep-unknown"}
    assert places(by_class, traces) == places(by_rank, traces)


def other_peer(image: ClassImage) -> ClassImage:
    """One message goes to the rank itself."""
    peers = {**image.peers, 1: image.peers[1][1:]}
    return replace(image, peers={**peers, 0: np.append(image.peers[0], image.peers[1][0])})


def no_such_peer(image: ClassImage) -> ClassImage:
    """One peer is the same for all ranks of the class."""
    return replace(image, peers={**image.peers, 1: image.peers[1][1:]})


def shifted_peer(image: ClassImage) -> ClassImage:
    return replace(image, peers={**image.peers, 1: image.peers[1] + np.eye(1, len(image.peers[1]), dtype=int)[0]})


def shifted_group(image: ClassImage) -> ClassImage:
    rows = image.groups["tp",].copy()
    rows[2] += 1
    return replace(image, groups={**image.groups, ("tp",): rows})


def fixed_group(image: ClassImage) -> ClassImage:
    """One group's name is the same for all ranks of the class: that of the first."""
    rows = image.groups["tp",]
    data = image.data.copy()
    data[rows[0]] = np.frombuffer(small().rank(0), np.uint8)[rows[0]]
    return replace(image, data=data, groups={**image.groups, ("tp",): rows[1:]})


def scattered_group(image: ClassImage) -> ClassImage:
    rows = image.groups["dp",].copy()
    rows[0] = rows[0][::-1]
    return replace(image, groups={**image.groups, ("dp",): rows})


def patched_size(image: ClassImage) -> ClassImage:
    """A rank's number is written where a size stands."""
    at = image.data.tobytes().index(b"comm_size") + len(b"comm_size") + 1
    return replace(image, peers={**image.peers, 1: np.append(image.peers[1], at)})


@pytest.mark.parametrize(
    "change",
    [other_peer, no_such_peer, shifted_peer, shifted_group, fixed_group, scattered_group, patched_size],
)
def test_a_wrong_patch_of_one_class_is_found_by_both(change: Change) -> None:
    by_class, by_rank = both(with_images(small(), {0: change}))
    assert not by_class.ok
    assert not by_rank.ok


def test_a_group_over_other_axes_than_the_collective_says_is_found_by_class() -> None:
    """Rank by rank it looks sound: every member of the other group runs it."""

    def change(image: ClassImage) -> ClassImage:
        tp, dp = image.groups["tp",], image.groups["dp",]
        return replace(image, groups={**image.groups, ("tp",): tp[1:], ("dp",): np.concatenate([dp, tp[:1]])})

    by_class, by_rank = both(with_images(small(), dict.fromkeys(range(2), change)))
    assert rules(by_class) == {"patch-axes"}
    assert by_rank.ok


@settings(max_examples=60, deadline=None)
@given(number=st.integers(0, 1), where=st.integers(0, 2**31), flip=st.integers(1, 255))
def test_any_damaged_byte_of_a_class_is_found_by_both_or_by_none(number: int, where: int, flip: int) -> None:
    def change(image: ClassImage) -> ClassImage:
        data = image.data.copy()
        data[where % len(data)] ^= flip
        return replace(image, data=data)

    healthy = small()
    traces = with_images(healthy, {number: change})
    by_class, by_rank = both(traces)
    assert by_class.ok == by_rank.ok or rules(by_class) == {"patch-axes"}
    if not rules(by_class) & {"patch", "patch-axes", "file"}:
        assert rules(by_class) == rules(by_rank)


# ------------------------------------------------------------------------------------- broken formulas


class OneOff(GroupTable):
    """The last rank is told the number of its neighbour's group."""

    def number(self, axes: tuple[str, ...], position: int) -> int:
        return super().number(axes, position - (position == self.mesh.world - 1 and axes == ("dp",)))


class OtherMembers(GroupTable):
    """Two ranks of two groups have changed places."""

    def members(self, axes: tuple[str, ...]) -> np.ndarray:  # type: ignore[type-arg]
        rows = super().members(axes).copy()
        rows[0, 0], rows[1, 0] = rows[1, 0], rows[0, 0]
        return rows


def shift_first(traces: TraceSet) -> None:
    traces.classes.groups.first["dp",] += 1


def to_one_off(traces: TraceSet) -> None:
    traces.classes.groups.__class__ = OneOff


def to_other_members(traces: TraceSet) -> None:
    traces.classes.groups.__class__ = OtherMembers


@pytest.mark.parametrize("damage", [shift_first, to_one_off, to_other_members])
def test_a_wrong_formula_of_groups_is_found_by_both(damage: Callable[[TraceSet], None]) -> None:
    traces = small()
    damage(traces)
    by_class, by_rank = both(traces)
    assert not by_class.ok
    assert not by_rank.ok


def test_a_placement_that_is_no_permutation_is_found() -> None:
    traces = small()
    traces.classes.placement = np.array([0, 1, 2, 3, 4, 5, 6, 6])
    report = verify_classes(traces.classes)
    assert rules(report) == {"placement"}
    assert len(report.unchecked) == 1


def test_classes_that_are_no_stages_are_found() -> None:
    traces = small()
    traces.classes.count = 4
    assert rules(verify_classes(traces.classes)) == {"class-shape"}
