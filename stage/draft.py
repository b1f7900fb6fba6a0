"""A resharding plan being made: the steps so far, and where they have brought each atom.

The moves a planner may make are here; `stage.reshard` decides which to make. Every move records one step and
follows it, so a draft is at any time a plan from the source layout to the layout it holds.

Invariants:

* `dims`, `state` and `steps` always describe the same layout;
* a step is recorded once all its atoms are known to be in the source state.
"""

from collections.abc import Iterable
from itertools import takewhile

from stage.layout import Layout, State
from stage.mesh import Mesh
from stage.step import Reorder, Step

__all__ = ["Draft"]

_ORDER = ("slice", "reduce_scatter", "permute", "all_to_all", "all_reduce", "vary", "all_gather")


class Draft:
    """A plan being made: the steps so far and the layout they lead to."""

    def __init__(self, src: Layout, dst: Layout, mesh: Mesh, unordered: frozenset[int]) -> None:
        self.mesh, self.unordered, self.reduction = mesh, unordered, src.reduction
        self.origin, self.goal, self.dims = src.dims, dst.dims, list(src.dims)
        self.state: dict[str, State] = dict.fromkeys(mesh.names, "R")
        self.state.update(_states(src))
        self.target: dict[str, State] = dict.fromkeys(mesh.names, "R")
        self.target.update(_states(dst))
        self.steps: list[Step] = []

    def move(self, axes: tuple[str, ...], src: State, dst: State) -> None:
        """Record one step that moves `axes` and follow it."""
        permutes: tuple[Reorder, ...] = ()
        if isinstance(src, int):
            left = tuple(atom for atom in self.dims[src] if atom in axes)
            if isinstance(dst, int) and left != axes and src not in self.unordered:
                permutes = ((src, left, ()), (dst, (), axes))
            self.dims[src] = tuple(atom for atom in self.dims[src] if atom not in axes)
        if isinstance(dst, int):
            self.dims[dst] += axes
        self.state.update(dict.fromkeys(axes, dst))
        self.steps.append(Step(axes, src, dst, permutes, self.reduction if src == "P" else "sum"))

    def loose(self, dim: int) -> tuple[str, ...]:
        """The atoms of a dim that are not where they should stay, those that can leave first being last."""
        now, goal = self.dims[dim], self.goal[dim]
        if dim in self.unordered:
            return tuple(atom for atom in now if atom not in goal)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now, goal, strict=False)))
        return now[kept:]

    def moving(self, dim: int) -> tuple[str, ...]:
        """The atoms of a dim that belong to another dim."""
        return tuple(atom for atom in self.dims[dim] if self.target[atom] not in (dim, "R", "I"))

    def buried(self, dim: int) -> bool:
        """Whether an atom that should move to another dim stands before one that should not."""
        moving = self.moving(dim)
        return dim not in self.unordered and self.dims[dim][len(self.dims[dim]) - len(moving) :] != moving

    def placed(self, dim: int) -> bool:
        """Whether every atom of the goal stands in its place in a dim."""
        now, goal = self.dims[dim], self.goal[dim]
        return set(goal) <= set(now) if dim in self.unordered else now[: len(goal)] == goal

    def fits(self, dim: int, atoms: tuple[str, ...]) -> bool:
        """Whether a dim that is also sharded by `atoms` needs no divisor that neither layout needs."""
        degree = self.mesh.degree(self.dims[dim] + atoms)
        return any(self.mesh.degree(known[dim]) % degree == 0 for known in (self.origin, self.goal))

    def in_order(self) -> bool:
        """Whether every step that makes the tensor smaller comes before those that send all of it."""
        order = [_ORDER.index(step.kind) for step in self.steps]
        return order == sorted(order)

    def clear(self) -> None:
        """Gather the last atoms of one dim that keeps another atom from its place."""
        loose = {dim: self.loose(dim) for dim in range(len(self.dims))}
        blocking = [
            dim
            for dim, atoms in loose.items()
            if atoms and (not self.placed(dim) or any(isinstance(self.target[a], int) for a in atoms))
        ]
        dim = min(blocking, key=lambda d: (isinstance(self.target[loose[d][-1]], int), d))
        self._gather(dim, loose[dim])

    def _gather(self, dim: int, loose: tuple[str, ...]) -> None:
        """Gather the longest end of `loose` that goes to R or to I, or the last atom, which then waits as I."""
        end = self.target[loose[-1]]
        count = sum(1 for _ in takewhile(lambda atom: self.target[atom] == end, reversed(loose)))
        axes, end = (loose[-1:], "I") if isinstance(end, int) else (loose[-count:], end)
        last = self.steps[-1] if self.steps else None
        if last and (last.kind, last.src, last.dst) == ("all_gather", dim, end):
            self.steps.pop()
            self.dims[dim] += last.axes
            axes += last.axes
        self.move(axes, dim, end)

    def permute(self, dims: list[tuple[str, ...]]) -> bool:
        """Bring ordered dims to the atoms of `dims`: those of the goal first, others by where they go."""
        permutes: list[Reorder] = []
        for dim, atoms in enumerate(dims):
            if dim in self.unordered:
                continue
            after = self._sorted(dim, atoms)
            before, keep = self.dims[dim], 0
            while keep < len(before) and before[: keep + 1] == after[: keep + 1]:
                keep += 1
            if before != after:
                permutes.append((dim, before[keep:], after[keep:]))
                self.dims[dim] = after
        if permutes:
            used = {atom for _, before, _ in permutes for atom in before}
            axes = tuple(atom for atom in self.mesh.names if atom in used)
            for dim, _, after in permutes:
                self.state.update(dict.fromkeys(after, dim))
            self.steps.append(Step(axes, permutes[0][0], permutes[0][0], tuple(permutes)))
        return bool(permutes)

    def _sorted(self, dim: int, atoms: tuple[str, ...]) -> tuple[str, ...]:
        """The atoms in the order they have in the goal, followed by those to gather and those to move."""

        def rank(atom: str) -> tuple[int, int]:
            target = self.target[atom]
            if target == dim:
                return (0, self.goal[dim].index(atom))
            if isinstance(target, int):
                return (3 + target, self.goal[target].index(atom))
            return (1 if target == "R" else 2, self.mesh.names.index(atom))

        return tuple(sorted(atoms, key=rank))

    def reduce(self) -> None:
        """Reduce, in one step, every pending atom that becomes R or I, and make I into R where wanted.

        One all-reduce over all atoms sends less than two over parts. So if some results are I, or other atoms
        go from I to R, all become I first: I to R is free, and its transpose is one all-reduce too.
        """
        names = self.mesh.names
        left = tuple(a for a in names if self.state[a] == "P" and self.target[a] in ("R", "I"))
        vary = tuple(a for a in names if self.target[a] == "R" and self.state[a] in ("P", "I"))
        if left and vary == left:
            self.move(left, "P", "R")
            return
        if left:
            self.move(left, "P", "I")
        if vary:
            self.move(vary, "I", "R")

    def finish(self) -> None:
        """Reduce what is still pending, then gather every atom that should not shard."""
        self.reduce()
        for dim in range(len(self.dims)):
            while loose := self.loose(dim):
                self._gather(dim, loose)


def _states(layout: Layout) -> Iterable[tuple[str, State]]:
    """Every atom that is not R, with its state."""
    yield from ((atom, dim) for dim, atoms in enumerate(layout.dims) for atom in atoms)
    yield from ((atom, "P") for atom in layout.pending)
    yield from ((atom, "I") for atom in layout.invariant)
