"""How many keys a query meets, which is all that a mask does to the work of attention."""

from fractions import Fraction

import sympy

from stage.tensor import Size

__all__ = ["keys_per_query"]


def keys_per_query(keys: Size, mask: str, window: Size | None) -> Size:
    """The mean number of keys a query meets: all of them, half under a causal mask, fewer under a window."""
    if mask == "full":
        return keys
    if window is None:
        return _half(keys)
    width = _minimum(window, keys)
    return width - width * width * _reciprocal(2 * keys)


def _half(value: Size) -> Size:
    return Fraction(value, 2) if isinstance(value, int) else value / 2


def _reciprocal(value: Size) -> Size:
    return Fraction(1, value) if isinstance(value, int) else 1 / value


def _minimum(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return sympy.Min(a, b)
