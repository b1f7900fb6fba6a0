"""The proof by classes finds what the proof rank by rank finds: on healthy sets nothing, on broken ones the same."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.io.chakra import open_directory, write_directory
from stage.io.recognise import recognise_classes
from stage.request import resolve_request
from stage.synthesis import job, synthesize
from stage.trace.classes import RankClasses
from stage.trace.decode import read_messages
from stage.trace.expand import ClassImage
from stage.trace.groups import GroupTable
from stage.trace.image import Ints
from stage.trace.job import Job
from stage.trace.node import NodeType
from stage.trace.partition import Partition
from stage.trace.peer import OWN, Peer
from stage.trace.report import Report
from stage.trace.spans import communication_spans
from stage.trace.template import TemplateNode
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from stage.traceset import TraceSet
from stage.verification import verify_set

TINY = {"layers": 4, "d_model": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
NEXT = Peer(("pp",), 1)
Change = Callable[[ClassImage], ClassImage]


@cache
def tiny_job(**options: Any) -> Job:
    model = "mixtral-8x7b" if "ep" in options else "llama3-8b"
    sizes = {**TINY, "expert_d_ff": 128, "experts": 4} if "ep" in options else {**TINY, "d_ff": 128}
    return job(resolve_request(model, sizes=sizes, seq=32, **options))


def small() -> TraceSet:
    return TraceSet.of(tiny_job(gpus=8, tp=2, pp=2, batch=8))


def with_images(traces: TraceSet, changes: dict[int, Change]) -> TraceSet:
    """The set with the images of some classes changed."""
    old = traces.classes

    def image(number: int) -> ClassImage:
        made = old.image(number)
        return changes[number](made) if number in changes else made

    classes = RankClasses(old.partition, old.groups.axes, image, old.placement)
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
    traces = synthesize(
        "llama3.1-405b", sizes={"layers": 8}, gpus=131_072, tp=8, cp=2, pp=4, batch=16384, seq=8192
    )
    made: list[int] = []
    rank = RankClasses.rank

    def counted(self: RankClasses, number: int) -> Any:
        made.append(number)
        return rank(self, number)

    monkeypatch.setattr(RankClasses, "rank", counted)
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
            axes: moved(rows[(rows[:, 0] < start) | (rows[:, 0] >= stop)], start, stop)
            for axes, rows in image.groups.items()
        },
        {
            peer: moved(found[(found < start) | (found >= stop)], start, stop)
            for peer, found in image.peers.items()
        },
    )


def moved(positions: Ints, start: int, stop: int) -> Ints:
    return positions - np.where(positions >= stop, stop - start, 0)


@pytest.mark.parametrize("name", [b"pg_name", b"comm_src"])
def test_a_dropped_node_is_found_by_both(name: bytes) -> None:
    healthy = small()
    data = healthy.rank(0)
    spans = [span for span in communication_spans(data) if span.name == name]
    at = [span.node for span in spans if name != b"pg_name" or "pp" in span.axes][-1]
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
    peers = {**image.peers, NEXT: image.peers[NEXT][1:]}
    return replace(image, peers={**peers, OWN: np.append(image.peers[OWN], image.peers[NEXT][0])})


def no_such_peer(image: ClassImage) -> ClassImage:
    """One peer is the same for all ranks of the class."""
    return replace(image, peers={**image.peers, NEXT: image.peers[NEXT][1:]})


def shifted_peer(image: ClassImage) -> ClassImage:
    return replace(
        image, peers={**image.peers, NEXT: image.peers[NEXT] + (np.arange(len(image.peers[NEXT])) == 0)}
    )


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
    return replace(image, peers={**image.peers, NEXT: np.append(image.peers[NEXT], at)})


@pytest.mark.parametrize(
    "change",
    [other_peer, no_such_peer, shifted_peer, shifted_group, fixed_group, scattered_group, patched_size],
)
def test_a_wrong_patch_of_one_class_is_found_by_both(change: Change) -> None:
    by_class, by_rank = both(with_images(small(), {0: change}))
    assert not by_class.ok
    assert not by_rank.ok


@pytest.mark.parametrize("behind", [b"num_ops", b"comm_tag"])
def test_a_number_of_our_own_that_is_overwritten_is_found_by_class(behind: bytes) -> None:
    """A rank's number is written where the micro-batch of a kernel or a message stands, which no consumer reads."""

    def change(image: ClassImage) -> ClassImage:
        data = image.data.tobytes()
        at = data.index(b"micro_batch", data.index(behind)) + len(b"micro_batch") + 1
        return replace(image, peers={**image.peers, NEXT: np.append(image.peers[NEXT], at)})

    by_class, by_rank = both(with_images(small(), {0: change}))
    assert rules(by_class) == {"patch"}
    assert by_rank.ok


HEAD = len(b"\x52\x10\x0a\x08")
"""An attribute's tag and length, and those of its name, before the name."""


def damaged(name: bytes, offset: int, value: int, kind: int) -> TraceSet:
    """The small set with a byte near the name of an attribute of the first send or receive changed."""

    def change(image: ClassImage) -> ClassImage:
        healthy = image.data.tobytes()
        types = [node.type for node in small().nodes(0)]
        spans = [span for span in communication_spans(small().rank(0)) if span.name == name]
        start = next(span.start for span in spans if types[span.node] == kind)
        data = image.data.copy()
        at = healthy.rindex(name, 0, start) + offset
        assert data[at] != value
        data[at] = value
        return replace(image, data=data)

    return with_images(small(), {0: change})


WAYS = {
    "another name": (0, ord("k")),
    "no name, a doc string": (-2, 0x12),
    "no attribute, a field that is not known": (-HEAD, 11 << 3 | 2),
    "no attribute, inputs": (-HEAD, 8 << 3 | 2),
    "no member, a field that is not known": (len(b"comm_dst"), 15 << 3),
}


@pytest.mark.parametrize(
    "way", ["another name", "no name, a doc string", "no attribute, a field that is not known"]
)
@pytest.mark.parametrize(
    ("kind", "name"), [(NodeType.COMM_SEND, b"comm_src"), (NodeType.COMM_RECV, b"comm_dst")]
)
def test_an_own_rank_that_a_message_lacks_is_no_defect_to_either(kind: int, name: bytes, way: str) -> None:
    by_class, by_rank = both(damaged(name, *WAYS[way], kind))
    assert by_class.defects == by_rank.defects == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "name"), [(NodeType.COMM_SEND, b"comm_dst"), (NodeType.COMM_RECV, b"comm_src")]
)
def test_a_peer_that_a_message_lacks_is_found_by_both(kind: int, name: bytes, way: str) -> None:
    by_class, by_rank = both(damaged(name, *WAYS[way], kind))
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


def outside(image: ClassImage) -> ClassImage:
    return replace(image, peers={**image.peers, NEXT: np.append(image.peers[NEXT], len(image.data))})


def beyond(image: ClassImage) -> ClassImage:
    """A peer two stages further, where there are two stages: the rank itself."""
    peers = {Peer(("pp",), 2): image.peers[NEXT][:1], NEXT: image.peers[NEXT][1:]}
    return replace(image, peers={**image.peers, **peers})


def narrow(image: ClassImage) -> ClassImage:
    return replace(image, groups={**image.groups, ("tp",): image.groups["tp",][:, 1:]})


def unknown(image: ClassImage) -> ClassImage:
    return replace(image, groups={**image.groups, ("dp", "tp"): image.groups["tp",]})


@pytest.mark.parametrize("change", [outside, beyond, narrow, unknown])
def test_tables_that_no_rank_can_be_made_from_are_found(change: Change) -> None:
    report = verify_classes(with_images(small(), {0: change}).classes)
    assert rules(report) == {"patch"}


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

    def numbers(self, axes: tuple[str, ...], positions: Ints) -> Ints:
        shifted = positions - (positions == self.mesh.world - 1) if axes == ("dp",) else positions
        return super().numbers(axes, shifted)


class OtherMembers(GroupTable):
    """Two ranks of two groups have changed places."""

    def members(self, axes: tuple[str, ...]) -> Ints:
        rows = super().members(axes).copy()
        rows[0, 0], rows[-1, -1] = rows[-1, -1], rows[0, 0]
        return rows if len(rows) > 1 else super().members(axes)


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
    traces.classes.partition = Partition(traces.classes.mesh, ("dp",))
    assert rules(verify_classes(traces.classes)) == {"class-shape"}


# -------------------------------------------------------------------------------------------- folders


@pytest.fixture(params=[False, True], ids=["in place", "placed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options: dict[str, Any] = {"placement": [3, 1, 0, 2, 7, 6, 4, 5]} if request.param else {}
    found = synthesize(
        "llama3-8b", sizes={**TINY, "d_ff": 128}, seq=32, gpus=8, tp=2, pp=2, batch=8, **options
    )
    found.write(tmp_path / "t")
    return tmp_path / "t"


def test_classes_of_a_folder_are_recognised_and_prove_it(folder: Path) -> None:
    source = open_directory(folder)
    classes = recognise_classes(source)
    assert classes is not None
    assert verify_set(source) == verify_classes(classes)
    assert verify_set(source) == verify_set(source, exhaustive=True)
    assert verify_set(source).ok


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_any_damaged_byte_of_a_file_is_found_as_it_is_rank_by_rank(folder: Path, rank: int) -> None:
    file = folder / f"trace.{rank}.et"
    data = bytearray(file.read_bytes())
    at = data.rindex(b"comm_size") + len(b"comm_size") + 1
    data[at] ^= 2
    file.write_bytes(data)
    source = open_directory(folder)
    assert recognise_classes(source) is None
    report = verify_set(source)
    assert rules(report) & {"message-size", "collective-mismatch"}
    assert report == verify_set(source, exhaustive=True)


def set_groups(text: str) -> str:
    return text.replace('"1": [', '"1": [9, ')


def set_atoms(text: str) -> str:
    return text.replace('"dp",\n    2', '"dp",\n    4')


def set_pipeline(text: str) -> str:
    return text.replace('"pp",\n    2', '"xx",\n    2')


@pytest.mark.parametrize(
    ("name", "change"),
    [("groups.json", set_groups), ("manifest.json", set_atoms), ("manifest.json", set_pipeline)],
)
def test_a_folder_that_its_manifest_does_not_describe_is_read_rank_by_rank(
    folder: Path, name: str, change: Callable[[str], str]
) -> None:
    file = folder / name
    text = change(file.read_text())
    assert text != file.read_text()
    file.write_text(text)
    source = open_directory(folder)
    assert recognise_classes(source) is None
    assert verify_set(source) == verify_set(source, exhaustive=True)
    assert not verify_set(source).ok
    assert name == "groups.json" or rules(verify_set(source)) == {"manifest"}


@pytest.mark.parametrize("manifest", [{}, {"mesh": 3}, {"mesh": {"atoms": [["dp"]]}, "classes": [1]}])
def test_any_manifest_is_taken_for_a_hint(folder: Path, manifest: dict[str, object]) -> None:
    source = replace(open_directory(folder), manifest=manifest)
    assert recognise_classes(source) is None
    assert verify_set(source).ok


@pytest.mark.parametrize(
    "key",
    [
        ("mesh", "atoms", 0, 1),
        ("mesh", "atoms", 0, 0),
        ("mesh", "atoms"),
        ("mesh",),
        ("classes",),
        ("placement",),
    ],
)
@pytest.mark.parametrize("value", [None, -1, 0, 1, 3, "x", [], {}, [0, 0], [["pp", 2]] * 4, [None] * 8])
def test_no_manifest_breaks_the_search_for_classes(
    folder: Path, key: tuple[str | int, ...], value: object
) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    place = manifest
    for step in key[:-1]:
        place = place[step]
    place[key[-1]] = value
    source = replace(open_directory(folder), manifest=manifest)
    recognise_classes(source)
    assert rules(verify_set(source)) <= {"manifest"}


WRONG: dict[str, tuple[tuple[str | int, ...], object]] = {
    "ranks": (("ranks",), 9),
    "groups": (("groups",), 3),
    "written": (("written",), "some"),
    "mesh": (("mesh", "atoms"), [["pp", 2], ["dp", 2], ["tp", 4]]),
    "placement": (("placement",), [0] * 8),
    "classes": (("classes",), [1, 2]),
    "mesh of": (("mesh",), {}),
    "classes of": (("classes",), [{}]),
    "classes[1].sha256": (("classes", 1, "sha256"), "0" * 64),
    "classes[0].bytes": (("classes", 0, "bytes"), 17),
    "classes[1].nodes": (("classes", 1, "nodes"), 1),
    "classes[0].num_ops": (("classes", 0, "num_ops"), 5.0),
    "classes[0].ranks": (("classes", 0, "ranks"), 3),
}


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("key", WRONG)
def test_what_a_manifest_says_wrongly_is_found(folder: Path, key: str, exhaustive: bool) -> None:
    path, value = WRONG[key]
    manifest = place = json.loads((folder / "manifest.json").read_text())
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    report = verify_set(open_directory(folder), exhaustive=exhaustive)
    assert [(defect.rule, defect.rank) for defect in report.defects] == [("manifest", None)]
    assert report.defects[0].message.startswith(f"{key.split(maxsplit=1)[0]} of the manifest ")


def test_ranks_that_are_missing_leave_no_classes(folder: Path) -> None:
    (folder / "trace.5.et").unlink()
    report = verify_set(open_directory(folder))
    assert [(defect.rule, defect.rank) for defect in report.defects] == [("rank-missing", 5)]
    assert "has no file, but the manifest says that it is written" in report.defects[0].message
    assert report.unchecked


def test_ranks_that_the_manifest_does_not_list_are_not_missed(folder: Path) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    for rank in (2, 5):
        (folder / f"trace.{rank}.et").unlink()
    file.write_text(json.dumps({**manifest, "written": [0, 1, 2, 3, 4, 6, 7]}))
    report = verify_set(open_directory(folder))
    assert [(defect.rule, defect.rank) for defect in report.defects] == [("rank-missing", 2)]
    file.unlink()
    assert verify_set(open_directory(folder)).ok


def test_missing_ranks_are_named_up_to_a_limit(tmp_path: Path) -> None:
    traces = {0: TraceSet.of(tiny_job(gpus=1, batch=1)).rank(0)}
    manifest = {"world": 2**40, "written": "all"}
    write_directory(tmp_path / "t", 1, traces, traces.__getitem__, {}, {})
    (tmp_path / "t/manifest.json").write_text(json.dumps(manifest))
    report = verify_set(open_directory(tmp_path / "t"))
    missing = [defect for defect in report.defects if defect.rule == "rank-missing"]
    assert [defect.rank for defect in missing] == [*range(1, 21), None]
    assert missing[-1].message == f"{2**40 - 21} ranks more without a file"


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_table_on_both_ends_of_a_longer_pipeline(pp: int) -> None:
    """Its groups have two ranks each, however many stages stand between them."""
    tied = synthesize("llama3.2-1b", gpus=4 * pp, tp=2, pp=pp, batch=4 * pp, seq=64, sizes={"layers": 12})
    assert tied.classes.groups.groups(("pp_ends",)) == 4
    assert verify_set(tied).ok
    assert verify_set(tied, exhaustive=True).ok
