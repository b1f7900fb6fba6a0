"""Peers: the formula against a search over coordinates, and messages to any peer proved, bundled and recognised."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.io.recognise import recognise_classes
from stage.mesh import Mesh, build_mesh
from stage.trace.classes import RankClasses
from stage.trace.expand import ClassImage
from stage.trace.image import NameStyle
from stage.trace.job import Job
from stage.trace.peer import OWN, Peer, peer_positions
from stage.trace.program import Assembly, Program
from stage.trace.report import Report
from stage.trace.spans import communication_spans
from stage.trace.streams import chain
from stage.trace.template import Ref, Template, TemplateNode
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from stage.traceset import TraceSet

MESHES = (
    build_mesh(pp=3, dp=2, cp=4, tp=2),
    build_mesh(pp=2, dp=4, cp=2, tp=2, ep=4),
    build_mesh(dp=4, cp=3, dp_shard=2),
)


def by_search(mesh: Mesh, position: int, peer: Peer) -> int:
    """The one position with the coordinates that the peer has, among all."""
    here = mesh.coordinates(position)
    for at in range(mesh.world):
        there = mesh.coordinates(at)
        place = [0, 0]
        for atom in peer.atoms:
            place = [
                p * mesh.degree(atom) + found[atom] for p, found in zip(place, (here, there), strict=True)
            ]
        others = all(here[atom] == there[atom] for atom in mesh.names if atom not in peer.atoms)
        if others and (place[1] - place[0] - peer.offset) % mesh.degree(peer.atoms) == 0:
            return at
    raise AssertionError(peer)


@settings(max_examples=60, deadline=None)
@given(mesh=st.sampled_from(MESHES), data=st.data())
def test_the_formula_is_what_a_search_over_coordinates_finds(mesh: Mesh, data: st.DataObject) -> None:
    atoms = tuple(data.draw(st.lists(st.sampled_from(mesh.names), unique=True, min_size=1, max_size=3)))
    peer = Peer(atoms, data.draw(st.integers(-9, 9).filter(lambda n: n % mesh.degree(atoms))))
    found = peer_positions(mesh, np.arange(mesh.world), peer).tolist()
    assert found == [by_search(mesh, position, peer) for position in range(mesh.world)]


def test_a_peer_without_axes_is_the_rank_itself() -> None:
    assert peer_positions(MESHES[0], np.arange(48), OWN).tolist() == list(range(48))


@pytest.mark.parametrize("peer", [Peer(("ep",), 1), Peer(("cp",), 4), Peer((), 1), Peer(("cp", "cp"), 1)])
def test_a_peer_that_is_no_other_rank_is_our_mistake(peer: Peer) -> None:
    with pytest.raises(AssertionError, match="no rank has a peer"):
        peer_positions(MESHES[0], np.arange(4), peer)


# ------------------------------------------------------------------------------------ messages to any peer

RINGS = {
    "ring": (MESHES[0], ("cp",), (1, 1)),
    "ring that goes back": (MESHES[0], ("cp",), (-1, 1)),
    "ring of two": (build_mesh(pp=2, cp=2), ("cp",), (1, -1)),
    "inner ring": (build_mesh(pp=2, dp=4, dp_shard=2, cp=2), ("dp_shard", "cp"), (1, -1)),
    "pairwise": (MESHES[1], MESHES[1].expand("ep"), (1, 2, 3)),
    "over and within": (MESHES[2], ("dp_replicate", "dp_shard"), (1, 2, 3)),
}


def message(kind: str, atoms: tuple[str, ...], offset: int, size: int) -> Template:
    """A send to a peer, or the receive of what its opposite sends."""
    deps = (Ref("port", "work"),)
    channel = f"recv{offset}" if kind == "recv" else ""
    peer = Peer(atoms, offset if kind == "send" else -offset)
    node = TemplateNode(f"ring{offset}.{kind}", kind, kind, size, peer=peer, deps=deps, channel=channel)
    return Template("ring", "forward", chain([node]), numbers=())


def ring_job(mesh: Mesh, atoms: tuple[str, ...], offsets: tuple[int, ...], rounds: int = 3) -> Job:
    """Rounds of work, each with a message to every offset; stages do their rounds one after the other."""
    work = Template(
        "ring", "forward", chain([TemplateNode("work", "compute", "work", 8, 8)]), numbers=("layer",)
    )
    programs = []
    for _ in range(mesh.degree("pp")):
        assembly = Assembly()
        for layer in range(rounds):
            done = assembly.place(work, layer)
            for at, offset in enumerate(offsets):
                for kind in ("send", "recv"):
                    tag = layer * len(offsets) + at
                    assembly.place(message(kind, atoms, offset, 8 + at), tag=tag, work=done)
        programs.append(assembly.program())
    return Job(mesh, tuple(programs), NameStyle(1, 0, 0), {"mesh": {"atoms": [list(a) for a in mesh.atoms]}})


def ring_set(name: str, seed: int | None = None) -> TraceSet:
    mesh, atoms, offsets = RINGS[name]
    placement = None if seed is None else np.random.default_rng(seed).permutation(mesh.world).astype(np.int64)
    description = {"placement": None if placement is None else placement.tolist()}
    found = ring_job(mesh, atoms, offsets)
    return TraceSet.of(replace(found, placement=placement, description={**found.description, **description}))


def outcome(report: Report) -> tuple[int, int, set[str]]:
    return report.ranks, report.nodes, {defect.rule for defect in report.defects}


@pytest.mark.parametrize("seed", [None, 7], ids=["in place", "placed"])
@pytest.mark.parametrize("name", RINGS)
def test_messages_to_peers_are_proved_by_both(name: str, seed: int | None) -> None:
    traces = ring_set(name, seed)
    ranks, nodes, rules = outcome(verify(traces))
    assert (ranks, rules) == (traces.world, set())
    assert outcome(verify_classes(traces.classes)) == (ranks, nodes, rules)


@pytest.mark.parametrize("seed", [None, 7], ids=["in place", "placed"])
@pytest.mark.parametrize("name", RINGS)
def test_every_rank_names_its_peers(name: str, seed: int | None) -> None:
    traces = ring_set(name, seed)
    mesh, atoms, offsets = RINGS[name]
    for rank in (0, traces.world // 3, traces.world - 1):
        position = traces.classes.position(rank)
        there = {
            offset: traces.classes.rank_at(by_search(mesh, position, Peer(atoms, offset)))
            for offset in {*offsets, *(-offset for offset in offsets)}
        }
        for node in traces.nodes(rank):
            if node.get("op") in ("send", "recv"):
                offset = int(node.name.partition(".ring")[2].partition(".")[0])
                ends = (rank, there[offset]) if node.get("op") == "send" else (there[-offset], rank)
                assert (node.get("comm_src"), node.get("comm_dst")) == ends


@pytest.mark.parametrize("seed", [None, 7], ids=["in place", "placed"])
@pytest.mark.parametrize("name", RINGS)
def test_peers_survive_a_bundle_and_are_recognised_in_a_folder(
    tmp_path: Path, name: str, seed: int | None
) -> None:
    traces = ring_set(name, seed)
    traces.write_bundle(tmp_path / "t.stage")
    again = TraceSet.open(tmp_path / "t.stage")
    assert [again.rank(rank) for rank in again.ranks] == [traces.rank(rank) for rank in traces.ranks]
    traces.write(tmp_path / "t")
    source = TraceSet.open(tmp_path / "t")
    assert not isinstance(source, TraceSet)
    classes = recognise_classes(source)
    assert classes is not None
    assert verify_classes(classes) == verify_classes(traces.classes)


# ------------------------------------------------------------------------------------------ wrong peers


def with_image(traces: TraceSet, number: int, made: ClassImage) -> TraceSet:
    old = traces.classes
    classes = RankClasses(
        old.partition, old.groups.axes, lambda n: made if n == number else old.image(n), old.placement
    )
    return TraceSet(classes, traces.description, traces.summaries)


@pytest.mark.parametrize("other", [Peer(("tp",), 1), Peer(("cp",), 2), Peer(("dp", "cp"), 1), OWN])
@pytest.mark.parametrize("seed", [None, 7], ids=["in place", "placed"])
def test_one_message_to_another_peer_is_found_by_both(other: Peer, seed: int | None) -> None:
    """Of the first rank the next over dp and cp together is the next over cp; of the last in a ring it is not."""
    traces = ring_set("ring", seed)
    image = traces.classes.image(1)
    usual = Peer(("cp",), 1)
    own = image.peers.get(other, np.zeros(0, np.int64))
    peers = {
        **image.peers,
        usual: image.peers[usual][1:],
        other: np.append(own, image.peers[usual][:1]),
    }
    broken = with_image(traces, 1, replace(image, peers=peers))
    assert not verify_classes(broken.classes).ok
    assert not verify(broken).ok


def test_a_message_written_for_another_rank_is_found_by_both() -> None:
    """The same number on all ranks of a class."""
    traces = ring_set("ring")
    image = traces.classes.image(0)
    usual = Peer(("cp",), 1)
    data = image.data.copy()
    start = int(image.peers[usual][0])
    data[start : start + 3] = np.frombuffer(traces.rank(0), np.uint8)[start : start + 3]
    peers = {**image.peers, usual: image.peers[usual][1:]}
    broken = with_image(traces, 0, replace(image, data=data, peers=peers))
    by_class = verify_classes(broken.classes)
    assert "patch" in {defect.rule for defect in by_class.defects}
    assert not verify(broken).ok


def change(program: Program, at: int, **fields: int | Peer) -> Program:
    templates = list(program.templates)
    (node,) = templates[at].nodes
    templates[at] = replace(templates[at], nodes=(replace(node, **fields),))  # type: ignore[arg-type]
    return replace(program, templates=tuple(templates))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [({"bytes": 9}, "message-size"), ({"peer": Peer(("cp",), 2)}, "send-unmatched")],
)
def test_messages_within_a_class_that_do_not_pair_up_are_found_by_both(
    fields: dict[str, int | Peer], rule: str
) -> None:
    found = ring_job(*RINGS["ring"])
    at = next(i for i, t in enumerate(found.programs[0].templates) if t.nodes[0].kind == "send")
    programs = (change(found.programs[0], at, **fields), *found.programs[1:])
    traces = TraceSet.of(replace(found, programs=programs))
    by_class, by_rank = verify_classes(traces.classes), verify(traces)
    assert rule in {defect.rule for defect in by_class.defects}
    assert {d.rule for d in by_class.defects} == {d.rule for d in by_rank.defects}
    assert {(d.rule, d.node) for d in by_class.defects} == {(d.rule, d.node) for d in by_rank.defects}


def test_a_ring_that_waits_for_itself_is_found_by_both() -> None:
    """Every rank receives before it sends, so that none begins."""
    mesh, atoms = MESHES[0], ("cp",)
    assembly = Assembly()
    received = assembly.place(message("recv", atoms, 1, 8), tag=0)
    assembly.place(message("send", atoms, 1, 8), tag=0, work=received)
    start = Template("ring", "forward", chain([TemplateNode("work", "compute", "work", 8, 8)]), numbers=())
    assembly.place(start)
    job = Job(mesh, (assembly.program(),) * 3, NameStyle(0, 0, 0), {})
    traces = TraceSet.of(job)
    for report in (verify_classes(traces.classes), verify(traces)):
        assert [defect.rule for defect in report.defects] == ["deadlock"]


def test_peers_of_several_classes_are_no_symmetry() -> None:
    """Flattened with the stages, the next rank of the last one of a stage is of the next stage."""
    traces = TraceSet.of(ring_job(build_mesh(pp=2, cp=2), ("pp", "cp"), (1,)))
    report = verify_classes(traces.classes)
    assert "class-shape" in {defect.rule for defect in report.defects}
    assert verify(traces).ok


def test_a_field_of_the_ranks_own_is_found_in_each_message() -> None:
    traces = ring_set("ring")
    image = traces.classes.image(0)
    starts = {span.start for span in communication_spans(traces.rank(0))}
    assert starts == {int(at) for places in image.peers.values() for at in places}
