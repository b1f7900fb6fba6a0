"""A step of a resharding plan: one collective, or one local operation, on a flattened group of ranks.

Invariants:

* a step names at least one atom, each once;
* only the pairs of states in the table of ARCHITECTURE, and their transposes, are steps;
* the transpose of the transpose is the step itself;
* `apply` changes the state of the named atoms only, and fails where they are not in the source state.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stage.errors import LayoutError
from stage.layout import Layout, State
from stage.mesh import Mesh

__all__ = ["Reorder", "Step", "elements_sent", "transpose_plan", "volumes"]

Reorder = tuple[int, tuple[str, ...], tuple[str, ...]]

_DUAL = {"R": "P", "P": "R", "I": "I"}
_LOCAL = frozenset({"slice", "pad", "vary"})
_UNSHARDED = frozenset({("P", "R"), ("P", "I"), ("I", "R")})


@dataclass(frozen=True, slots=True)
class Step:
    """The move of `axes`, flattened in this order into one group, from state `src` to state `dst`.

    `permutes` lists (dim, last atoms before, last atoms after) for every dim that a permute rearranges, and
    for an all-to-all whose atoms stand in a different order in the two dims. A permute has the first of its
    dims as `src` and as `dst`. `reduction` is what a pending source is reduced by.

    >>> Step(("dp", "cp"), "P", 0).kind, Step(("tp",), 1, 0).kind, Step(("tp",), "I", "R").kind
    ('reduce_scatter', 'all_to_all', 'vary')
    """

    axes: tuple[str, ...]
    src: State
    dst: State
    permutes: tuple[Reorder, ...] = ()
    reduction: str = "sum"

    def __post_init__(self) -> None:
        assert self.axes, f"no atoms in {self}"
        assert len(set(self.axes)) == len(self.axes), f"atoms repeated in {self}"
        sharded = isinstance(self.src, int) or isinstance(self.dst, int)
        assert sharded or (self.src, self.dst) in _UNSHARDED, f"no such step: {self}"
        assert self.src != self.dst or self.permutes, f"nothing moves in {self}"

    @property
    def kind(self) -> str:
        """The name of the collective, or of the local operation."""
        if isinstance(self.src, int):
            if isinstance(self.dst, int):
                return "permute" if self.src == self.dst else "all_to_all"
            return "pad" if self.dst == "P" else "all_gather"
        if isinstance(self.dst, int):
            return "reduce_scatter" if self.src == "P" else "slice"
        return "all_reduce" if self.src == "P" else "vary"

    def transpose(self) -> "Step":
        """The step of the cotangent: from the dual of `dst` to the dual of `src`.

        >>> Step(("tp",), "I", "R").transpose()
        Step(axes=('tp',), src='P', dst='I', permutes=(), reduction='sum')

        Raises LayoutError for a maximum, which is not linear.
        """
        if self.reduction != "sum":
            raise LayoutError(
                f"{self.reduction} over {', '.join(self.axes)} has no transpose in {self.kind}; "
                "take its result as a constant in backward"
            )
        back = tuple((dim, after, before) for dim, before, after in self.permutes)
        axes = self.axes
        if self.permutes and self.kind == "all_to_all":
            axes = next(before for dim, before, _ in self.permutes if dim == self.src)
        return Step(axes, _DUAL.get(str(self.dst), self.dst), _DUAL.get(str(self.src), self.src), back)

    def apply(self, layout: Layout, *, unordered: frozenset[int] = frozenset()) -> Layout:
        """The layout after the step; atoms leave the end of a dim, or any place of an `unordered` one.

        >>> Step(("tp",), 0, "R").apply(Layout((("dp", "tp"), ())))
        Layout(dims=(('dp',), ()), pending=frozenset(), invariant=frozenset(), reduction='sum')
        """
        moves: list[Reorder] = list(self.permutes)
        if not moves:
            moves += [(self.src, self.axes, ())] if isinstance(self.src, int) else []
            moves += [(self.dst, (), self.axes)] if isinstance(self.dst, int) else []
        dims = list(layout.dims)
        for dim, before, after in moves:
            dims[dim] = _without_last(dims[dim], before, dim in unordered) + after
        pending, invariant = set(layout.pending), set(layout.invariant)
        for state, atoms in (("P", pending), ("I", invariant)):
            if self.src == state:
                assert atoms.issuperset(self.axes), f"{self} does not start from {layout}"
                atoms.difference_update(self.axes)
            if self.dst == state:
                atoms.update(self.axes)
        reduction = layout.reduction if pending else "sum"
        return Layout(tuple(dims), frozenset(pending), frozenset(invariant), reduction)

    def sent(self, n: int, volume: Any) -> Any:
        """Elements that one rank of a group of `n` sends, by ring algorithms.

        `volume`: elements of the tensor before division by these axes, a number or an expression.

        >>> Step(("tp",), "P", "R").sent(4, 100), Step(("tp",), 1, 0).sent(4, 64)
        (150, 12)
        """
        kind = self.kind
        if kind in _LOCAL:
            return 0
        if kind == "all_reduce":
            return _scaled(volume, 2 * (n - 1), n)
        if kind == "all_to_all":
            return _scaled(volume, n - 1, n * n)
        if kind == "permute":
            return _scaled(volume, 1, n)
        return _scaled(volume, n - 1, n)


def _without_last(dim: tuple[str, ...], atoms: tuple[str, ...], anywhere: bool) -> tuple[str, ...]:
    """The dim without `atoms`, which must be its last ones unless they may stand `anywhere`."""
    keep = len(dim) - len(atoms)
    if anywhere:
        rest = tuple(atom for atom in dim if atom not in atoms)
        assert len(rest) == keep, f"{atoms} are not in {dim}"
        return rest
    assert dim[max(keep, 0) :] == atoms, f"{atoms} are not the last of {dim}"
    return dim[:keep]


def _scaled(volume: Any, above: Any, below: Any) -> Any:
    """The product of `volume` and above / below, exactly; an int where it is whole."""
    if isinstance(volume, int | Fraction) and isinstance(below, int):
        result = Fraction(volume * above, below)
        return result.numerator if result.denominator == 1 else result
    return volume * above / below


def transpose_plan(plan: tuple[Step, ...]) -> tuple[Step, ...]:
    """The plan of the cotangent: from the dual of the target layout to the dual of the source.

    >>> transpose_plan((Step(("cp",), "R", 0), Step(("tp",), "P", 0)))[0].kind
    'all_gather'
    """
    return tuple(step.transpose() for step in reversed(plan))


def volumes(
    plan: tuple[Step, ...], src: Layout, mesh: Mesh, size: Any, *, unordered: frozenset[int] = frozenset()
) -> Iterator[tuple[Step, Any]]:
    """Each step with its volume: elements of a tensor of `size`, divided by all shards but those of the step.

    >>> from stage.mesh import build_mesh
    >>> mesh, layout = build_mesh(dp=2, tp=2), Layout((("dp",), ("tp",)))
    >>> [volume for _, volume in volumes((Step(("tp",), 1, "R"),), layout, mesh, 64)]
    [32]
    """
    layout = src
    for step in plan:
        shards = math.prod(mesh.degree(atom) for atom in layout.sharding if atom not in step.axes)
        yield step, _scaled(size, 1, shards)
        layout = step.apply(layout, unordered=unordered)


def elements_sent(
    plan: tuple[Step, ...], src: Layout, mesh: Mesh, size: Any, *, unordered: frozenset[int] = frozenset()
) -> Any:
    """Elements of a tensor of `size` that one rank sends over the whole plan.

    >>> from stage.mesh import build_mesh
    >>> elements_sent((Step(("tp",), 0, "R"),), Layout((("tp",),)), build_mesh(tp=4), 100)
    75
    """
    found = volumes(plan, src, mesh, size, unordered=unordered)
    return sum(step.sent(mesh.degree(step.axes), volume) for step, volume in found)
