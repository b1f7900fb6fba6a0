"""Sizes as symbols: named positive integers, exact evaluation, and the bytes of a data type.

Expressions stay symbolic until the last step; `evaluate` then walks the tree with exact Python numbers, so a
shard that does not divide surfaces as an error instead of being rounded away.

Invariants:

* the same name always gives the same symbol, a positive integer;
* `evaluate` never rounds: the value is an integer, or an error that shows the expression and the values.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import sympy

from stage.errors import StageError

__all__ = ["dtype_bytes", "evaluate", "exact", "size"]

_DTYPE_BYTES = {
    "fp64": 8,
    "int64": 8,
    "fp32": 4,
    "tf32": 4,
    "int32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

_BUILD = "build sizes from + - * / ** Min Max floor ceiling"

Number = int | Fraction


@cache
def size(name: str) -> sympy.Symbol:
    """The size called `name`, as a positive integer symbol.

    >>> size("d_model") is size("d_model")
    True
    >>> size("heads") * size("head_dim") / size("heads")
    head_dim
    """
    return sympy.Symbol(name, integer=True, positive=True)


def dtype_bytes(name: str) -> int:
    """Bytes of one element of the data type `name`.

    >>> dtype_bytes("bf16"), dtype_bytes("fp32")
    (2, 4)

    Raises StageError, listing the known names, for any other.
    """
    try:
        return _DTYPE_BYTES[name]
    except KeyError:
        known = " ".join(_DTYPE_BYTES)
        raise StageError(f"data type {name!r} is unknown; use one of {known}") from None


def evaluate(expr: sympy.Expr | int, values: Mapping[str, int]) -> int:
    """The exact integer value of `expr` where each symbol has the value of its name.

    >>> evaluate(size("batch") * size("seq") / size("tp"), {"batch": 3, "seq": 8, "tp": 4})
    6

    Raises StageError if a symbol has no value, or if the result is not an integer.
    """
    result = exact(expr, values)
    if isinstance(result, int):
        return result
    if result.denominator == 1:
        return result.numerator
    raise StageError(f"{expr} = {result} is not an integer with {_given(expr, values)}; change those sizes")


def exact(expr: sympy.Expr | int, values: Mapping[str, int]) -> int | Fraction:
    """The exact value of `expr`, a fraction where it is not an integer; errors as of `evaluate`."""
    if isinstance(expr, int):
        return expr
    try:
        return _value(expr, values)
    except KeyError as err:
        known = ", ".join(sorted(values)) or "none"
        raise StageError(f"size {err.args[0]!r} has no value in {expr}; add it to {known}") from None
    except ZeroDivisionError:
        raise StageError(f"{expr} divides by zero with {_given(expr, values)}; change those sizes") from None


def _given(expr: sympy.Expr, values: Mapping[str, int]) -> str:
    """The values that `expr` depends on, as `name = value` text."""
    names = sorted(symbol.name for symbol in expr.free_symbols)
    return ", ".join(f"{name} = {values[name]}" for name in names) or "no sizes"


def _value(expr: Any, values: Mapping[str, int]) -> Number:
    """`expr` as an int or Fraction; KeyError names a symbol without a value."""
    if expr.is_Symbol:
        return values[expr.name]
    if expr.is_Rational:
        return int(expr.p) if expr.q == 1 else Fraction(int(expr.p), int(expr.q))
    if expr.is_Mul:
        return _product(expr.args, values)
    if expr.is_Add:
        total: Number = 0
        for arg in expr.args:
            total += _value(arg, values)
        return total
    if expr.is_Pow:
        return _power(_value(expr.base, values), _exponent(expr, values))
    rule = _FUNCTIONS.get(expr.func)
    if rule is None:
        raise StageError(f"{expr} has no exact value; {_BUILD}")
    return rule([_value(arg, values) for arg in expr.args])


def _product(args: tuple[Any, ...], values: Mapping[str, int]) -> Number:
    """The product of `args`; denominators are collected so that only one division is made."""
    above, below = 1, 1
    for arg in args:
        if arg.is_Symbol:
            above *= values[arg.name]
            continue
        if arg.is_Pow:
            exponent = _exponent(arg, values)
            factor = _value(arg.base, values)
            if exponent < 0 and isinstance(factor, int):
                below *= factor**-exponent
                continue
            factor = _power(factor, exponent)
        else:
            factor = _value(arg, values)
        above *= factor.numerator
        below *= factor.denominator
    whole, rest = divmod(above, below)
    return whole if rest == 0 else Fraction(above, below)


def _exponent(power: Any, values: Mapping[str, int]) -> int:
    """The integer exponent of `power`; StageError for a root."""
    exponent = _value(power.exp, values)
    if exponent.denominator != 1:
        raise StageError(f"{power} is a root, which has no exact value; {_BUILD}")
    return int(exponent)


def _power(base: Number, exponent: int) -> Number:
    """`base ** exponent`, exactly."""
    return base**exponent if exponent >= 0 else Fraction(1) / base**-exponent


_FUNCTIONS: dict[Any, Callable[[list[Number]], Number]] = {
    sympy.Min: min,
    sympy.Max: max,
    sympy.ceiling: lambda args: math.ceil(args[0]),
    sympy.floor: lambda args: math.floor(args[0]),
}
