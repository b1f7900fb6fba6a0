"""Layouts: where the elements of a tensor live on a mesh, and what an op may do with them locally.

A layout gives each atom of the mesh one **state**: the index of the dim it shards; `"P"`, a pending
reduction; `"I"`, invariant (one computation repeated, so cotangents are equal already); or `"R"`, replicated
(each rank uses the tensor for its own different work, so cotangents must be summed). R is left unwritten.

Invariants:

* an atom appears once over all dims, `pending` and `invariant`;
* atoms of a dim are listed major to minor, and their order matters;
* `reduction` is "sum" unless something is pending;
* the dual of the dual is the layout itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stage.errors import LayoutError
from stage.mesh import Mesh

__all__ = ["Layout", "State", "local_result", "local_size"]

State = int | str


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of one tensor: atoms per dim, and the atoms over which it is pending or invariant.

    >>> weight = Layout((("tp", "dp"), ()), invariant=frozenset({"cp"}))
    >>> [weight.state(atom) for atom in ("tp", "cp", "pp")]
    [0, 'I', 'R']
    """

    dims: tuple[tuple[str, ...], ...]
    pending: frozenset[str] = frozenset()
    invariant: frozenset[str] = frozenset()
    reduction: str = "sum"

    def __post_init__(self) -> None:
        used = [atom for dim in self.dims for atom in dim] + [*self.pending, *self.invariant]
        assert len(set(used)) == len(used), f"an atom appears twice in {self}"
        assert self.reduction in ("sum", "max"), f"unknown reduction in {self}"
        assert self.pending or self.reduction == "sum", f"nothing is pending in {self}"

    @property
    def sharding(self) -> tuple[str, ...]:
        """The atoms that shard some dim, dim by dim."""
        return tuple(atom for dim in self.dims for atom in dim)

    def state(self, atom: str) -> State:
        """The dim that the atom shards, or "P", "I" or "R"."""
        if atom in self.pending:
            return "P"
        if atom in self.invariant:
            return "I"
        return next((index for index, dim in enumerate(self.dims) if atom in dim), "R")

    def dual(self, atoms: Iterable[str]) -> "Layout":
        """The layout of the cotangent on a mesh of `atoms`: R and pending change places, the rest stays.

        >>> Layout((("tp",), ())).dual(["dp", "tp"])
        Layout(dims=(('tp',), ()), pending=frozenset({'dp'}), invariant=frozenset(), reduction='sum')

        Raises LayoutError for a pending maximum, which is not linear.
        """
        if self.reduction != "sum":
            raise LayoutError(
                f"pending {self.reduction} over {', '.join(sorted(self.pending))} has no cotangent; "
                "reduce the tensor before it is differentiated"
            )
        return Layout(self.dims, frozenset(a for a in atoms if self.state(a) == "R"), self.invariant)


def local_size(size: int, atoms: Iterable[str], mesh: Mesh, *, dim: str, tensor: str) -> int:
    """The size of one shard of a dim of `size` elements that is sharded over `atoms`.

    >>> from stage.mesh import build_mesh
    >>> local_size(12, ["tp"], build_mesh(tp=3), dim="d_ff", tensor="mlp.up.weight")
    4

    Raises LayoutError, naming dim, size, axis and degree, if the shards would not be equal.
    """
    names = mesh.expand(atoms)
    degree = mesh.degree(names)
    if size % degree == 0:
        return size // degree
    text = mesh.describe(names)
    parents = list(dict.fromkeys(mesh.parent(name) for name in names))
    axes, total = " x ".join(parents), mesh.degree(parents)
    whole = "" if total == degree else f", part of {axes} = {total}"
    raise LayoutError(
        f"{dim} = {size} of {tensor} does not divide by {text} = {degree}{whole}; "
        f"choose a {axes} that divides it"
    )


Operand = tuple[tuple[str | None, ...], Layout]


def local_result(
    operands: Sequence[Operand],
    result_factors: tuple[str | None, ...],
    atoms: Iterable[str],
    *,
    linear: bool = True,
    additive: bool = False,
    reduction: str = "sum",
    where: str = "op",
) -> Layout:
    """The layout of the result of an op that runs on local shards without communication.

    An operand is (the factor of each of its dims, its layout). A factor is a name that links dims of equal
    size; None marks a dim that the op needs whole. A factor that the result lacks is reduced by `reduction`.
    `linear`: the op is linear in each operand; `additive`: it is linear in all of them together, as a sum is.
    `where` names the op in errors.

    >>> x, w = Layout((("dp",), ("tp",))), Layout((("tp",), ()))
    >>> local_result([(("m", "k"), x), (("k", "n"), w)], ("m", "n"), ["dp", "tp"])
    Layout(dims=(('dp',), ()), pending=frozenset({'tp'}), invariant=frozenset(), reduction='sum')

    Raises LayoutError, naming the atom and the states found, for a placement that must be resharded first.
    """
    rule = _Rule(linear or additive, additive, reduction, where)
    return _local_result(tuple(operands), result_factors, tuple(atoms), rule)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What an op allows besides sharding, and its name."""

    linear: bool
    additive: bool
    reduction: str
    where: str


@lru_cache(maxsize=4096)
def _local_result(
    operands: tuple[Operand, ...],
    result_factors: tuple[str | None, ...],
    atoms: tuple[str, ...],
    rule: _Rule,
) -> Layout:
    pending, invariant = set(), set()
    for atom in atoms:
        states = [_factor_state(factors, layout, atom, rule) for factors, layout in operands]
        found = _combine(atom, states, operands, rule)
        if found == "P" or (found.startswith("=") and found[1:] not in result_factors):
            pending.add(atom)
        elif found == "I":
            invariant.add(atom)
    orders = _shard_orders(operands, rule)
    held = {layout.reduction for _, layout in operands if layout.pending}
    if pending and held - {rule.reduction}:
        raise LayoutError(
            f"a pending {held.pop()} meets {rule.where}, which makes a pending {rule.reduction}; "
            "reduce the operand first"
        )
    dims = tuple(orders.get(factor, ()) if factor is not None else () for factor in result_factors)
    return Layout(dims, frozenset(pending), frozenset(invariant), rule.reduction if pending else "sum")


def _factor_state(factors: tuple[str | None, ...], layout: Layout, atom: str, rule: _Rule) -> str:
    """One of R, I and P, or an equals sign and the factor that the atom shards in one operand."""
    state = layout.state(atom)
    if isinstance(state, str):
        return state
    factor = factors[state]
    if factor is None:
        raise LayoutError(
            f"{atom} shards dim {state} of an operand of {rule.where}, which needs that dim whole; "
            "gather it first"
        )
    return f"={factor}"


def _combine(atom: str, states: list[str], operands: tuple[Operand, ...], rule: _Rule) -> str:
    """The state of the result on one atom: a row of the table of local runs, or LayoutError."""
    kinds = set(states)
    if kinds <= {"R"} or kinds == {"I"}:
        return states[0] if states else "R"
    sharded = kinds - {"R", "I", "P"}
    if len(sharded) == 1 and kinds <= sharded | {"R"}:
        factor = next(iter(sharded))[1:]
        having = [factor in factors for factors, _ in operands]
        if having == [state != "R" for state in states]:
            return f"={factor}"
    if kinds == {"P"} and rule.linear and (rule.additive or len(states) == 1):
        return "P"
    if kinds == {"P", "R"} and states.count("P") == 1 and rule.linear and not rule.additive:
        return "P"
    found = ", ".join(state.replace("=", "sharded on ") for state in states)
    raise LayoutError(f"{atom} cannot run {rule.where} locally with operands {found}; {_advice(kinds)}")


def _advice(kinds: set[str]) -> str:
    """What to do about operand states that do not go together."""
    if "I" in kinds:
        return "invariant never mixes with another state, so reshard the invariant operands first"
    if "P" in kinds:
        return "reduce the pending operands first"
    return "reshard them so that every operand with the factor is sharded on it and the others are R"


def _shard_orders(operands: tuple[Operand, ...], rule: _Rule) -> dict[str, tuple[str, ...]]:
    """The atoms of each factor; LayoutError where operands list them in different orders."""
    orders: dict[str, tuple[str, ...]] = {}
    for factors, layout in operands:
        for factor, dim in zip(factors, layout.dims, strict=True):
            if factor is not None and orders.setdefault(factor, dim) != dim:
                raise LayoutError(
                    f"{factor} is sharded over ({', '.join(orders[factor])}) and over ({', '.join(dim)}) by "
                    f"operands of {rule.where}; reshard them to one order first"
                )
    return orders
