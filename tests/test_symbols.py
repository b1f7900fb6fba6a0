"""Sizes are the same symbol for the same name, and evaluate exactly or not at all."""

import math
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.errors import StageError
from stage.symbols import dtype_bytes, evaluate, size

a, b, c = size("a"), size("b"), size("c")


def test_the_same_name_gives_the_same_positive_integer_symbol() -> None:
    assert size("d_ff") is size("d_ff")
    assert size("d_ff").is_integer
    assert size("d_ff").is_positive
    assert size("d_ff") != size("d_model")


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (7, 7),
        (sympy.Integer(7), 7),
        (a, 6),
        (a + b * c, 26),
        (a * b / c, None),
        (a * b / 8, 3),
        ((a + b) / 5, 2),
        (sympy.Rational(3, 2) * b, 6),
        (a**3 / 4, 54),
        (a**-2 * 72, 2),
        ((a / b) ** 2 * 4, 9),
        (sympy.Min(a, b, c), 4),
        (sympy.Max(a, b * c), 20),
        (sympy.ceiling(a / b), 2),
        (sympy.floor(a / b), 1),
        (sympy.ceiling(a / b) * sympy.Max(b, c) + sympy.floor(-a / b), 8),
        (a - b, 2),
    ],
)
def test_evaluate_is_exact(expr: sympy.Expr | int, value: int | None) -> None:
    values = {"a": 6, "b": 4, "c": 5}
    if value is None:
        with pytest.raises(StageError):
            evaluate(expr, values)
    else:
        found = evaluate(expr, values)
        assert found == value
        assert type(found) is int


def test_large_values_keep_every_digit() -> None:
    huge = 10**30 + 1
    assert evaluate(a * b / c, {"a": huge, "b": 7, "c": 7}) == huge


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[sympy.Expr, Fraction]:
    """An expression of a, b and c with its value, computed beside it, where a = 6, b = 4, c = 5."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from([(a, 6), (b, 4), (c, 5), (sympy.Integer(2), 2), (sympy.Integer(3), 3)]))
        return leaf[0], Fraction(leaf[1])
    left, x = draw(expressions(depth=depth - 1))
    right, y = draw(expressions(depth=depth - 1))
    choices = {
        "sum": (left + right, x + y),
        "product": (left * right, x * y),
        "quotient": (left / right, x / y),
        "minimum": (sympy.Min(left, right), min(x, y)),
        "maximum": (sympy.Max(left, right), max(x, y)),
        "ceiling": (sympy.ceiling(left), Fraction(math.ceil(x))),
        "floor": (sympy.floor(left) + 1, Fraction(math.floor(x) + 1)),
    }
    return choices[draw(st.sampled_from(sorted(choices)))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(expressions())
def test_evaluate_agrees_with_fractions(pair: tuple[sympy.Expr, Fraction]) -> None:
    expr, value = pair
    values = {"a": 6, "b": 4, "c": 5}
    assert evaluate(expr * value.denominator, values) == value.numerator
    if value.denominator > 1:
        with pytest.raises(StageError, match="is not an integer"):
            evaluate(expr, values)


@pytest.mark.parametrize(
    ("expr", "values", "message"),
    [
        (a * b, {"a": 2, "seq": 3}, "size 'b' has no value in a*b; add it to a, seq"),
        (a, {}, "size 'a' has no value in a; add it to none"),
        (a / b, {"a": 7, "b": 2}, "a/b = 7/2 is not an integer with a = 7, b = 2; change those sizes"),
        (sympy.Rational(1, 2) + 0, {}, "1/2 = 1/2 is not an integer with no sizes; change those sizes"),
        (a / b, {"a": 7, "b": 0}, "a/b divides by zero with a = 7, b = 0; change those sizes"),
        (1 / a, {"a": 0}, "1/a divides by zero with a = 0; change those sizes"),
        (
            sympy.sqrt(a),
            {"a": 4},
            "sqrt(a) is a root, which has no exact value; build sizes from + - * / ** Min Max floor ceiling",
        ),
        (
            sympy.log(a),
            {"a": 4},
            "log(a) has no exact value; build sizes from + - * / ** Min Max floor ceiling",
        ),
    ],
)
def test_evaluate_errors_say_what_where_and_what_to_do(
    expr: sympy.Expr, values: dict[str, int], message: str
) -> None:
    with pytest.raises(StageError) as caught:
        evaluate(expr, values)
    assert str(caught.value) == message


def test_dtype_bytes() -> None:
    assert {name: dtype_bytes(name) for name in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "bool")} == {
        "fp64": 8,
        "fp32": 4,
        "tf32": 4,
        "bf16": 2,
        "fp16": 2,
        "fp8": 1,
        "bool": 1,
    }
    with pytest.raises(StageError) as caught:
        dtype_bytes("fp12")
    assert str(caught.value) == (
        "data type 'fp12' is unknown; use one of fp64 int64 fp32 tf32 int32 fp16 bf16 fp8 int8 uint8 bool"
    )
