"""How many keys a query meets, which is all that a mask does to the work of attention.

The attributes of an op say it: its `mask`, its `window` where it has one, on a device whose queries are one part of a
sequence the `chunk` that they are, and in a step of a ring the `block` of keys that it meets.
"""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import sympy

from stage.tensor import Size

__all__ = ["Block", "Chunk", "keys_of_block", "keys_of_chunk", "keys_per_query", "met_keys"]

Chunk = tuple[int, int]
"""A part of a sequence that is cut into so many of equal length: its number, from 0, and how many there are."""


class Block(NamedTuple):
    """The keys of a step of a ring: those of the rank `step` places before, in a ring of so many `ranks`.

    Rank i of n has part i of a sequence of `consecutive` parts. Else it is laid in a zig-zag: of 2n chunks the rank has
    i and 2n-1-i, so that under a causal mask every step of every rank is the same work, half of all pairs: those of the
    diagonal of its own block, of a block before it the first chunk, of one behind it all for its second chunk.
    """

    step: int
    ranks: int
    consecutive: bool = False


def met_keys(keys: Size, attrs: Mapping[str, Any]) -> Size:
    """The mean number of keys that a query meets in an op with these attributes."""
    mask, window, chunk, block = attrs["mask"], attrs.get("window"), attrs.get("chunk"), attrs.get("block")
    if mask != "full" and block is not None:
        return keys_of_block(keys, window, block, None if chunk is None else chunk[0])
    if mask != "full" and chunk is not None:
        return keys_of_chunk(keys, window, chunk)
    return keys_per_query(keys, mask, window)


def keys_per_query(keys: Size, mask: str, window: Size | None) -> Size:
    """The mean number of keys a query meets: all of them, half under a causal mask, fewer under a window."""
    if mask == "full":
        return keys
    if window is None:
        return _half(keys)
    width = _minimum(window, keys)
    return width - width * width * _reciprocal(2 * keys)


def keys_of_chunk(keys: Size, window: Size | None, chunk: Chunk) -> Size:
    """The mean number of keys that a query of one chunk of the sequence meets under a causal mask.

    Query x of a continuous sequence meets the min(x, window) keys before it, whose mean over all of it is
    `keys_per_query`: so the chunks of a sequence have the pairs of the whole one, exactly.

    >>> [str(keys_of_chunk(8, None, (i, 2))) for i in (0, 1)], str(keys_per_query(8, "causal", None))
    (['2', '6'], '4')
    """
    number, count = chunk
    width = keys if window is None else _minimum(window, keys)
    length = keys * Fraction(1, count)

    def before(queries: Size) -> Size:
        """The pairs of so many first queries."""
        met = _minimum(queries, width)
        return _half(met * met) + (queries - met) * width

    return (before((number + 1) * length) - before(number * length)) * _reciprocal(length)


def keys_of_block(keys: Size, window: Size | None, block: Block, rank: int | None = None) -> Size:
    """The mean number of the `keys` of a block that a query meets under a causal mask: of one rank, or of all of them.

    >>> [str(keys_of_block(8, None, Block(1, 2, consecutive=True), rank)) for rank in (0, 1, None)]
    ['0', '8', '4']
    """
    length = keys if block.consecutive else _half(keys)
    total: Size = 0
    for distance, count in _distances(block, rank):
        total = total + count * _pairs(length, distance, window)
    return total * _reciprocal((block.ranks if rank is None else 1) * keys)


@lru_cache(maxsize=4096)
def _distances(block: Block, rank: int | None) -> tuple[tuple[int, int], ...]:
    """How many chunks some keys stand before some queries, and how often, where they do."""
    found: Counter[int] = Counter()
    for own in range(block.ranks) if rank is None else (rank,):
        queries, keys = (_chunks(place % block.ranks, block) for place in (own, own - block.step))
        found.update(query - key for query in queries for key in keys if query >= key)
    return tuple(sorted(found.items()))


def _chunks(rank: int, block: Block) -> tuple[int, ...]:
    return (rank,) if block.consecutive else (rank, 2 * block.ranks - 1 - rank)


def _pairs(length: Size, distance: int, window: Size | None) -> Size:
    """The pairs of a chunk of queries with keys of as many tokens, so many chunks before them."""
    if window is None:
        return length * length if distance else _half(length * length)
    return _below(window - distance * length, length) - _below(-distance * length, length)


def _below(end: Size, length: Size) -> Size:
    """The area of x - y < `end` in a square of this length: half the second difference of squares."""
    squares = [_positive(end + shift * length) ** 2 for shift in (1, 0, -1)]
    return _half(squares[0] - 2 * squares[1] + squares[2])


def _half(value: Size) -> Size:
    return Fraction(value, 2) if isinstance(value, int | Fraction) else value / 2


def _reciprocal(value: Size) -> Size:
    return Fraction(1, value) if isinstance(value, int | Fraction) else 1 / value


def _positive(value: Size) -> Size:
    return max(value, 0) if isinstance(value, int | Fraction) else sympy.Max(value, 0)


def _minimum(a: Size, b: Size) -> Size:
    if isinstance(a, int | Fraction) and isinstance(b, int | Fraction):
        return min(a, b)
    return sympy.Min(a, b)
