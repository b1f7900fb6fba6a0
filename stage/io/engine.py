"""Engines: what writes the ranks of a set into a store, here in this process.

An engine is a function of the store, the prefix of the files' names and the ranks; it yields each rank with the size
and the CRC-32 of its file once that is written, in any order. Whatever engine writes them, the files are the same.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

from stage.errors import StageError
from stage.io.parts import trace_name
from stage.io.store import Data, Store

__all__ = ["Each", "Engine", "Written", "checked", "cut", "in_process", "shareable", "write_ranks"]

Written = tuple[int, int, int]
Each = Callable[[Sequence[int]], Iterator[Data]]
Engine = Callable[[Store, str, Sequence[int]], Iterator[Written]]


def checked(rank: int, data: Data) -> Written:
    """Return a rank with the size and the checksum of its file."""
    return rank, len(data), zlib.crc32(data)


def write_ranks(store: Store, prefix: str, ranks: Sequence[int], each: Each) -> Iterator[Written]:
    """Write the files of ranks, of which `each` makes the bytes, several at once where the store wants it."""
    files: dict[str, Data] = {}
    done: list[Written] = []
    size = 0
    for rank, data in zip(ranks, each(ranks), strict=True):
        files[trace_name(prefix, rank)] = bytes(data) if store.batch else data
        done.append(checked(rank, data))
        size += len(data)
        if size >= store.batch:
            store.write(files)
            yield from done
            files, done, size = {}, [], 0
    store.write(files)
    yield from done


def in_process(each: Each) -> Engine:
    """Return the engine that writes in this process."""
    return lambda store, prefix, ranks: write_ranks(store, prefix, ranks, each)


def cut(ranks: Sequence[int], most: int, workers: int) -> list[Sequence[int]]:
    """Return runs of at most `most` ranks, and at least four for each worker, so that none waits long for another.

    >>> [len(run) for run in cut(range(20), 64, 2)]
    [3, 3, 3, 3, 3, 3, 2]
    """
    length = max(1, min(most, -(-len(ranks) // (4 * workers))))
    return [ranks[start : start + length] for start in range(0, len(ranks), length)]


def shareable(store: Store) -> None:
    """Raise where what another process writes cannot be seen from this one."""
    if store.private:
        raise StageError(
            f"{store.where()} lives in one process: write it with one job, or give a place that processes share"
        )
