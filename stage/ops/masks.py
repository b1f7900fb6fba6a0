"""How many keys a query meets, which is all that a mask does to the work of attention."""

from collections import Counter
from fractions import Fraction
from functools import lru_cache

import sympy

from stage.tensor import Size

__all__ = ["Block", "keys_per_query"]

Block = tuple[int, int]
"""A step of a ring and the ranks in it: in step j a rank has the keys of the rank j places before it."""


def keys_per_query(keys: Size, mask: str, window: Size | None, block: Block | None = None) -> Size:
    """The mean number of keys a query meets: all of them, half under a causal mask, fewer under a window.

    Of a `block` it is the mean over the ranks of the ring. Their sequence is laid in a zig-zag: of 2n chunks rank i of
    n has i and 2n-1-i, so under a causal mask it meets half of every block (of its own the diagonal, of those before
    it the first chunk, and of those behind it all with its second chunk).
    """
    if mask == "full":
        return keys
    if window is None:
        return _half(keys)
    if block is not None:
        return _windowed_block(keys, window, block)
    width = _minimum(window, keys)
    return width - width * width * _reciprocal(2 * keys)


def _windowed_block(keys: Size, window: Size, block: Block) -> Size:
    """The keys of a block that are less than a window before a query, as a mean over all queries of all ranks."""
    chunk, total = _half(keys), 0
    for distance, count in _chunk_distances(*block):
        near, far = (_below(end - distance * chunk, chunk) for end in (0, window))
        total = total + count * (far - near)
    return total * _reciprocal(block[1] * keys)


@lru_cache(maxsize=1024)
def _chunk_distances(step: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """How many chunks the keys stand before the queries, and how often over all ranks, in a step of a zig-zag ring."""
    found: Counter[int] = Counter()
    for rank in range(ranks):
        other = (rank - step) % ranks
        pairs = ((q, k) for q in (rank, 2 * ranks - 1 - rank) for k in (other, 2 * ranks - 1 - other))
        found.update(q - k for q, k in pairs if q >= k)
    return tuple(sorted(found.items()))


def _below(end: Size, chunk: Size) -> Size:
    """The area of x - y < `end` in a square of this side: half the second difference of squares."""
    squares = [_positive(end + shift * chunk) ** 2 for shift in (1, 0, -1)]
    return _half(squares[0] - 2 * squares[1] + squares[2])


def _half(value: Size) -> Size:
    return Fraction(value, 2) if isinstance(value, int) else value / 2


def _reciprocal(value: Size) -> Size:
    return Fraction(1, value) if isinstance(value, int | Fraction) else 1 / value


def _positive(value: Size) -> Size:
    return max(value, 0) if isinstance(value, int | Fraction) else sympy.Max(value, 0)


def _minimum(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return sympy.Min(a, b)
