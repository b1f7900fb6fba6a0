"""A file of named members, each compressed by zstandard, every byte of it covered by a SHA-256.

    0    8  magic, which a transfer as text would damage
    8    4  version of the format
    12   4  bytes of the directory
    16  32  SHA-256 of the 16 bytes before and of the directory
    48      the directory, a JSON object: {"members": [[name, stored bytes, bytes, SHA-256 of what is stored], ..]}
            then the members in that order, without gaps, to the end of the file

Numbers are little-endian. A member is one zstandard frame that states the size of its content. Nothing that a file
says of itself is believed: sizes are compared with limits and with what is there before memory is asked for.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zstandard

from stage.errors import TraceError
from stage.io.store import reading, writing

__all__ = [
    "MAX_MEMBER",
    "VERSION",
    "Container",
    "damage",
    "is_container",
    "open_container",
    "write_container",
]

MAGIC = b"\x89STAGE\r\n"
VERSION = 2
READABLE = (1, 2)
HEAD = struct.Struct("<8sII")
DIRECTORY = HEAD.size + 32
MAX_DIRECTORY = 4 << 20
MAX_MEMBER = 1 << 30
LEVEL, WINDOW_LOG = 6, 26


@dataclass(frozen=True, slots=True)
class Member:
    """Where a member is, how many bytes are stored and how many they make, and the digest of the stored ones."""

    offset: int
    stored: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Container:
    """An open file; a member is read when it is asked for, and not kept."""

    path: Path
    version: int
    members: Mapping[str, Member]

    def read(self, name: str, limit: int = MAX_MEMBER) -> bytes:
        """Return a member's content, which may have up to `limit` bytes."""
        with damage(self.path):
            if name not in self.members:
                raise ValueError(f"it has no member {name}")
            member = self.members[name]
            if member.size > limit:
                raise ValueError(f"member {name} has {member.size} bytes, more than the {limit} it may have")
            with reading(self.path), self.path.open("rb") as file:
                file.seek(member.offset)
                stored = file.read(member.stored)
            if hashlib.sha256(stored).hexdigest() != member.sha256:
                raise ValueError(f"member {name} does not have its checksum")
            return decompress(name, stored, member.size)


def decompress(name: str, stored: bytes, size: int) -> bytes:
    """Return the content of a frame that has exactly `size` bytes; no more memory than these is asked for."""
    try:
        stated = zstandard.get_frame_parameters(stored).content_size
        if stated != size:
            raise ValueError(f"member {name} does not have the {size} bytes that it should")
        content = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise ValueError(f"member {name} cannot be decompressed: {err}") from err
    if len(content) != size:
        raise ValueError(f"member {name} does not have the {size} bytes that it should")
    return content


def is_container(path: Path) -> bool:
    """Whether a file begins as a container does."""
    with reading(path), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_container(path: Path) -> Container:
    """Return the container in a file, its directory checked."""
    with reading(path), path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(0)
        start = file.read(DIRECTORY)
        if start[: len(MAGIC)] != MAGIC:
            raise TraceError(f"{path} is no bundle: give a folder of traces, or a file of --format bundle")
        with damage(path):
            if len(start) < DIRECTORY:
                raise ValueError("it ends within its head")
            _, version, length = HEAD.unpack_from(start)
            if version not in READABLE:
                known = " and ".join(map(str, READABLE))
                raise TraceError(
                    f"{path} has format {version}, but this release reads {known}: take its release"
                )
            if length > MAX_DIRECTORY:
                raise ValueError(f"its directory is said to have {length} bytes")
            directory = file.read(length)
            if hashlib.sha256(start[: HEAD.size] + directory).digest() != start[HEAD.size :]:
                raise ValueError("its directory does not have its checksum")
    with damage(path):
        return Container(path, version, read_directory(directory, DIRECTORY + length, end))


def read_directory(directory: bytes, start: int, end: int) -> dict[str, Member]:
    """Return the members of a file whose content stands from `start` to `end`."""
    members: dict[str, Member] = {}
    for name, stored, size, sha256 in json.loads(directory)["members"]:
        if not isinstance(name, str) or name in members:
            raise ValueError("a name in its directory is none, or stands there twice")
        if type(stored) is not int or type(size) is not int or not 0 <= size <= MAX_MEMBER:
            raise ValueError(f"member {name} is said to have {size!r} bytes")
        if not 0 < stored <= size + size // 128 + 512:
            raise ValueError(f"member {name} is said to store {stored} bytes for {size}")
        members[name] = Member(start, stored, size, sha256)
        start += stored
    if start != end:
        raise ValueError(f"it has {end} bytes, but should have {start}")
    return members


def write_container(path: Path, members: Iterable[tuple[str, bytes]], *, force: bool = False) -> int:
    """Write a file, whole or not at all, and return how many bytes it has.

    Members are taken one after the other, and only their compressed bytes are kept. The file is written
    to `<path>.partial` beside, and takes its name when it is complete. One that stands there already is an error, or
    with `force` replaced then, if it is a container.
    """
    check_target(path, force=force)
    options = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=WINDOW_LOG)
    compressor = zstandard.ZstdCompressor(compression_params=options)
    names: list[tuple[str, int, int, str]] = []
    blobs: list[bytes] = []
    for name, content in members:
        if len(content) > MAX_MEMBER:
            raise TraceError(
                f"{path}: {name} has {len(content)} bytes, more than {MAX_MEMBER}: write a directory"
            )
        blobs.append(compressor.compress(content))
        names.append((name, len(blobs[-1]), len(content), hashlib.sha256(blobs[-1]).hexdigest()))
    directory = json.dumps({"members": names}, separators=(",", ":")).encode()
    head = HEAD.pack(MAGIC, VERSION, len(directory))
    parts = [head, hashlib.sha256(head + directory).digest(), directory, *blobs]
    put_in_place(path, parts, force=force)
    return sum(len(part) for part in parts)


def put_in_place(path: Path, parts: Iterable[bytes], *, force: bool) -> None:
    """Write the parts beside, then give them their name."""
    partial = path.with_name(path.name + ".partial")
    if partial.is_symlink() or (partial.exists() and not is_leftover(partial)):
        raise TraceError(f"{partial} is in the way and no bundle: move it elsewhere")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.writelines(parts)
            check_target(path, force=force)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def is_leftover(partial: Path) -> bool:
    """Whether a file is what an interrupted run has left: nothing yet, or the beginning of a container."""
    if not partial.is_file():
        return False
    with reading(partial), partial.open("rb") as file:
        return MAGIC.startswith(file.read(len(MAGIC)))


def check_target(path: Path, *, force: bool) -> None:
    """Raise if a bundle cannot take this name."""
    if not path.name:
        raise TraceError(f"{path} cannot be a bundle: give the name of a new file")
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_file() or not is_container(path):
        raise TraceError(f"{path} exists and is no bundle: give the name of a new file")
    if not force:
        raise TraceError(f"{path} exists already: give another file, or --force to replace the bundle")


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn what a damaged file leads to into one line that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as err:
        why = f"{err} is missing" if isinstance(err, KeyError) else str(err)
        raise TraceError(
            f"{path} is damaged: {' '.join(why.split())[:200]}; fetch or write it again"
        ) from err
