"""The job of a bundle: everything but bytes, as JSON, and the proof that what was read of it makes sense.

Group numbers, widths and the schema are written out although they follow from the mesh, so that another reader need
not know the rules, and so that this one notices should it ever follow others.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage.io.container import MAX_MEMBER
from stage.io.parts import json_text
from stage.mesh import Mesh
from stage.trace.classes import RankClasses
from stage.trace.groups import PIPELINE_ENDS, GroupTable
from stage.trace.image import PEER_WIDTH
from stage.trace.partition import Partition
from stage.trace.peer import Peer

__all__ = [
    "JOB_LIMIT",
    "MAX_PATCHED",
    "MAX_WORLD",
    "ClassEntry",
    "GroupEntry",
    "JobEntry",
    "encode_job",
    "parse_job",
]

JOB_LIMIT = 8 << 20
MAX_WORLD = 1 << (7 * PEER_WIDTH)  # a peer's number has this many bits in a trace
MAX_MEMBERS = 1 << 25  # ranks of all groups together
MAX_PATCHED = 1 << 25  # bytes of an image that are a rank's own


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A set of axes that communicates: the number of its first group, and the bytes of a name with its length."""

    axes: tuple[str, ...]
    first: int
    width: int


@dataclass(frozen=True, slots=True)
class ClassEntry:
    """A class: the length and digest of its image, the lengths of its tables, and its totals for the manifest.

    `groups` has the axes and `peers` the formula with each table's number of positions.
    """

    size: int
    sha256: str
    groups: tuple[tuple[tuple[str, ...], int], ...]
    peers: tuple[tuple[Peer, int], ...]
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobEntry:
    """The job: `placed` says whether there is a placement, `listed` whether the description repeats it."""

    partition: Partition
    groups: tuple[GroupEntry, ...]
    description: Mapping[str, Any]
    placed: bool
    listed: bool
    classes: tuple[ClassEntry, ...]

    @staticmethod
    def of(classes: RankClasses, description: Mapping[str, Any], entries: Sequence[ClassEntry]) -> "JobEntry":
        """The job of these classes; a placement that the description repeats is left out of it."""
        placed = classes.placement is not None
        listed = placed and description.get("placement") == classes.placement.tolist()  # type: ignore[union-attr]
        kept = {key: value for key, value in description.items() if key != "placement" or not listed}
        return JobEntry(classes.partition, entries_of(classes.groups), kept, placed, listed, tuple(entries))


def entries_of(groups: GroupTable) -> tuple[GroupEntry, ...]:
    """All sets of axes of a job, in the order of their numbers."""
    return tuple(GroupEntry(axes, groups.first[axes], groups.width(axes)) for axes in groups.axes)


def encode_job(job: JobEntry) -> bytes:
    """Return a job as JSON."""
    content = {
        "mesh": {"atoms": job.partition.mesh.atoms, "axes": job.partition.mesh.axes},
        "class_axes": job.partition.axes,
        "groups": [{"axes": g.axes, "first": g.first, "width": g.width} for g in job.groups],
        "peer_width": PEER_WIDTH,
        "placement": job.placed,
        "placement_in_description": job.listed,
        "description": job.description,
        "classes": [
            {
                "bytes": c.size,
                "sha256": c.sha256,
                "groups": c.groups,
                "peers": [(*peer, count) for peer, count in c.peers],
                "summary": c.summary,
            }
            for c in job.classes
        ],
    }
    return json.dumps(content, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def parse_job(content: bytes, version: int) -> JobEntry:
    """Return the job in JSON text of a version of the format.

    ValueError, KeyError, TypeError or RecursionError say why it is none.
    """
    read = json.loads(content)
    mesh = parse_mesh(read["mesh"])
    groups = parse_groups(read["groups"], mesh)
    if read["peer_width"] != PEER_WIDTH:
        raise ValueError(f"its ranks are written with {read['peer_width']} bytes, not {PEER_WIDTH}")
    partition = Partition.of(mesh) if version == 1 else parse_partition(read["class_axes"], mesh)
    classes = read["classes"]
    if len(classes) != partition.count:
        raise ValueError(f"it has {len(classes)} classes, but by its mesh {partition.count}")
    known = {group.axes: group.width for group in groups}
    if version == 1:
        classes = [renewed(entry) for entry in classes]
    entries = tuple(parse_class(entry, i, mesh, known) for i, entry in enumerate(classes))
    description = checked(read["description"])
    flags = read["placement"] is True, read["placement_in_description"] is True
    return JobEntry(partition, groups, description, *flags, entries)


def parse_mesh(read: Mapping[str, Any]) -> Mesh:
    """Return a mesh that keeps the invariants of one."""
    atoms = tuple((text(name), integer(degree, 2, MAX_WORLD)) for name, degree in read["atoms"])
    axes = tuple((text(axis), tuple(text(name) for name in run)) for axis, run in read["axes"])
    names = [name for name, _ in atoms]
    if len(set(names)) < len(names) or len(names) > 64 or math.prod(n for _, n in atoms) > MAX_WORLD:
        raise ValueError(f"a mesh of {atoms} is none of up to {MAX_WORLD} ranks")
    for axis, run in axes:
        start = names.index(run[0]) if run else 0
        if list(run) != names[start : start + len(run)] or (axis in names and run != (axis,)):
            raise ValueError(f"axis {axis} of its mesh is no run of atoms: {run}")
    return Mesh(atoms, axes)


def parse_partition(read: Sequence[Any], mesh: Mesh) -> Partition:
    """Return classes whose axes are atoms of the mesh."""
    partition = Partition(mesh, tuple(text(name) for name in read))
    if not partition.sound:
        raise ValueError(f"{partition.axes} are no axes of classes on its mesh")
    return partition


def parse_groups(read: Sequence[Mapping[str, Any]], mesh: Mesh) -> tuple[GroupEntry, ...]:
    """Return the sets of axes, whose group numbers and widths must be those that follow from the mesh."""
    sets = [tuple(text(name) for name in entry["axes"]) for entry in read]
    for axes in sets:
        ends = axes == PIPELINE_ENDS and "pp" in mesh.names
        if not ends and (not axes or len(set(axes)) < len(axes) or not set(axes) <= set(mesh.names)):
            raise ValueError(f"{axes} are no axes of its mesh")
    if len(sets) * mesh.world > MAX_MEMBERS:
        raise ValueError(f"{len(sets)} sets of groups of {mesh.world} ranks are more than any job has")
    found = entries_of(GroupTable(mesh, sets))
    if [(g.axes, g.first, g.width) for g in found] != [
        (axes, entry["first"], entry["width"]) for axes, entry in zip(sets, read, strict=True)
    ]:
        raise ValueError("its groups are not numbered as this release numbers them")
    return found


def parse_class(
    read: Mapping[str, Any], number: int, mesh: Mesh, widths: Mapping[tuple[str, ...], int]
) -> ClassEntry:
    """Return a class whose peers exist and whose tables have a possible length."""
    groups = tuple((tuple(axes), integer(n, 0, MAX_PATCHED)) for axes, n in read["groups"])
    peers = tuple(
        (parse_peer(atoms, offset, mesh), integer(n, 0, MAX_PATCHED)) for atoms, offset, n in read["peers"]
    )
    if len(dict(groups)) < len(groups) or len(dict(peers)) < len(peers):
        raise ValueError(f"class {number} has two tables of one name")
    patched = sum(widths[axes] * n for axes, n in groups) + sum(PEER_WIDTH * n for _, n in peers)
    if patched > MAX_PATCHED:
        raise ValueError(f"class {number} has {patched} bytes of its ranks' own")
    summary = checked(read["summary"])
    integer(summary["nodes"], 0, MAX_MEMBER)
    return ClassEntry(integer(read["bytes"], 1, MAX_MEMBER), text(read["sha256"]), groups, peers, summary)


def parse_peer(atoms: Sequence[Any], offset: Any, mesh: Mesh) -> Peer:
    """Return a peer that there is on a mesh."""
    peer = Peer(tuple(text(atom) for atom in atoms), integer(offset, -MAX_WORLD, MAX_WORLD))
    if not peer.exists(mesh):
        raise ValueError(f"no rank of its mesh has a peer {peer}")
    return peer


def renewed(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return a class of version 1 as version 2 has it: there all peers were so many stages further."""
    peers = [[["pp"] if distance else [], distance, count] for distance, count in read["peers"]]
    return {**read, "peers": peers}


def checked(read: Any) -> dict[str, Any]:
    """Return an object that can be written into a manifest."""
    if not isinstance(read, dict):
        raise ValueError(f"a {type(read).__name__} stands where an object should")  # noqa: TRY004 - as all damage
    json_text(read).encode()
    return read


def text(read: Any) -> str:
    """Return a text."""
    if not isinstance(read, str):
        raise ValueError(f"a {type(read).__name__} stands where a text should")  # noqa: TRY004 - as all damage
    return read


def integer(read: Any, low: int, high: int) -> int:
    """Return a whole number within bounds."""
    if type(read) is not int or not low <= read <= high:
        raise ValueError(f"{read!r} stands where a number from {low} to {high} should")
    return read
