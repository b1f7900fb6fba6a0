"""A trace set as one file whose size does not depend on the number of ranks.

Ranks of a class differ in the names of their groups and in the ranks of their peers alone, and both are formulas of
the rank's place on the mesh. So a bundle is a container (`stage.io.container`) of

    job         the mesh, the sets of axes that communicate, the description of the manifest, and for each class its
                totals, the digest of its image and the lengths of its patch tables (`stage.io.bundle_job`)
    image.<n>   the bytes that the ranks of class n share
    tables.<n>  where a rank's own group names and peers go: ascending positions, each as its distance from the one
                before (the first from 0), 32-bit, of every table in the order in which the job lists them
    placement   the rank at each position of the mesh, 32-bit, where they are not the same

`docs/bundle.md` describes the format for other readers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stage.errors import TraceError
from stage.io.bundle_job import JOB_LIMIT, MAX_PATCHED, MAX_WORLD, ClassEntry, JobEntry, encode_job, parse_job
from stage.io.container import (
    MAX_MEMBER,
    Container,
    damage,
    is_container,
    open_container,
    write_container,
)
from stage.io.store import file_path, local_path
from stage.mesh import Mesh
from stage.trace.classes import RankClasses
from stage.trace.expand import ClassImage
from stage.trace.image import PEER_WIDTH

__all__ = ["Bundle", "bundle_classes", "is_bundle", "open_bundle", "write_bundle"]

Ints = NDArray[np.int64]
Progress = Callable[[int, int], None]

KEPT_BYTES = 1 << 28
POSITION = np.dtype("<u4")


class Traces(Protocol):
    """What a bundle is written from; a `TraceSet` is one."""

    @property
    def classes(self) -> RankClasses: ...
    @property
    def description(self) -> Mapping[str, Any]: ...
    @property
    def summaries(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Bundle:
    """An open bundle: what a trace set is made from."""

    classes: RankClasses
    description: Mapping[str, Any]
    summaries: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the image of a class when it is asked for."""

    container: Container
    entries: Sequence[ClassEntry]
    widths: Mapping[tuple[str, ...], int]

    def __call__(self, number: int) -> ClassImage:
        entry = self.entries[number]
        data = self.container.read(f"image.{number}", MAX_MEMBER)
        tables = self.container.read(f"tables.{number}", 4 * MAX_PATCHED)
        with damage(self.container.path):
            if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ValueError(f"image.{number} is not the one that the job describes")
            return self._image(number, data, tables)

    def _image(self, number: int, data: bytes, tables: bytes) -> ClassImage:
        entry = self.entries[number]
        widths = [self.widths[axes] for axes, _ in entry.groups] + [PEER_WIDTH] * len(entry.peers)
        counts = [count for _, count in (*entry.groups, *entry.peers)]
        if len(tables) != POSITION.itemsize * sum(counts):
            raise ValueError(f"tables.{number} does not have the {sum(counts)} positions that the job lists")
        found = list(decode_positions(tables, counts))
        for positions, width in zip(found, widths, strict=True):
            if len(positions) and (positions[-1] + width > len(data) or (np.diff(positions) < width).any()):
                raise ValueError(f"tables.{number} points outside of image.{number}, or twice to one place")
        groups = {
            axes: positions[:, None] + np.arange(self.widths[axes])
            for (axes, _), positions in zip(entry.groups, found, strict=False)
        }
        peers = dict(zip((peer for peer, _ in entry.peers), found[len(groups) :], strict=True))
        return ClassImage(np.frombuffer(data, np.uint8), groups, peers)


def is_bundle(path: str | Path) -> bool:
    """Whether a path is a file that begins as a bundle does."""
    file = local_path(path)
    return file is not None and file.is_file() and is_container(file)


def open_bundle(path: str | Path) -> Bundle:
    """Return the bundle in a file; classes are read when they are asked for, and those used last are kept."""
    container = open_container(file_path(path))
    content = container.read("job", JOB_LIMIT)
    with damage(container.path):
        job = parse_job(content, container.version)
    placement = read_placement(container, job.partition.mesh) if job.placed else None
    description = dict(job.description)
    if job.listed and placement is not None:
        description["placement"] = placement.tolist()
    reader = ImageReader(container, job.classes, {group.axes: group.width for group in job.groups})
    classes = RankClasses(
        job.partition,
        [group.axes for group in job.groups],
        reader,
        placement,
        keep=KEPT_BYTES,
        digests=[(entry.size, entry.sha256) for entry in job.classes],
    )
    return Bundle(classes, description, [entry.summary for entry in job.classes])


def bundle_classes(path: Path) -> RankClasses:
    """The classes of the bundle in a file, for another process."""
    return open_bundle(path).classes


def read_placement(container: Container, mesh: Mesh) -> Ints:
    """Return the rank at each position of the mesh."""
    content = container.read("placement", POSITION.itemsize * MAX_WORLD)
    with damage(container.path):
        if len(content) != POSITION.itemsize * mesh.world:
            raise ValueError(f"its placement is not one of {mesh.world} ranks")
        placement = np.frombuffer(content, POSITION).astype(np.int64)
        if not np.array_equal(np.sort(placement), np.arange(mesh.world)):
            raise ValueError("its placement does not have every rank once")
    return placement


def write_bundle(
    path: str | Path, traces: Traces, *, force: bool = False, progress: Progress | None = None
) -> int:
    """Write a trace set into one new file, whole or not at all, and return how many bytes it has.

    A file that stands there already is a `TraceError`, or with `force` replaced, if it is a bundle. `progress` is
    called with the number of classes written and of those to write.
    """
    file = file_path(path)
    if traces.classes.mesh.world > MAX_WORLD:
        raise TraceError(
            f"{file}: a bundle has up to {MAX_WORLD:,} ranks, not {traces.classes.mesh.world:,}: write a directory"
        )
    return write_container(file, members(traces, progress), force=force)


def members(traces: Traces, progress: Progress | None) -> Iterator[tuple[str, bytes]]:
    """Yield the members of a bundle, the job last, when everything in it is known."""
    classes = traces.classes
    entries = []
    for number in range(classes.count):
        image = classes.image(number)
        groups = {axes: np.sort(places[:, 0]) for axes, places in sorted(image.groups.items())}
        peers = {peer: np.sort(places) for peer, places in sorted(image.peers.items())}
        yield f"image.{number}", image.data.tobytes()
        yield f"tables.{number}", encode_positions([*groups.values(), *peers.values()])
        counts = tuple((axes, len(at)) for axes, at in groups.items())
        named = tuple((peer, len(at)) for peer, at in peers.items())
        entries.append(ClassEntry(*classes.digest(number), counts, named, traces.summaries[number]))
        if progress is not None:
            progress(number + 1, classes.count)
    placement = classes.placement
    if placement is not None:
        yield "placement", placement.astype(POSITION).tobytes()
    yield "job", encode_job(JobEntry.of(classes, traces.description, entries))


def encode_positions(tables: Sequence[Ints]) -> bytes:
    """Return ascending positions as distances."""
    return b"".join(np.diff(table, prepend=0).astype(POSITION).tobytes() for table in tables)


def decode_positions(content: bytes, counts: Sequence[int]) -> Iterator[Ints]:
    """Yield tables of so many positions each, never descending."""
    distances = np.frombuffer(content, POSITION)
    start = 0
    for count in counts:
        yield np.cumsum(distances[start : start + count], dtype=np.int64)
        start += count
