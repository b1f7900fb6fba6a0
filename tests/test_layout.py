"""The table of local runs holds exactly: what it allows is right on simulated devices, what it rejects is wrong."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from stage.errors import LayoutError
from stage.layout import Layout, local_result, local_size
from stage.mesh import Mesh, build_mesh
from tests.oracle import Array, collect, layouts, local_einsum, place

EINSUMS = [
    "mk,kn->mn",
    "bmk,bkn->bmn",
    "bsd,dhk->bshk",
    "bshk,hkd->bsd",
    "bqhd,bkhd->bhqk",
    "bhqk,bkhd->bqhd",
    "ecd,edf->ecf",
    "bsv,vd->bsd",
    "m,n->mn",
    "mk,mk->m",
    "mk->m",
    "mk->km",
    "m,mk,k->",
    "a,ab,b->ab",
]
LINE = Mesh((("x", 2),), ())


def split(equation: str) -> tuple[list[str], str]:
    inputs, result = equation.split("->")
    return inputs.split(","), result


def on_line(term: str, state: str) -> Layout:
    """The layout on a mesh of one atom: sharded on a letter, or R, P, I."""
    return Layout(
        tuple(("x",) if letter == state else () for letter in term),
        frozenset("x") if state == "P" else frozenset(),
        frozenset("x") if state == "I" else frozenset(),
    )


def placements(terms: list[str]) -> list[tuple[str, ...]]:
    return list(itertools.product(*([*term, "R", "P", "I"] for term in terms)))


def legal(terms: list[str], result: str, states: tuple[str, ...]) -> Layout | None:
    operands = [(tuple(t), on_line(t, s)) for t, s in zip(terms, states, strict=True)]
    try:
        return local_result(operands, tuple(result), ["x"])
    except LayoutError:
        return None


def operand_values(terms: list[str], rng: np.random.Generator) -> list[Array]:
    return [rng.integers(-9, 9, [4] * len(term)) for term in terms]


@pytest.mark.parametrize("equation", EINSUMS)
def test_legal_placements_give_the_result_forward_and_backward(equation: str) -> None:
    rng = np.random.default_rng(0)
    terms, result = split(equation)
    values = operand_values(terms, rng)
    whole: Array = np.einsum(equation, *values)
    cotangent = rng.integers(-9, 9, whole.shape)
    for states in placements(terms):
        layout = legal(terms, result, states)
        if layout is None:
            continue
        placed = [place(v, on_line(t, s), LINE, rng) for v, t, s in zip(values, terms, states, strict=True)]
        assert (collect(local_einsum(equation, *placed, mesh=LINE), layout, LINE) == whole).all()
        dual = layout.dual(["x"])
        for index, (term, state) in enumerate(zip(terms, states, strict=True)):
            if set(term) - set("".join([result, *terms[:index], *terms[index + 1 :]])):
                continue  # its transpose repeats the cotangent along a dim, which is no einsum
            others = [i for i in range(len(terms)) if i != index]
            inputs = [result, *(terms[i] for i in others)]
            layouts_in = [dual, *(on_line(terms[i], states[i]) for i in others)]
            operands = [(tuple(t), v) for t, v in zip(inputs, layouts_in, strict=True)]
            found = local_result(operands, tuple(term), ["x"])
            assert found == on_line(term, state).dual(["x"])
            back = ",".join(inputs) + "->" + term
            given = [place(cotangent, dual, LINE, rng), *(placed[i] for i in others)]
            expected = np.einsum(back, cotangent, *(values[i] for i in others))
            assert (collect(local_einsum(back, *given, mesh=LINE), found, LINE) == expected).all()


@pytest.mark.parametrize("equation", EINSUMS)
def test_rejected_placements_give_the_result_in_no_layout(equation: str) -> None:
    """Except that I beside R is rejected for the gradient's sake: its values are right."""
    rng = np.random.default_rng(1)
    terms, result = split(equation)
    values = operand_values(terms, rng)
    whole = np.einsum(equation, *values)
    for states in placements(terms):
        if legal(terms, result, states) is not None or "I" in states:
            continue
        placed = [place(v, on_line(t, s), LINE, rng) for v, t, s in zip(values, terms, states, strict=True)]
        try:
            local = local_einsum(equation, *placed, mesh=LINE)
        except ValueError:
            continue  # shards of different sizes do not even multiply
        for state in [*result, "R", "P"]:
            assert not collects(local, on_line(result, state), whole), (states, state)


def collects(local: Array, layout: Layout, whole: Array) -> bool:
    try:
        found = collect(local, layout, LINE)
    except AssertionError:
        return False
    return found.shape == whole.shape and bool((found == whole).all())


def test_invariant_never_mixes_with_another_state() -> None:
    for equation in EINSUMS:
        terms, result = split(equation)
        for states in placements(terms):
            if "I" in states:
                expected = on_line(result, "I") if set(states) == {"I"} else None
                assert legal(terms, result, states) == expected


def test_axes_are_independent() -> None:
    """On two atoms the rule gives what it gives on each, and the values are right."""
    mesh, rng = Mesh((("x", 2), ("y", 2)), ()), np.random.default_rng(2)
    a, b = rng.integers(-9, 9, (4, 4)), rng.integers(-9, 9, (4, 4))
    checked = 0
    for left, right in itertools.product(layouts("xy", 2), layouts("xy", 2)):
        try:
            result = local_result([(("m", "k"), left), (("k", "n"), right)], ("m", "n"), mesh.names)
        except LayoutError:
            continue
        local = local_einsum("mk,kn->mn", place(a, left, mesh, rng), place(b, right, mesh, rng), mesh=mesh)
        assert (collect(local, result, mesh) == a @ b).all()
        checked += 1
    assert checked == 7**2 + 3  # seven ways an atom, and a second order where both shard one factor


def on_two(state: str) -> Layout:
    return on_line("mn", state)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("PP", "P"),
        ("RR", "R"),
        ("II", "I"),
        ("mm", "m"),
        ("PR", None),
        ("PI", None),
        ("mR", None),
        ("mn", None),
    ],
)
def test_addition_keeps_pending_only_where_all_are(states: str, expected: str | None) -> None:
    operands = [(("m", "n"), on_two(state)) for state in states]
    try:
        found = local_result(operands, ("m", "n"), ["x"], additive=True)
    except LayoutError:
        assert expected is None
        return
    assert expected is not None
    assert found == on_two(expected)
    rng = np.random.default_rng(3)
    a, b = rng.integers(-9, 9, (2, 4, 4))
    left, right = (place(v, on_two(s), LINE, rng) for v, s in zip((a, b), states, strict=True))
    assert (collect(left + right, found, LINE) == a + b).all()


def test_a_bias_without_the_sharded_factor_may_be_replicated() -> None:
    operands = [(("m", "n"), on_two("m")), (("n",), on_line("n", "R"))]
    assert local_result(operands, ("m", "n"), ["x"], additive=True) == on_two("m")


def test_a_nonlinear_op_takes_no_pending_operand() -> None:
    assert local_result([(("m", "n"), on_two("m"))], ("m", "n"), ["x"], linear=False) == on_two("m")
    with pytest.raises(LayoutError) as caught:
        local_result([(("m", "n"), on_two("P"))], ("m", "n"), ["x"], linear=False, where="gelu")
    assert str(caught.value) == (
        "x cannot run gelu locally with operands P; reduce the pending operands first"
    )


def test_a_maximum_over_a_sharded_factor_is_a_pending_maximum() -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(-9, 9, (4, 4))
    layout = local_result([(("m", "n"), on_two("n"))], ("m",), ["x"], linear=False, reduction="max")
    assert layout == Layout(((),), frozenset("x"), reduction="max")
    assert (collect(place(x, on_two("n"), LINE, rng).max(axis=2), layout, LINE) == x.max(axis=1)).all()


def test_the_result_of_no_operand_is_replicated() -> None:
    assert local_result([], ("m",), ["x"]) == Layout(((),))


def result_of(*operands: tuple[str, Layout], to: str = "mn", **options: bool | str) -> Callable[[], Layout]:
    given = [(tuple(None if letter == "_" else letter for letter in t), layout) for t, layout in operands]
    return lambda: local_result(given, tuple(to), ["x", "y"], where="matmul", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            result_of(("mk", on_line("mk", "I")), ("kn", on_line("kn", "R"))),
            "x cannot run matmul locally with operands I, R; "
            "invariant never mixes with another state, so reshard the invariant operands first",
        ),
        (
            result_of(("mk", on_line("mk", "P")), ("kn", on_line("kn", "P"))),
            "x cannot run matmul locally with operands P, P; reduce the pending operands first",
        ),
        (
            result_of(("mk", on_line("mk", "k")), ("kn", on_line("kn", "R"))),
            "x cannot run matmul locally with operands sharded on k, R; "
            "reshard them so that every operand with the factor is sharded on it and the others are R",
        ),
        (
            result_of(("m_", Layout(((), ("x",)))), to="m"),
            "x shards dim 1 of an operand of matmul, which needs that dim whole; gather it first",
        ),
        (
            result_of(("mk", Layout(((), ("x", "y")))), ("kn", Layout((("y", "x"), ())))),
            "k is sharded over (x, y) and over (y, x) by operands of matmul; reshard them to one order first",
        ),
        (
            result_of(("mn", Layout(((), ()), frozenset("x"), reduction="max"))),
            "a pending max meets matmul, which makes a pending sum; reduce the operand first",
        ),
    ],
)
def test_local_result_errors_say_what_where_and_what_to_do(call: Callable[[], Layout], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        call()
    assert str(caught.value) == message


def test_an_atom_appears_once() -> None:
    x, nothing = frozenset("x"), frozenset[str]()
    twice: list[tuple[tuple[tuple[str, ...], ...], frozenset[str], frozenset[str]]] = [
        ((("x",), ("x",)), nothing, nothing),
        ((("x", "x"),), nothing, nothing),
        ((("x",),), x, nothing),
        (((),), x, x),
    ]
    for dims, pending, invariant in twice:
        with pytest.raises(AssertionError, match="twice"):
            Layout(dims, pending, invariant)


def test_reduction_is_sum_unless_something_is_pending() -> None:
    with pytest.raises(AssertionError, match="nothing is pending"):
        Layout(((),), reduction="max")
    with pytest.raises(AssertionError, match="unknown reduction"):
        Layout(((),), frozenset("x"), reduction="mean")


def test_the_dual_of_the_dual_is_the_layout() -> None:
    for layout in layouts("xyz", 2):
        dual = layout.dual("xyz")
        assert dual.dual("xyz") == layout
        assert dual.dims == layout.dims
        assert dual.invariant == layout.invariant
        assert all((layout.state(a), dual.state(a)) not in {("R", "R"), ("P", "P")} for a in "xyz")


def test_a_pending_maximum_has_no_dual() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(((),), frozenset({"tp", "dp"}), reduction="max").dual(["dp", "tp"])
    assert str(caught.value) == (
        "pending max over dp, tp has no cotangent; reduce the tensor before it is differentiated"
    )


@pytest.mark.parametrize(
    ("size", "atoms", "message"),
    [
        (
            11008,
            ["tp_kv", "tp_rep"],
            "d_ff = 11008 of mlp.gate.weight does not divide by tp = 6; choose a tp that divides it",
        ),
        (
            11,
            ["tp_kv"],
            "d_ff = 11 of mlp.gate.weight does not divide by tp_kv = 2, part of tp = 6; choose a tp that divides it",
        ),
        (
            12,
            ["tp", "dp"],
            "d_ff = 12 of mlp.gate.weight does not divide by tp x dp = 24; choose a tp x dp that divides it",
        ),
    ],
)
def test_a_shard_that_does_not_divide_is_an_error(size: int, atoms: list[str], message: str) -> None:
    mesh = build_mesh(dp=4, tp=6, kv_heads=2)
    with pytest.raises(LayoutError) as caught:
        local_size(size, atoms, mesh, dim="d_ff", tensor="mlp.gate.weight")
    assert str(caught.value) == message


def test_local_size_is_exact() -> None:
    mesh = build_mesh(dp=4, tp=6, kv_heads=2)
    assert local_size(48, ["tp", "dp"], mesh, dim="d_ff", tensor="w") == 2
    assert local_size(5, [], mesh, dim="d_ff", tensor="w") == 5
