"""Where the files of a trace set are: a folder, or the prefix of an object store behind fsspec.

Both are one small interface of named files. A plain path never imports fsspec.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stage.errors import TraceError

__all__ = [
    "Data",
    "FolderStore",
    "Store",
    "file_path",
    "is_url",
    "local_path",
    "open_store",
    "reading",
    "writing",
]

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::.*|://.*)", re.DOTALL)
LOCAL = re.compile(r"(?:file|local)://", re.IGNORECASE)
Data = bytes | bytearray | memoryview
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)


class Store(Protocol):
    """Named files in one place, which errors of the system say can not be read or written.

    A store can be sent to another process and means the same place there, unless it is private.
    """

    @property
    def batch(self) -> int:
        """How many bytes are best written at once, 0 where it does not matter."""

    @property
    def private(self) -> bool:
        """Whether the files can be seen from this process only."""

    def where(self, name: str = "") -> str:
        """Return the path or URL of a file, or of the store, for messages."""

    def names(self) -> list[str]:
        """Return the names of all entries."""

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""

    def write(self, files: Mapping[str, Data]) -> None:
        """Write files, in place of those that have these names."""

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""


@dataclass(frozen=True, slots=True)
class FolderStore:
    """The files of a folder."""

    path: Path
    batch: int = 0
    private: bool = False

    def where(self, name: str = "") -> str:
        """Return the path of a file, or of the folder, for messages."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return os.listdir(self.path)  # noqa: PTH208 - a set may have 131,072 files

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return (self.path / name).exists()

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return (self.path / name).read_bytes()

    def write(self, files: Mapping[str, Data]) -> None:
        """Write files, each in one call of the system where it takes all."""
        for name, data in files.items():
            file = os.open(f"{self.path}/{name}", NEW_FILE, 0o666)
            try:
                rest = memoryview(data).cast("B")
                while rest:
                    rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file."""
        with (self.path / name).open("ab") as file:
            file.write(data)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; some may be gone already."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)


def is_url(place: str | Path) -> bool:
    """Return whether a place is a URL, not a path.

    >>> is_url("s3://bucket/set"), is_url("traces/set"), is_url("file:///tmp/set")
    (True, False, True)
    """
    return isinstance(place, str) and URL.fullmatch(place) is not None


def local_path(place: str | Path) -> Path | None:
    """Return the path that a place means on this machine, None where it is elsewhere.

    >>> local_path("file:///data/set"), local_path("s3://bucket/set")
    (PosixPath('/data/set'), None)
    """
    if not is_url(place):
        return Path(place)
    found = LOCAL.match(str(place))
    return Path(str(place)[found.end() :]) if found else None


def file_path(place: str | Path) -> Path:
    """Return the path of a bundle, which is one file on this machine; a URL of elsewhere is a `TraceError`.

    >>> file_path("file:///data/job.stage")
    PosixPath('/data/job.stage')
    """
    path = local_path(place)
    if path is None:
        raise TraceError(
            f"{place} is a URL, but a bundle is one local file: write it to a path and copy it, "
            "or use the directory format"
        )
    return path


def open_store(place: str | Path) -> Store:
    """Return the store at a path or URL, whether something is there or not."""
    path = local_path(place)
    if path is not None:
        return FolderStore(path)
    from stage.io.remote import RemoteStore  # noqa: PLC0415 - plain paths do without fsspec

    return RemoteStore(re.sub(r"(?<![/:])/+$", "", str(place)))


@contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Turn an error of the system into one that says what could not be read."""
    try:
        yield
    except OSError as err:
        raise TraceError(
            f"{place} cannot be read ({err.strerror or err}): check the path and its rights"
        ) from err


@contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """Turn an error of the system into one that says what could not be written."""
    try:
        yield
    except OSError as err:
        why = err.strerror or err
        raise TraceError(
            f"{place} cannot be written ({why}), and nothing was: check space and rights"
        ) from err
