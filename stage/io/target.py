"""Where a set is written until it is complete, and how it takes its name then.

A folder is written beside as `<path>.partial` and renamed, so one that has the name is complete or what stood there
before. An object store cannot rename: the set is written in place, and its journal, which goes last, says that it is
unfinished.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stage.errors import TraceError
from stage.io.parts import JOURNAL, MANIFEST, is_part
from stage.io.store import FolderStore, Store, open_store, reading

__all__ = ["Target", "open_target"]

BLOCK = 4096


class Target(Protocol):
    """A set that is being written; `store` holds its files until `finish`."""

    @property
    def name(self) -> str:
        """The name of the set in messages."""

    @property
    def store(self) -> Store:
        """Where the files are written."""

    def check(self, *, force: bool) -> None:
        """Raise if a set cannot take this name."""

    def check_room(self, sizes: Iterable[int]) -> None:
        """Raise if there is no room for files of these sizes."""

    def clear(self) -> None:
        """Remove what an interrupted run left, so that the set begins empty."""

    def finish(self) -> None:
        """Make the set a complete one."""

    def abandon(self) -> None:
        """Remove what was begun, where nothing of worth is in it."""


def open_target(place: str | Path) -> Target:
    """Return the target at a path or URL."""
    store = open_store(place)
    if not isinstance(store, FolderStore):
        return StoreTarget(store)
    folder = store.path.absolute()
    if not folder.name:
        raise TraceError(f"{folder} cannot be the folder of a trace set: give the name of a new folder")
    return FolderTarget(folder, FolderStore(folder.with_name(folder.name + ".partial")))


@dataclass(frozen=True, slots=True)
class FolderTarget:
    """A folder, written under another name beside it."""

    folder: Path
    store: FolderStore

    @property
    def name(self) -> str:
        """The name of the set in messages."""
        return str(self.folder)

    def check(self, *, force: bool) -> None:
        """Raise if a set cannot take this name."""
        folder = self.folder
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise TraceError(f"{folder} exists and is no folder: give the name of a new folder")
        check_leftover(self.store.path)
        if not folder.exists():
            return
        if not force:
            raise TraceError(
                f"{folder} exists already: give another folder, or --force to replace the set in it"
            )
        with reading(folder):
            foreign = find_foreign(folder)
        if foreign:
            raise TraceError(
                f"{folder} holds {foreign}, which is no part of a trace set: give another folder"
            )

    def check_room(self, sizes: Iterable[int]) -> None:
        """Raise if the disk has no room for files of these sizes."""
        need = sum(-(-size // BLOCK) * BLOCK for size in sizes)
        parent = next(path for path in self.folder.parents if path.exists())
        disk = shutil.disk_usage(parent)
        if disk.total and need > disk.free:
            raise TraceError(
                f"{self.folder} needs {in_gib(need)} of disk, and {parent} has {in_gib(disk.free)} free: "
                "make room, choose another disk, or write fewer ranks"
            )

    def clear(self) -> None:
        """Remove what an interrupted run left, so that the set begins empty."""
        clear(self.store.path)
        self.store.path.mkdir(parents=True)

    def finish(self) -> None:
        """Give the complete set its name; an earlier one goes only when that has worked."""
        partial, folder = self.store.path, self.folder
        self.store.remove([JOURNAL])
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

    def abandon(self) -> None:
        """Remove what was begun, where nothing of worth is in it."""
        shutil.rmtree(self.store.path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """The prefix of an object store, written in place."""

    store: Store

    @property
    def name(self) -> str:
        """The name of the set in messages."""
        return self.store.where()

    def check(self, *, force: bool) -> None:
        """Raise if a set cannot take this name."""
        with reading(self.name):
            names = sorted(self.store.names())
        foreign = next((name for name in names if not is_part(name)), None)
        if foreign:
            raise TraceError(
                f"{self.name} holds {foreign}, which is no part of a trace set: give another URL"
            )
        if names and JOURNAL not in names and not force:
            raise TraceError(
                f"{self.name} exists already: give another URL, or --force to replace the set in it"
            )

    def check_room(self, sizes: Iterable[int]) -> None:
        """Nothing: an object store does not say how much it takes."""

    def clear(self) -> None:
        """Mark the set as unfinished, then remove what an earlier one or an interrupted run left."""
        self.store.write({JOURNAL: b""})
        self.store.remove([name for name in self.store.names() if name == MANIFEST])
        self.store.remove([name for name in self.store.names() if name != JOURNAL])

    def finish(self) -> None:
        """Take away the mark that the set is unfinished."""
        self.store.remove([JOURNAL])

    def abandon(self) -> None:
        """Remove what was begun, where nothing of worth is in it."""
        self.store.remove(self.store.names())


def check_leftover(folder: Path) -> None:
    """Raise if what has the name of an interrupted run is something else."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or find_foreign(folder))):
        raise TraceError(f"{folder} is in the way and no trace set: move it elsewhere")


def clear(folder: Path) -> None:
    """Remove what an interrupted run may have left under this name."""
    check_leftover(folder)
    if folder.exists():
        shutil.rmtree(folder)


def find_foreign(folder: Path) -> str | None:
    """Return the name of an entry of a folder that no trace set has, or None."""
    with os.scandir(folder) as entries:
        foreign = (entry.name for entry in entries if not is_part_file(entry))
        return min(foreign, default=None)


def is_part_file(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry of a folder is a file of a set."""
    return is_part(entry.name) and entry.is_file(follow_symlinks=False)


def in_gib(count: int) -> str:
    """Return bytes as a text.

    >>> in_gib(3 << 29), in_gib(5 << 20)
    ('1.50 GiB', '5.0 MiB')
    """
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
