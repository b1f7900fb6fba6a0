"""Rank classes over other axes than the stages: formulas, bytes of every rank, files, and the proof by classes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.io.chakra import open_directory
from stage.io.recognise import recognise_classes
from stage.mesh import Mesh, build_mesh
from stage.trace.classes import RankClasses
from stage.trace.groups import PIPELINE_ENDS
from stage.trace.image import NameStyle
from stage.trace.job import Job
from stage.trace.partition import Partition
from stage.trace.peer import Peer
from stage.trace.program import Assembly, Program
from stage.trace.streams import chain
from stage.trace.template import Ref, Template, TemplateNode
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from stage.traceset import TraceSet
from stage.verification import verify_set

MESH = build_mesh(pp=2, dp=2, cp=3, tp=2)
MESHES = (MESH, build_mesh(pp=2, dp=4, cp=2, tp=2, ep=4), build_mesh(dp=4, cp=3, dp_shard=2), build_mesh())


@settings(max_examples=60, deadline=None)
@given(mesh=st.sampled_from(MESHES), data=st.data())
def test_classes_have_the_ranks_with_the_same_coordinates(mesh: Mesh, data: st.DataObject) -> None:
    variants = data.draw(st.lists(st.sampled_from(mesh.names), unique=True)) if mesh.names else []
    parts = Partition.of(mesh, variants)
    assert set(parts.axes) == {*variants, *(name for name in mesh.names if name == "pp")}
    found: dict[tuple[int, ...], list[int]] = {}
    for position in range(mesh.world):
        here = mesh.coordinates(position)
        found.setdefault(tuple(here[axis] for axis in parts.axes), []).append(position)
    assert parts.count == len(found)
    for number, (coordinates, members) in enumerate(sorted(found.items())):
        assert parts.positions(number).tolist() == members
        assert (parts.first(number), parts.ranks_per_class) == (members[0], len(members))
        assert tuple(parts.coordinates(number).values()) == coordinates
        assert parts.numbers(np.array(members)).tolist() == [number] * len(members)
        assert [parts.number(position) for position in members] == [number] * len(members)


# ------------------------------------------------------------------------------------------ a set of classes


def program(coordinates: dict[str, int]) -> Program:
    """Work that grows with the place along cp, a ring over it, and collectives over every axis."""
    stage, place = coordinates.get("pp", 0), coordinates.get("cp", 0)
    assembly = Assembly()
    work = TemplateNode("work", "compute", "work", 8, 100 + place)
    done = assembly.place(Template("layer", "forward", chain([work]), numbers=()))
    for axes in (("dp",), ("cp",), ("cp", "tp"), PIPELINE_ENDS):
        node = TemplateNode(
            f"sum_{axes[-1]}", "all_reduce", "sum", 16, axes=axes, deps=(Ref("port", "work"),)
        )
        assembly.place(Template("layer", "forward", chain([node]), numbers=()), work=done)
    ends = [("send", Peer(("cp",), 1)), ("recv", Peer(("cp",), -1))]
    ends += [("send", Peer(("pp",), 1))] if stage == 0 else [("recv", Peer(("pp",), -1))]
    for tag, (kind, peer) in enumerate(ends):
        size = 8 if "cp" in peer.atoms else 8 + place
        channel = f"recv{tag}" if kind == "recv" else ""
        node = TemplateNode(f"ring{tag}", kind, kind, size, peer=peer, channel=channel)
        assembly.place(Template("layer", "forward", chain([node]), numbers=()), tag=tag // 2)
    return assembly.program()


def variant_job(
    variants: Sequence[str] = ("cp",), change: Callable[[int, TemplateNode], TemplateNode] | None = None
) -> Job:
    """A job whose classes are stages and coordinates over `variants`; `change` is applied to nodes of a class."""
    parts = Partition.of(MESH, variants)
    programs = [program(parts.coordinates(number)) for number in range(parts.count)]
    if change is not None:
        for number, made in enumerate(programs):
            templates = [
                replace(template, nodes=tuple(change(number, node) for node in template.nodes))
                for template in made.templates
            ]
            programs[number] = replace(made, templates=tuple(templates))
    description = {"mesh": {"atoms": [list(atom) for atom in MESH.atoms]}, "placement": None}
    return Job(MESH, tuple(programs), NameStyle(0, 0, 0), description, variants=tuple(variants))


def placed(job: Job, seed: int) -> Job:
    order = np.random.default_rng(seed).permutation(job.mesh.world).astype(np.int64)
    return replace(job, placement=order, description={**job.description, "placement": order.tolist()})


@pytest.fixture(params=[False, True], ids=["in place", "placed"])
def traces(request: pytest.FixtureRequest) -> TraceSet:
    return TraceSet.of(placed(variant_job(), 5) if request.param else variant_job())


def test_each_rank_runs_the_program_of_its_class(traces: TraceSet) -> None:
    assert traces.classes.count == 6
    for rank in traces.ranks:
        place = MESH.coordinates(traces.classes.position(rank))
        nodes = {node.name: node for node in traces.nodes(rank)}
        assert nodes["layer.work/forward"].get("num_ops") == 100 + place["cp"]
        assert nodes["layer.ring2/forward"].get("comm_size") == 8 + place["cp"]


def test_ranks_are_the_same_alone_and_in_any_order(traces: TraceSet) -> None:
    alone = [traces.rank(rank) for rank in traces.ranks]
    for order in (list(traces.ranks), list(traces.ranks)[::-1], [5, 0, 5, 7, 1, 5]):
        assert [bytes(data) for data in traces.classes.each_bytes(order)] == [alone[rank] for rank in order]


def test_images_that_are_forgotten_between_ranks_are_made_again(traces: TraceSet) -> None:
    old = traces.classes
    classes = RankClasses(old.partition, old.groups.axes, old.image, old.placement, keep=1)
    assert [bytes(data) for data in classes.each_bytes(list(traces.ranks))] == [
        traces.rank(rank) for rank in traces.ranks
    ]


def test_the_set_is_proved_by_both(traces: TraceSet) -> None:
    by_class, by_rank = verify_classes(traces.classes), verify(traces)
    assert by_class.defects == by_rank.defects == ()
    assert (by_class.ranks, by_class.nodes) == (by_rank.ranks, by_rank.nodes)


def test_the_set_survives_a_bundle_and_a_folder(traces: TraceSet, tmp_path: Path) -> None:
    assert traces.manifest["class_axes"] == ["pp", "cp"]
    traces.write_bundle(tmp_path / "t.stage")
    again = TraceSet.open(tmp_path / "t.stage")
    assert isinstance(again, TraceSet)
    assert [again.rank(rank) for rank in again.ranks] == [traces.rank(rank) for rank in traces.ranks]
    assert again.manifest == traces.manifest
    traces.write(tmp_path / "t")
    source = open_directory(tmp_path / "t")
    classes = recognise_classes(source)
    assert classes is not None
    assert classes.partition.axes == ("pp", "cp")
    assert verify_set(source) == verify_classes(classes) == verify_classes(traces.classes)
    assert verify_set(source, exhaustive=True).ok


@pytest.mark.parametrize("axes", [["cp", "pp"], ["cp"], ["pp", "x"], ["pp", "cp", "tp"], 3, ["pp", 3], None])
def test_class_axes_that_a_manifest_says_wrongly_are_found(tmp_path: Path, axes: object) -> None:
    TraceSet.of(variant_job()).write(tmp_path / "t")
    source = open_directory(tmp_path / "t")
    source = replace(source, manifest={**(source.manifest or {}), "class_axes": axes})
    assert recognise_classes(source) is None
    assert {defect.rule for defect in verify_set(source).defects} == {"manifest"}


def test_every_rank_may_be_a_class() -> None:
    traces = TraceSet.of(variant_job(("dp", "cp", "tp")))
    assert traces.classes.count == traces.world
    assert verify_classes(traces.classes).ok
    assert [traces.rank(rank) for rank in traces.ranks] == [
        TraceSet.of(variant_job()).rank(rank) for rank in traces.ranks
    ]


# ------------------------------------------------------------------------------------- classes that disagree


def larger(name: str, number: int) -> Callable[[int, TemplateNode], TemplateNode]:
    def change(at: int, node: TemplateNode) -> TemplateNode:
        return replace(node, bytes=node.bytes + 8) if at == number and node.name == name else node

    return change


@pytest.mark.parametrize(
    ("name", "number", "rule"),
    [
        ("sum_cp", 4, "collective-mismatch"),
        ("sum_tp", 1, "collective-mismatch"),
        ("sum_pp_ends", 2, "collective-mismatch"),
        ("ring0", 0, "message-size"),
        ("ring1", 5, "message-size"),
        ("ring2", 3, "message-size"),
    ],
)
def test_a_class_that_disagrees_with_others_is_found_by_both(name: str, number: int, rule: str) -> None:
    traces = TraceSet.of(variant_job(change=larger(name, number)))
    by_class, by_rank = verify_classes(traces.classes), verify(traces)
    assert {d.rule for d in by_class.defects} == {d.rule for d in by_rank.defects} == {rule}


def test_a_class_alone_in_its_groups_may_differ() -> None:
    """A sum over dp is one of ranks with the same place along cp."""
    traces = TraceSet.of(variant_job(change=larger("sum_dp", 4)))
    assert verify_classes(traces.classes).ok
    assert verify(traces).ok
