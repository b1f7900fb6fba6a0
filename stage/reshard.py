"""Resharding: the steps that turn one layout of a tensor into another.

A plan slices early, reduce-scatters, moves shards between dims, reduces what is left in one all-reduce, and
gathers last, so that everything that sends bytes runs on the smallest tensor. Each step moves as many atoms as the
order of atoms allows, flattened into one group.

Invariants:

* the steps of a plan, applied to the source layout, give the target layout (in an `unordered` dim up to order);
* the transpose of a plan leads from the dual of the target to the dual of the source;
* a plan never sends more than the one that gathers whatever stands in the way.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations, takewhile

from stage.errors import LayoutError
from stage.layout import Layout, State
from stage.mesh import Mesh
from stage.step import Reorder, Step, elements_sent, transpose_plan, volumes

__all__ = ["State", "Step", "elements_sent", "plan_reshard", "transpose_plan", "volumes"]


def plan_reshard(
    src: Layout, dst: Layout, mesh: Mesh, *, unordered: frozenset[int] = frozenset()
) -> tuple[Step, ...]:
    """The steps that take a tensor from layout `src` to layout `dst`.

    `unordered` holds the dims whose elements have no order (token slots of a mixture of experts): atoms leave and
    enter them in any order, and the result equals `dst` there up to order.

    >>> from stage.mesh import build_mesh
    >>> mesh = build_mesh(dp=2, cp=2)
    >>> [step.kind for step in plan_reshard(Layout((("dp", "cp"),)), Layout(((),)), mesh)]
    ['all_gather']

    Raises LayoutError where nothing leads from one state to another: from R to I, and to a new pending.
    """
    return () if src == dst else _plan(src, dst, mesh, unordered)


@lru_cache(maxsize=16384)
def _plan(src: Layout, dst: Layout, mesh: Mesh, unordered: frozenset[int]) -> tuple[Step, ...]:
    assert len(src.dims) == len(dst.dims), f"layouts of different tensors: {src}, {dst}"
    _check_states(src, dst)
    direct = _Draft(src, dst, mesh, unordered)
    blocked = direct.move_directly()
    direct.finish()
    if not blocked:
        return tuple(direct.steps)
    ordered = _Draft(src, dst, mesh, unordered)
    ordered.move_and_permute()
    ordered.finish()
    unit = mesh.world**2
    return min(
        (tuple(direct.steps), tuple(ordered.steps)),
        key=lambda plan: (elements_sent(plan, src, mesh, unit, unordered=unordered), len(plan)),
    )


def _check_states(src: Layout, dst: Layout) -> None:
    """LayoutError for an atom that no step can take from its source state to its target state."""
    for atom in sorted(dst.pending - src.pending):
        raise LayoutError(
            f"{atom} is {src.state(atom)} and should become pending in a reshard; only an op makes a pending "
            f"{dst.reduction}, so give the target a shard, R or I over {atom}"
        )
    for atom in sorted(dst.invariant):
        if src.state(atom) == "R":
            raise LayoutError(
                f"{atom} is R and should become I in a reshard; replicas that are used for different work are "
                f"not one computation, so keep the target R over {atom} or produce the tensor as I"
            )
    if dst.pending and src.reduction != dst.reduction:
        raise LayoutError(
            f"a pending {src.reduction} over {', '.join(sorted(src.pending))} should become a pending {dst.reduction} "
            "in a reshard; reduce it first"
        )


class _Draft:
    """A plan being made: the steps so far and the layout they lead to."""

    def __init__(self, src: Layout, dst: Layout, mesh: Mesh, unordered: frozenset[int]) -> None:
        self.mesh, self.unordered, self.reduction = mesh, unordered, src.reduction
        self.goal, self.dims = dst.dims, list(src.dims)
        self.state: dict[str, State] = dict.fromkeys(mesh.names, "R")
        self.state.update(_states(src))
        self.target: dict[str, State] = dict.fromkeys(mesh.names, "R")
        self.target.update(_states(dst))
        self.steps: list[Step] = []

    def _step(self, axes: tuple[str, ...], src: State, dst: State) -> None:
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

    def _loose(self, dim: int) -> tuple[str, ...]:
        """The atoms of a dim that are not where they should stay, those that can leave first being last."""
        now, goal = self.dims[dim], self.goal[dim]
        if dim in self.unordered:
            return tuple(atom for atom in now if atom not in goal)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now, goal, strict=False)))
        return now[kept:]

    def _wanted(self, dim: int) -> tuple[str, ...]:
        """The atoms that may now enter a dim, in order; none while a wrong atom stands in the way."""
        now, goal = self.dims[dim], self.goal[dim]
        if dim in self.unordered:
            return tuple(atom for atom in goal if atom not in now)
        return goal[len(now) :] if goal[: len(now)] == now else ()

    def _run(self, dim: int, wanted: tuple[str, ...], state: State) -> tuple[str, ...]:
        """The wanted atoms in one state that may enter a dim together."""
        if dim in self.unordered:
            return tuple(atom for atom in wanted if self.state[atom] == state)
        return tuple(takewhile(lambda atom: self.state[atom] == state, wanted))

    def _enter(self, states: str) -> bool:
        """Slice or reduce-scatter the next atoms of a dim, if there are any in one of `states`."""
        for dim in range(len(self.dims)):
            wanted = self._wanted(dim)
            for state in states if wanted else "":
                run = self._run(dim, wanted, state)
                if run:
                    self._step(run, state, dim)
                    return True
        return False

    def _cross(self) -> bool:
        """Move the next atoms of a dim from the end of another, if they are there."""
        for dim in range(len(self.dims)):
            wanted = self._wanted(dim)
            for src in range(len(self.dims)) if wanted else ():
                run = self._leaving(src, self._run(dim, wanted, src), dim in self.unordered)
                if run:
                    self._step(run, src, dim)
                    return True
        return False

    def _leaving(self, src: int, run: tuple[str, ...], any_order: bool) -> tuple[str, ...]:
        """The longest part of `run` (its start, or any part) that can leave dim `src` in one step."""
        if not run or src in self.unordered:
            return run
        loose = self._loose(src)
        for count in range(min(len(run), len(loose)), 0, -1):
            last = loose[-count:]
            if any_order and set(last) <= set(run):
                return last
            if set(last) == set(run[:count]):
                return run[:count]
        return ()

    def move_directly(self) -> bool:
        """Bring every atom of the goal into its dim, gathering what stands in the way; whether anything did."""
        blocked = False
        while True:
            while self._enter("RI") or self._enter("P") or self._cross():
                pass
            if all(self._placed(dim) for dim in range(len(self.dims))):
                return blocked
            blocked = True
            self.reduce()
            self._clear()

    def _placed(self, dim: int) -> bool:
        """Whether every atom of the goal stands in its place in a dim."""
        now, goal = self.dims[dim], self.goal[dim]
        return set(goal) <= set(now) if dim in self.unordered else now[: len(goal)] == goal

    def _clear(self) -> None:
        """Gather the last atoms of one dim that keeps another atom from its place."""
        loose = {dim: self._loose(dim) for dim in range(len(self.dims))}
        blocking = [
            dim
            for dim, atoms in loose.items()
            if atoms and (not self._placed(dim) or any(isinstance(self.target[a], int) for a in atoms))
        ]
        dim = min(blocking, key=lambda d: (isinstance(self.target[loose[d][-1]], int), d))
        self._gather(dim, loose[dim])

    def _gather(self, dim: int, loose: tuple[str, ...]) -> None:
        """Gather the longest end of `loose` that goes to one state; atoms still to be sharded wait as I."""
        ends = ["R" if self.target[atom] == "R" else "I" for atom in loose]
        count = sum(1 for _ in takewhile(lambda end: end == ends[-1], reversed(ends)))
        self._step(loose[-count:], dim, ends[-1])

    def move_and_permute(self) -> None:
        """Bring every atom of the goal into its dim regardless of order, and put orders right by permutes."""
        for state in "RIP":
            for dim, goal in enumerate(self.goal):
                run = tuple(atom for atom in goal if self.state[atom] == state)
                if run:
                    self._step(run, state, dim)
        swapped = self._swapped()
        if swapped != self.dims or any(self._buried(dim) for dim in range(len(self.dims))):
            self._permute(swapped)
        while self._send():
            pass
        self._permute(self.dims)

    def _moving(self, dim: int) -> tuple[str, ...]:
        """The atoms of a dim that belong to another dim."""
        return tuple(atom for atom in self.dims[dim] if self.target[atom] not in (dim, "R", "I"))

    def _buried(self, dim: int) -> bool:
        """Whether an atom that should move to another dim stands before one that should not."""
        moving = self._moving(dim)
        return dim not in self.unordered and self.dims[dim][len(self.dims[dim]) - len(moving) :] != moving

    def _send(self) -> bool:
        """Move the last atoms of some dim that belong to one other dim, to its end."""
        for src in range(len(self.dims)):
            moving = self._moving(src)
            if moving:
                dst = self.target[moving[-1]]
                assert isinstance(dst, int)
                if src in self.unordered:
                    run = tuple(atom for atom in moving if self.target[atom] == dst)
                else:
                    run = tuple(takewhile(lambda atom, to=dst: self.target[atom] == to, reversed(moving)))
                self._step(tuple(sorted(run, key=self.goal[dst].index)), src, dst)
                return True
        return False

    def _swapped(self) -> list[tuple[str, ...]]:
        """The dims after as many atoms as possible have changed places between dims at equal degrees."""
        dims = range(len(self.dims))
        if not self.unordered:
            final = [
                goal + tuple(atom for atom in now if not isinstance(self.target[atom], int))
                for now, goal in zip(self.dims, self.goal, strict=True)
            ]
            if all(self.mesh.degree(final[dim]) == self.mesh.degree(self.dims[dim]) for dim in dims):
                return final
        result = list(self.dims)
        for src, dst in combinations([dim for dim in dims if dim not in self.unordered], 2):
            there = tuple(atom for atom in self.dims[src] if self.target[atom] == dst)
            back = tuple(atom for atom in self.dims[dst] if self.target[atom] == src)
            if there and self.mesh.degree(there) == self.mesh.degree(back):
                result[src] = tuple(atom for atom in result[src] if atom not in there) + back
                result[dst] = tuple(atom for atom in result[dst] if atom not in back) + there
        return result

    def _permute(self, dims: list[tuple[str, ...]]) -> None:
        """Bring ordered dims to the atoms of `dims`: those that stay in order, then those to gather, then to move."""
        permutes: list[Reorder] = []
        for dim, atoms in enumerate(dims):
            if dim in self.unordered:
                continue
            after = tuple(sorted(atoms, key=lambda atom, here=dim: self._rank(here, atom)))
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

    def _rank(self, dim: int, atom: str) -> tuple[int, int]:
        """Sort key of an atom within a dim: its place in the goal, else after it by where it goes."""
        target = self.target[atom]
        if target == dim:
            return (0, self.goal[dim].index(atom))
        if isinstance(target, int):
            return (3 + target, self.goal[target].index(atom))
        return (1 if target == "R" else 2, self.mesh.names.index(atom))

    def finish(self) -> None:
        """Reduce what is still pending, then gather every atom that should not shard."""
        self.reduce()
        for dim in range(len(self.dims)):
            while loose := self._loose(dim):
                self._gather(dim, loose)

    def reduce(self) -> None:
        """Reduce, in one step, every pending atom that becomes R or I, and make I into R where wanted.

        One all-reduce over all atoms sends less than two over parts. So if some results are I, or other atoms go
        from I to R, all become I first: I to R is free, and its transpose is one all-reduce too.
        """
        names = self.mesh.names
        left = tuple(a for a in names if self.state[a] == "P" and self.target[a] in ("R", "I"))
        vary = tuple(a for a in names if self.target[a] == "R" and self.state[a] in ("P", "I"))
        if left and vary == left:
            self._step(left, "P", "R")
            return
        if left:
            self._step(left, "P", "I")
        if vary:
            self._step(vary, "I", "R")


def _states(layout: Layout) -> Iterable[tuple[str, State]]:
    """Every atom that is not R, with its state."""
    yield from ((atom, dim) for dim, atoms in enumerate(layout.dims) for atom in atoms)
    yield from ((atom, "P") for atom in layout.pending)
    yield from ((atom, "I") for atom in layout.invariant)
