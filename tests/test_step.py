"""A step is a row of the table of reshards, or its transpose, and says what one rank sends."""

import pytest
import sympy

from stage.layout import Layout
from stage.mesh import build_mesh
from stage.step import Step, elements_sent
from stage.symbols import size


def lay(*dims: str) -> Layout:
    return Layout(tuple(tuple(dim.split()) for dim in dims))


TABLE = [
    # from, to, kind, elements of V = 240 on n = 4, kind of the transpose, elements
    ("P", "R", "all_reduce", 360, "all_reduce", 360),
    ("P", "I", "all_reduce", 360, "vary", 0),
    ("P", 0, "reduce_scatter", 180, "all_gather", 180),
    (0, "R", "all_gather", 180, "reduce_scatter", 180),
    (0, "I", "all_gather", 180, "slice", 0),
    ("I", "R", "vary", 0, "all_reduce", 360),
    ("I", 0, "slice", 0, "all_gather", 180),
    ("R", 0, "slice", 0, "pad", 0),
    (0, 1, "all_to_all", 45, "all_to_all", 45),
]


@pytest.mark.parametrize(("src", "dst", "kind", "sent", "back", "sent_back"), TABLE)
def test_the_table_of_steps(
    src: int | str, dst: int | str, kind: str, sent: int, back: str, sent_back: int
) -> None:
    step = Step(("a",), src, dst)
    assert (step.kind, step.sent(4, 240)) == (kind, sent)
    assert (step.transpose().kind, step.transpose().sent(4, 240)) == (back, sent_back)
    assert step.transpose().transpose() == step


def test_a_permute_sends_the_shard_once() -> None:
    step = Step(("a", "b"), 0, 0, ((0, ("a", "b"), ("b", "a")),))
    assert (step.kind, step.sent(4, 240)) == ("permute", 60)
    assert step.transpose().permutes == ((0, ("b", "a"), ("a", "b")),)


def test_what_is_sent_may_be_an_expression() -> None:
    batch, tp = size("batch"), size("tp")
    step = Step(("tp",), "P", "R")
    assert sympy.simplify(step.sent(tp, batch * 8) - 16 * batch * (tp - 1) / tp) == 0
    assert step.sent(4, batch) == sympy.Rational(3, 2) * batch
    mesh = build_mesh(dp=2, tp=4)
    assert (
        elements_sent((Step(("tp",), 1, "R"),), lay("dp", "tp"), mesh, batch) == sympy.Rational(3, 8) * batch
    )


def test_a_fraction_of_an_element_is_not_rounded() -> None:
    assert Step(("a",), "P", "R").sent(4, 1) * 2 == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (((), "P", "R"), "no atoms"),
        ((("a", "a"), "P", "R"), "repeated"),
        ((("a",), "R", "I"), "no such step"),
        ((("a",), "R", "P"), "no such step"),
        ((("a",), "I", "P"), "no such step"),
        ((("a",), 0, 0), "nothing moves"),
    ],
)
def test_steps_are_those_of_the_table(
    arguments: tuple[tuple[str, ...], int | str, int | str], match: str
) -> None:
    with pytest.raises(AssertionError, match=match):
        Step(*arguments)


@pytest.mark.parametrize(
    ("step", "layout"),
    [
        (Step(("a",), 0, "R"), lay("a b")),
        (Step(("a",), 0, "R"), lay("b")),
        (Step(("a",), "P", "R"), lay("")),
        (Step(("a",), "I", "R"), lay("")),
        (Step(("a",), "R", 0), lay("a")),
    ],
)
def test_apply_fails_where_atoms_are_not_in_the_source_state(step: Step, layout: Layout) -> None:
    with pytest.raises(AssertionError):
        step.apply(layout)
