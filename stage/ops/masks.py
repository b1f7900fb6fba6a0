"""How many keys a query meets, which is all that a mask does to the work of attention.

The attributes of an op say it: its `mask`, its `window` where it has one and, on a device whose queries are one part
of a sequence, the `chunk` that they are.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import sympy

from stage.tensor import Size

__all__ = ["Chunk", "keys_of_chunk", "keys_per_query", "met_keys"]

Chunk = tuple[int, int]
"""A part of a sequence that is cut into so many of equal length: its number, from 0, and how many there are."""


def met_keys(keys: Size, attrs: Mapping[str, Any]) -> Size:
    """The mean number of keys that a query meets in an op with these attributes."""
    mask, window, chunk = attrs["mask"], attrs.get("window"), attrs.get("chunk")
    if chunk is None or mask == "full":
        return keys_per_query(keys, mask, window)
    return keys_of_chunk(keys, window, chunk)


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


def _half(value: Size) -> Size:
    return Fraction(value, 2) if isinstance(value, int | Fraction) else value / 2


def _reciprocal(value: Size) -> Size:
    return Fraction(1, value) if isinstance(value, int | Fraction) else 1 / value


def _minimum(a: Size, b: Size) -> Size:
    if isinstance(a, int | Fraction) and isinstance(b, int | Fraction):
        return min(a, b)
    return sympy.Min(a, b)
