"""Trace sets as folders: one `<prefix>.<rank>.et` a rank, `groups.json`, `manifest.json`.

Reading takes the sets of other producers as well: any prefix, ranks missing, no groups, no manifest. Writing
is all or nothing: a folder of the name asked for is a complete set or the one that stood there before.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import TraceError
from stage.io.engine import in_process
from stage.io.parts import GROUPS, JOURNAL, MANIFEST, TRACE_NAME, trace_name
from stage.io.store import FolderStore, Store, open_store, reading
from stage.io.write import Content, write_set
from stage.trace.node import Metadata, TraceNode
from stage.trace.wire import read_trace

__all__ = ["DirectorySource", "open_directory", "write_directory"]

MAX_RANK = 1 << 31


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A trace set in a folder or under a URL; a file is read when its rank is asked for, and not kept.

    `world` is the number of ranks of the job, `ranks` those whose file is there. `groups` is empty where the
    set has no `groups.json`, and `manifest` is None where it has no `manifest.json`.
    """

    store: Store
    prefix: str
    world: int
    ranks: tuple[int, ...]
    groups: Mapping[str, Sequence[int]]
    manifest: Mapping[str, Any] | None

    @property
    def path(self) -> Path:
        """The folder of the set, for programs that read the files themselves."""
        if not isinstance(self.store, FolderStore):
            raise TraceError(f"{self.store.where()} is not on this machine: copy the set to a folder first")
        return self.store.path

    def file(self, rank: int) -> str:
        """Return the path or URL of a rank's file."""
        return self.store.where(trace_name(self.prefix, rank))

    def rank(self, rank: int) -> bytes:
        """Return the bytes of a rank's file."""
        name = trace_name(self.prefix, rank)
        if not self.store.has(name):
            count = f"{len(self.ranks)} of {self.world}"
            raise TraceError(
                f"{self.store.where()} has no trace of rank {rank}: it has those of {count} ranks"
            )
        with reading(self.file(rank)):
            return self.store.read(name)

    raw = rank

    def nodes(self, rank: int) -> Iterator[TraceNode]:
        """Yield the nodes of a rank in the order of its file."""
        with naming(self.file(rank)):
            yield from read_trace(self.rank(rank))[1]

    def metadata(self, rank: int) -> Metadata:
        """Return what the first message of a rank's file says of the trace."""
        with naming(self.file(rank)):
            return read_trace(self.rank(rank))[0]


def open_directory(path: str | Path) -> DirectorySource:
    """Return the trace set in a folder or under a URL."""
    store = open_store(path)
    folder = store.where()
    if isinstance(store, FolderStore) and not store.path.is_dir():
        raise TraceError(f"{folder} is no folder: give the folder that holds the .et files of a trace set")
    with reading(folder):
        names = store.names()
    if JOURNAL in names:
        raise TraceError(f"{folder} is unfinished, its run was stopped: go on with it by --resume")
    prefix, ranks = find_traces(folder, names)
    groups = read_object(store, GROUPS, names)
    manifest = read_object(store, MANIFEST, names)
    if manifest is not None and groups is None and "world" in manifest:
        raise TraceError(f"{folder} has {MANIFEST} but no {GROUPS}: the set is incomplete, write it again")
    checked = check_groups(store.where(GROUPS), groups or {})
    world = find_world(store.where(MANIFEST), ranks, checked, manifest)
    return DirectorySource(store, prefix, world, ranks, checked, manifest)


def find_traces(folder: str, names: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """Return the prefix and the ranks of the traces among the files of a folder."""
    found: dict[str, list[int]] = {}
    for name in names:
        match = TRACE_NAME.fullmatch(name)
        if match and int(match["rank"]) < MAX_RANK:
            found.setdefault(match["prefix"], []).append(int(match["rank"]))
    if not found:
        raise TraceError(f"{folder} holds no file <prefix>.<rank>.et: give the folder of a trace set")
    if len(found) > 1:
        raise TraceError(f"{folder} holds the traces of {', '.join(sorted(found))}: keep one set in a folder")
    prefix, ranks = found.popitem()
    return prefix, tuple(sorted(ranks))


def read_object(store: Store, name: str, names: Iterable[str]) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None where there is no such file."""
    if name not in names:
        return None
    file = store.where(name)
    try:
        with reading(file):
            content = json.loads(store.read(name))
    except (ValueError, RecursionError) as err:
        raise TraceError(f"{file} is no JSON ({err}): write the set again") from err
    if not isinstance(content, dict):
        raise TraceError(f"{file} holds a {type(content).__name__}, not an object: write the set again")
    return content


def check_groups(file: str, groups: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """Return groups whose values are flat lists of ranks; whether they make sense the verifier says."""
    for name, members in groups.items():
        if not isinstance(members, list) or not all(type(rank) is int for rank in members):
            raise TraceError(f"{file}: group {name!r} is not a flat list of ranks: write [0, 1, ..]")
    return groups


def find_world(
    file: str, ranks: Sequence[int], groups: Mapping[str, Sequence[int]], manifest: Mapping[str, Any] | None
) -> int:
    """Return the number of ranks: what the manifest says, else one more than the largest rank named."""
    if manifest is not None and "world" in manifest:
        world = manifest["world"]
        if type(world) is not int or world < 1:
            raise TraceError(f"{file}: world is {world!r}, not a number of ranks: write the set again")
        return world
    return 1 + max(ranks[-1], *(rank for members in groups.values() for rank in members), 0)


def write_directory(
    path: str | Path,
    world: int,
    ranks: Iterable[int],
    rank_bytes: Callable[[int], bytes | bytearray | memoryview],
    groups: Mapping[str, Sequence[int]],
    manifest: Mapping[str, Any],
    *,
    prefix: str = "trace",
    force: bool = False,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a trace set whose ranks a function makes, as `stage.io.write.write_set` does."""
    content = Content(world, list(ranks), None, groups, manifest, prefix)
    engine = in_process(lambda chosen: map(rank_bytes, chosen))
    write_set(path, content, engine, force=force, resume=resume, progress=progress)


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Put the name of the file in front of what is wrong with its content."""
    try:
        yield
    except TraceError as err:
        if str(err).startswith(file.rpartition("/")[0]):
            raise
        raise TraceError(f"{file}: {err}") from err
