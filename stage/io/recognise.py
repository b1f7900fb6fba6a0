"""The rank classes of a folder of traces, found in its files: what its manifest says of the mesh is only a hint.

A folder that was written from classes is described by one file a class and the formulas of the mesh. Here these are
read off the files of the first ranks, and every file is read and compared with what they say of its rank. Only where
all agree, byte for byte, are the classes handed on; so a proof of them is a proof of the files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stage.errors import StageError
from stage.io.chakra import DirectorySource
from stage.io.recognise_peers import PeerSearch
from stage.mesh import Mesh
from stage.trace.classes import RankClasses
from stage.trace.expand import ClassImage
from stage.trace.groups import PIPELINE_ENDS, GroupTable
from stage.trace.image import PEER_WIDTH
from stage.trace.partition import STAGES, Partition
from stage.trace.peer import Peer
from stage.trace.spans import GROUP_NAME, Span, communication_spans, span_value
from stage.trace.verify_manifest import class_axes, is_atom

__all__ = ["recognise_classes"]

Placement = NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a manifest says of the mesh and the classes on it, which is checked against the files."""

    mesh: Mesh
    partition: Partition
    placement: Placement

    def rank_at(self, position: int) -> int:
        """The rank at a position of the mesh."""
        return position if self.placement is None else int(self.placement[position])


@dataclass(frozen=True, slots=True)
class Place:
    """A position of the mesh with the file of the rank there."""

    position: int
    data: bytes


def recognise_classes(source: DirectorySource) -> RankClasses | None:
    """The classes that all files of a folder are made of, or None where there are none."""
    shape = read_shape(source.manifest or {})
    if shape is None or source.world != shape.mesh.world or len(source.ranks) != source.world:
        return None
    try:
        classes = read_classes(source, shape)
        agreed = classes is not None and agrees(source, classes)
    except StageError:
        return None
    return classes if agreed else None


def read_shape(manifest: Mapping[str, Any]) -> Shape | None:
    """The shape that a manifest describes, or None if it describes none."""
    mesh, entries, placed = (manifest.get(key) for key in ("mesh", "classes", "placement"))
    atoms = mesh.get("atoms") if isinstance(mesh, dict) else None
    if not isinstance(atoms, list) or not isinstance(entries, list) or not all(map(is_atom, atoms)):
        return None
    if len({name for name, _ in atoms}) < len(atoms):
        return None
    found = Mesh(tuple((name, degree) for name, degree in atoms), ())
    axes = class_axes(manifest, found.names)
    if axes is None or len(entries) != found.degree(axes):
        return None
    if placed is None:
        return Shape(found, Partition(found, axes), None)
    if not isinstance(placed, list) or sorted(p for p in placed if type(p) is int) != [*range(found.world)]:
        return None
    return Shape(found, Partition(found, axes), np.array(placed, np.int64))


def read_classes(source: DirectorySource, shape: Shape) -> RankClasses | None:
    """The classes that the files of the first ranks and of the last ranks of each describe."""
    pairs = []
    for number in range(shape.partition.count):
        own = shape.partition.positions(number)
        pairs.append([Place(at, source.rank(shape.rank_at(at))) for at in (int(own[0]), int(own[-1]))])
    spans = [list(communication_spans(first.data)) for first, _ in pairs]
    axes = {span.axes for found in spans for span in found if span.name == GROUP_NAME}
    if not all(known(shape, names) for names in axes):
        return None
    table = GroupTable(shape.mesh, axes, shape.placement)
    images = []
    for (first, last), found in zip(pairs, spans, strict=True):
        image = read_image(first, last, found, table)
        if image is None:
            return None
        images.append(image)
    return RankClasses(shape.partition, axes, images.__getitem__, shape.placement)


def known(shape: Shape, axes: tuple[str, ...]) -> bool:
    """Whether groups over these axes are possible on the mesh."""
    if axes == PIPELINE_ENDS:
        return STAGES in shape.mesh.names
    return bool(axes) and len(set(axes)) == len(axes) and set(axes) <= set(shape.mesh.names)


def read_image(first: Place, last: Place, spans: Iterable[Span], table: GroupTable) -> ClassImage | None:
    """The bytes of a class, those of its first rank, and the fields in them that each rank has for itself.

    Files of a class whose lengths or places of fields differ are found by comparison of all bytes, later.
    """
    if len(first.data) != len(last.data):
        return None
    search = PeerSearch(table.mesh, table.placement, (first.position, last.position))
    groups: dict[tuple[str, ...], list[int]] = {}
    peers: dict[Peer, list[int]] = {}
    for span in spans:
        if span.name == GROUP_NAME:
            if span.stop - span.start != table.width(span.axes):
                return None
            groups.setdefault(span.axes, []).append(span.start)
            continue
        if span.stop - span.start != PEER_WIDTH:
            return None
        peer = search.find(int(span.value), int(span_value(last.data, span)))
        if peer is None:
            return None
        peers.setdefault(peer, []).append(span.start)
    return ClassImage(
        np.frombuffer(first.data, np.uint8),
        {
            axes: np.array(starts, np.int64)[:, None] + np.arange(table.width(axes))
            for axes, starts in groups.items()
        },
        {peer: np.array(starts, np.int64) for peer, starts in peers.items()},
    )


def agrees(source: DirectorySource, classes: RankClasses) -> bool:
    """Whether the groups and every file of a folder are what the classes say."""
    table = classes.groups.table()
    if table != {name: list(members) for name, members in source.groups.items()}:
        return False
    return all(classes.rank(rank).tobytes() == source.rank(rank) for rank in range(source.world))
