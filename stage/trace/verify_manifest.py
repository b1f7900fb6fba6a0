"""What a manifest says of a set, compared with the files: other programs trust it, and read it alone."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from stage.errors import TraceError
from stage.trace.classes import RankClasses
from stage.trace.image import PEER_WIDTH, attribute
from stage.trace.partition import STAGES
from stage.trace.report import Defect, short
from stage.trace.wire import read_trace

__all__ = ["class_axes", "is_atom", "manifest_defects"]


def manifest_defects(
    manifest: Mapping[str, Any], world: int, groups: int, classes: RankClasses | None
) -> Iterator[Defect]:
    """Yield what a manifest says wrongly of a set of so many ranks and groups.

    `classes` are those that the files are made of, None where these are not known. A manifest without `world` is that
    of another producer, whose keys may mean anything.
    """
    if "world" not in manifest:
        return
    problems = [*sizes(manifest, world, groups), *shape(manifest, world)]
    if classes is not None:
        problems += class_entries(manifest, classes)
    for key, text in problems:
        yield Defect(None, None, "manifest", f"{key} of the manifest {text}: write the set again")


def sizes(manifest: Mapping[str, Any], world: int, groups: int) -> Iterator[tuple[str, str]]:
    """Yield the counts that are not those of the files, by their keys, and a list of files that is none."""
    for key, expected, what in (("ranks", world, "ranks"), ("groups", groups, "groups")):
        if key in manifest and (type(manifest[key]) is not int or manifest[key] != expected):
            yield key, f"is {short(manifest[key])}, but the set has {expected} {what}"
    written = manifest.get("written", "all")
    if written != "all" and not (isinstance(written, list) and all(type(rank) is int for rank in written)):
        yield "written", f"is {short(written)}, neither 'all' nor a list of ranks"


def shape(manifest: Mapping[str, Any], world: int) -> Iterator[tuple[str, str]]:
    """Yield what is malformed of the mesh, of the placement and of the list of classes."""
    mesh = manifest.get("mesh")
    atoms = mesh.get("atoms") if isinstance(mesh, dict) else None
    count = None
    if "mesh" in manifest and not (isinstance(atoms, list) and all(map(is_atom, atoms))):
        yield "mesh", f"is {short(mesh)}, without a list of atoms, names and degrees above 1"
    elif atoms is not None:
        degrees = dict(atoms)
        axes = class_axes(manifest, tuple(degrees))
        count = None if axes is None else math.prod(degrees[axis] for axis in axes)
        if axes is None:
            yield (
                "class_axes",
                f"is {short(manifest['class_axes'])}, not a list of atoms of the mesh in its order",
            )
        if len(degrees) < len(atoms):
            yield "mesh", f"has the atoms {short(atoms)}, one of them twice"
        elif math.prod(degrees.values()) != world:
            yield "mesh", f"is one of {math.prod(degrees.values())} ranks, but the set has {world} ranks"
    placed = manifest.get("placement")
    if placed is not None:
        known = isinstance(placed, list) and all(type(rank) is int for rank in placed)
        if not known or len(placed) != world or set(placed) != set(range(len(placed))):
            yield "placement", f"is {short(placed)}, not a list of all {world} ranks"
    entries = manifest.get("classes", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        yield "classes", f"is {short(entries)}, not a list of objects"
    elif "classes" in manifest and count is not None and len(entries) != count:
        yield "classes", f"has {len(entries)} entries, but by the mesh there are {count} classes"


def class_axes(manifest: Mapping[str, Any], atoms: tuple[str, ...]) -> tuple[str, ...] | None:
    """The axes of classes that a manifest names among these atoms, stages if it names none; None for others."""
    stages = tuple(name for name in atoms if name == STAGES)
    named = manifest.get("class_axes", list(stages))
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        return None
    axes = tuple(name for name in atoms if name in named or name in stages)
    return axes if named == list(axes) else None


def is_atom(value: object) -> bool:
    """Whether a value is the name and the degree of an atom."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and type(value[1]) is int
        and value[1] > 1
    )


def class_entries(manifest: Mapping[str, Any], classes: RankClasses) -> Iterator[tuple[str, str]]:
    """Yield what the entries of the classes say otherwise than the files."""
    entries = manifest.get("classes", [])
    for number, entry in zip(range(classes.count), entries, strict=False):
        for key, value in class_facts(classes, number) if isinstance(entry, dict) else ():
            if key in entry and (type(entry[key]) is not type(value) or entry[key] != value):
                yield f"classes[{number}].{key}", f"is {short(entry[key])}, but by the files {short(value)}"


def class_facts(classes: RankClasses, number: int) -> Iterator[tuple[str, int | str]]:
    """Yield what the files say of a class; of traces that can not be read, not what is in them."""
    yield "class", number
    yield "ranks", classes.ranks_per_class
    yield "bytes", len(classes.image(number).data)
    yield "sha256", shared_digest(classes, number)
    nodes = work = 0
    try:
        for node in read_trace(classes.image(number).data.data)[1]:
            nodes += 1
            found = node.attrs.get("num_ops")
            work += found.value if found is not None and type(found.value) is int else 0
    except TraceError:
        return
    yield "nodes", nodes
    yield "num_ops", work


def shared_digest(classes: RankClasses, number: int) -> str:
    """The SHA-256 of what the ranks of a class share: their bytes with zeros for the names and ranks of their own."""
    image = classes.image(number)
    data = image.data.copy()
    for places in image.groups.values():
        width = places.shape[1]
        name = attribute("pg_name", "string_val", "0" * max(1, width - 5), width=width)
        data[places] = list(name[-width:])
    peer = attribute("comm_src", "int32_val", 0, width=PEER_WIDTH)
    for places in image.peers.values():
        for at, byte in enumerate(peer[-PEER_WIDTH:]):
            data[places + at] = byte
    return hashlib.sha256(data.data).hexdigest()
