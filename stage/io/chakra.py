"""Trace sets as folders: one `<prefix>.<rank>.et` a rank, `groups.json`, `manifest.json`.

Reading takes the sets of other producers as well: any prefix, ranks missing, no groups, no manifest. Writing
is all or nothing: a folder of the name asked for is a complete set or the one that stood there before.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import TraceError
from stage.trace.node import Metadata, TraceNode
from stage.trace.wire import read_trace

__all__ = ["GROUPS", "MANIFEST", "DirectorySource", "open_directory", "write_directory"]

GROUPS = "groups.json"
MANIFEST = "manifest.json"
TRACE_NAME = re.compile(r"(?P<prefix>.+)\.(?P<rank>0|[1-9][0-9]*)\.et", re.DOTALL)
MAX_RANK = 1 << 31


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A trace set in a folder; a file is read when its rank is asked for, and not kept.

    `world` is the number of ranks of the job, `ranks` those whose file is there. `groups` is empty where the
    set has no `groups.json`, and `manifest` is None where it has no `manifest.json`.
    """

    path: Path
    prefix: str
    world: int
    ranks: tuple[int, ...]
    groups: Mapping[str, Sequence[int]]
    manifest: Mapping[str, Any] | None

    def file(self, rank: int) -> Path:
        """Return the path of a rank's file."""
        return self.path / f"{self.prefix}.{rank}.et"

    def rank(self, rank: int) -> bytes:
        """Return the bytes of a rank's file."""
        file = self.file(rank)
        if not file.exists():
            count = f"{len(self.ranks)} of {self.world}"
            raise TraceError(f"{self.path} has no trace of rank {rank}: it has those of {count} ranks")
        with reading(file):
            return file.read_bytes()

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
    """Return the trace set in a folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise TraceError(f"{folder} is no folder: give the folder that holds the .et files of a trace set")
    prefix, ranks = find_traces(folder)
    groups = read_object(folder / GROUPS)
    manifest = read_object(folder / MANIFEST)
    if manifest is not None and groups is None and "world" in manifest:
        raise TraceError(f"{folder} has {MANIFEST} but no {GROUPS}: the set is incomplete, write it again")
    checked = check_groups(folder / GROUPS, groups or {})
    return DirectorySource(
        folder, prefix, find_world(folder, ranks, checked, manifest), ranks, checked, manifest
    )


def find_traces(folder: Path) -> tuple[str, tuple[int, ...]]:
    """Return the prefix and the ranks of the traces in a folder."""
    found: dict[str, list[int]] = {}
    with reading(folder):
        for entry in folder.iterdir():
            match = TRACE_NAME.fullmatch(entry.name)
            if match and int(match["rank"]) < MAX_RANK:
                found.setdefault(match["prefix"], []).append(int(match["rank"]))
    if not found:
        raise TraceError(f"{folder} holds no file <prefix>.<rank>.et: give the folder of a trace set")
    if len(found) > 1:
        raise TraceError(f"{folder} holds the traces of {', '.join(sorted(found))}: keep one set in a folder")
    prefix, ranks = found.popitem()
    return prefix, tuple(sorted(ranks))


def read_object(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None where there is no such file."""
    if not file.exists():
        return None
    try:
        with reading(file):
            content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as err:
        raise TraceError(f"{file} is no JSON ({err}): write the set again") from err
    if not isinstance(content, dict):
        raise TraceError(f"{file} holds a {type(content).__name__}, not an object: write the set again")
    return content


def check_groups(file: Path, groups: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """Return groups whose values are flat lists of ranks; whether they make sense the verifier says."""
    for name, members in groups.items():
        if not isinstance(members, list) or not all(type(rank) is int for rank in members):
            raise TraceError(f"{file}: group {name!r} is not a flat list of ranks: write [0, 1, ..]")
    return groups


def find_world(
    folder: Path,
    ranks: Sequence[int],
    groups: Mapping[str, Sequence[int]],
    manifest: Mapping[str, Any] | None,
) -> int:
    """Return the number of ranks: what the manifest says, else one more than the largest rank named."""
    if manifest is not None and "world" in manifest:
        world = manifest["world"]
        if type(world) is not int or world < 1:
            raise TraceError(
                f"{folder / MANIFEST}: world is {world!r}, not a number of ranks: write the set again"
            )
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
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a trace set into a new folder, whole or not at all.

    It is written to `<path>.partial` beside, the manifest last, and takes its name when it is complete. A
    folder that stands there already is an error, or with `force` replaced then, if it holds a trace set and
    nothing else. `progress` is called with the number of ranks written and of those to write.
    """
    folder = Path(path).absolute()
    chosen = list(ranks)
    assert all(0 <= rank < world for rank in chosen), (chosen, world)
    assert "/" not in prefix, prefix
    check_target(folder, force=force)
    partial = folder.with_name(folder.name + ".partial")
    with writing(folder):
        clear(partial)
        partial.mkdir(parents=True)
        try:
            for done, rank in enumerate(chosen, 1):
                (partial / f"{prefix}.{rank}.et").write_bytes(rank_bytes(rank))
                if progress is not None:
                    progress(done, len(chosen))
            (partial / GROUPS).write_text(groups_text(groups), encoding="utf-8")
            (partial / MANIFEST).write_text(json_text({"world": world, **manifest}), encoding="utf-8")
            put_in_place(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_target(folder: Path, *, force: bool) -> None:
    """Raise if a set cannot take this name."""
    if not folder.name:
        raise TraceError(f"{folder} cannot be the folder of a trace set: give the name of a new folder")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise TraceError(f"{folder} exists and is no folder: give the name of a new folder")
    if not folder.exists():
        return
    if not force:
        raise TraceError(f"{folder} exists already: give another folder, or force to replace the set in it")
    with reading(folder):
        foreign = find_foreign(folder)
    if foreign:
        raise TraceError(f"{folder} holds {foreign}, which is no part of a trace set: give another folder")


def find_foreign(folder: Path) -> str | None:
    """Return the name of an entry of a folder that no trace set has, or None."""
    for entry in sorted(folder.iterdir()):
        named = entry.name in (GROUPS, MANIFEST) or TRACE_NAME.fullmatch(entry.name)
        if not named or entry.is_symlink() or not entry.is_file():
            return entry.name
    return None


def clear(folder: Path) -> None:
    """Remove what an interrupted run may have left under this name."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or find_foreign(folder))):
        raise TraceError(f"{folder} is in the way and no trace set: move it elsewhere")
    if folder.exists():
        shutil.rmtree(folder)


def put_in_place(partial: Path, folder: Path) -> None:
    """Give the complete set its name; an earlier one goes only when that has worked."""
    if not folder.exists():
        partial.rename(folder)
        return
    earlier = folder.with_name(folder.name + ".replaced")
    clear(earlier)
    folder.rename(earlier)
    try:
        partial.rename(folder)
    except BaseException:
        earlier.rename(folder)
        raise
    shutil.rmtree(earlier)


def json_text(content: Mapping[str, Any]) -> str:
    """Return an object as JSON text that depends on nothing but its content."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def groups_text(groups: Mapping[str, Sequence[int]]) -> str:
    """Return groups as JSON text, one a line, by number; members keep their ring order.

    >>> print(groups_text({"2": [2, 3], "1": (0, 1)}), end="")
    {
    "1": [0, 1],
    "2": [2, 3]
    }
    """
    lines = (
        f"{json.dumps(name)}: {json.dumps([int(rank) for rank in groups[name]])}" for name in order(groups)
    )
    return "{\n" + ",\n".join(lines) + "\n}\n" if groups else "{}\n"


def order(groups: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of groups by number."""
    return sorted(groups, key=lambda name: (len(name), name))


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Put the name of the file in front of what is wrong with its content."""
    try:
        yield
    except TraceError as err:
        if str(err).startswith(str(file.parent)):
            raise
        raise TraceError(f"{file}: {err}") from err


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of the system into one that says what could not be read."""
    try:
        yield
    except OSError as err:
        raise TraceError(
            f"{path} cannot be read ({err.strerror or err}): check the path and its rights"
        ) from err


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system into one that says what could not be written."""
    try:
        yield
    except OSError as err:
        why = err.strerror or err
        raise TraceError(
            f"{path} cannot be written ({why}), and nothing was: check space and rights"
        ) from err
