"""Resharding: the steps that turn one layout of a tensor into another.

A plan slices early, reduce-scatters, moves shards between dims, reduces what is left in one all-reduce, and
gathers last, so that all that sends bytes runs on the smallest tensor. Each step moves as many atoms as their
order allows, flattened into one group. Where order stands in the way two plans are made, one that gathers and
one that permutes, and the one that sends less is taken.

Invariants:

* the steps of a plan, applied to the source layout, give the target layout (up to order in `unordered` dims);
* the transpose of a plan leads from the dual of the target to the dual of the source;
* on the way no dim needs a divisor that it needs in neither layout;
* a plan never sends more than the one that gathers whatever stands in the way.
"""

from functools import lru_cache
from itertools import combinations, product, takewhile

from stage.draft import Draft
from stage.errors import LayoutError
from stage.layout import Layout, State
from stage.mesh import Mesh
from stage.step import Step, elements_sent, transpose_plan, volumes

__all__ = ["State", "Step", "elements_sent", "plan_reshard", "transpose_plan", "volumes"]


def plan_reshard(
    src: Layout, dst: Layout, mesh: Mesh, *, unordered: frozenset[int] = frozenset()
) -> tuple[Step, ...]:
    """The steps that take a tensor from layout `src` to layout `dst`.

    `unordered` holds the dims whose elements have no order (token slots of a mixture of experts): atoms leave
    and enter them in any order, and the result equals `dst` there up to order.

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
    direct = Draft(src, dst, mesh, unordered)
    _move_directly(direct)
    direct.finish()
    if direct.in_order():
        return tuple(direct.steps)
    ordered = Draft(src, dst, mesh, unordered)
    _move_and_permute(ordered)
    ordered.finish()
    plans = [tuple(direct.steps), tuple(ordered.steps)]
    if unordered:
        plans.append(_plan(src, dst, mesh, frozenset()))
    size = mesh.world**2
    return min(plans, key=lambda p: (elements_sent(p, src, mesh, size, unordered=unordered), len(p)))


def _check_states(src: Layout, dst: Layout) -> None:
    """LayoutError for an atom that no step can take from its source state to its target state."""
    for atom in sorted(dst.pending - src.pending):
        raise LayoutError(
            f"{atom} is {_text(src, atom)} and should become pending in a reshard; only an op makes a "
            f"pending {dst.reduction}, so give the target another state over {atom}"
        )
    for atom in sorted(dst.invariant):
        if src.state(atom) == "R":
            raise LayoutError(
                f"{atom} is R and should become I in a reshard; replicas used for different work are not one "
                f"computation, so keep the target R over {atom} or produce the tensor as I"
            )
    if dst.pending and src.reduction != dst.reduction:
        raise LayoutError(
            f"a pending {src.reduction} over {', '.join(sorted(src.pending))} should become a pending "
            f"{dst.reduction} in a reshard; reduce it first"
        )


def _text(layout: Layout, atom: str) -> str:
    """The state of an atom in words."""
    state = layout.state(atom)
    return f"a shard of dim {state}" if isinstance(state, int) else state


def _move_directly(draft: Draft) -> None:
    """Bring every atom of the goal into its dim in order, gathering what stands in the way."""
    while True:
        while _enter(draft, "RI") or _enter(draft, "P") or _cross(draft):
            pass
        if all(draft.placed(dim) for dim in range(len(draft.dims))):
            return
        draft.reduce()
        draft.clear()


def _enter(draft: Draft, states: str) -> bool:
    """Slice or reduce-scatter the next atoms of a dim, if there are any in one of `states`."""
    for dim in range(len(draft.dims)):
        wanted = _wanted(draft, dim)
        for state in states if wanted else "":
            run = _run(draft, dim, wanted, state)
            if run:
                draft.move(run, state, dim)
                return True
    return False


def _cross(draft: Draft) -> bool:
    """Move the next atoms of a dim from the end of another, if they are there."""
    for dim in range(len(draft.dims)):
        wanted = _wanted(draft, dim)
        for src in range(len(draft.dims)) if wanted else ():
            run = _leaving(draft, src, _run(draft, dim, wanted, src), dim in draft.unordered)
            if run:
                draft.move(run, src, dim)
                return True
    return False


def _wanted(draft: Draft, dim: int) -> tuple[str, ...]:
    """The atoms that may now enter a dim, in order; none while a wrong atom stands in the way."""
    now, goal = draft.dims[dim], draft.goal[dim]
    if dim in draft.unordered:
        return tuple(atom for atom in goal if atom not in now)
    return goal[len(now) :] if goal[: len(now)] == now else ()


def _run(draft: Draft, dim: int, wanted: tuple[str, ...], state: State) -> tuple[str, ...]:
    """The wanted atoms in one state that may enter a dim together."""
    if dim in draft.unordered:
        run = tuple(atom for atom in wanted if draft.state[atom] == state)
        return run if draft.fits(dim, run) else ()
    return tuple(takewhile(lambda atom: draft.state[atom] == state, wanted))


def _leaving(draft: Draft, src: int, run: tuple[str, ...], any_order: bool) -> tuple[str, ...]:
    """The longest part of `run` (its start, or any part) that can leave dim `src` in one step."""
    if not run or src in draft.unordered:
        return run
    loose = draft.loose(src)
    for count in range(min(len(run), len(loose)), 0, -1):
        last = loose[-count:]
        if any_order and set(last) <= set(run):
            return last
        if set(last) == set(run[:count]):
            return run[:count]
    return ()


def _move_and_permute(draft: Draft) -> None:
    """Bring every atom of the goal into its dim, whatever stands before it, with permutes for the order."""
    while _enter_any(draft):
        pass
    while not all(set(goal) <= set(now) for now, goal in zip(draft.dims, draft.goal, strict=True)):
        if not (_swap(draft) or _enter_any(draft) or _send(draft) or draft.permute(draft.dims)):
            draft.reduce()
            draft.clear()
    draft.permute(draft.dims)


def _enter_any(draft: Draft) -> bool:
    """Slice or reduce-scatter atoms of the goal at the end of a dim, whatever their order."""
    for state in "RIP":
        for dim, goal in enumerate(draft.goal):
            run = tuple(atom for atom in goal if draft.state[atom] == state)
            for count in range(len(run), 0, -1):
                if draft.fits(dim, run[:count]):
                    draft.move(run[:count], state, dim)
                    return True
    return False


def _send(draft: Draft) -> bool:
    """Move the last atoms of some dim that belong to one other dim to its end, if any can leave."""
    for src in range(len(draft.dims)):
        moving = draft.moving(src)
        if moving and not draft.buried(src):
            dst = draft.target[moving[-1]]
            assert isinstance(dst, int)
            ends = [draft.target[atom] == dst for atom in reversed(moving)]
            for count in range(len(ends) if all(ends) else ends.index(False), 0, -1):
                run = tuple(sorted(moving[-count:], key=draft.goal[dst].index))
                if draft.fits(dst, run):
                    draft.move(run, src, dst)
                    return True
    return False


def _swap(draft: Draft) -> bool:
    """Exchange atoms between dims by a permute, where that brings some to the dim they belong to."""
    swapped = _swapped(draft)
    return swapped != draft.dims and draft.permute(swapped)


def _swapped(draft: Draft) -> list[tuple[str, ...]]:
    """The dims after as many atoms as possible have changed places between dims at equal degrees."""
    if not draft.unordered:
        leaving = [atom for dim in draft.dims for atom in dim if not isinstance(draft.target[atom], int)]
        sizes = [draft.mesh.degree(dim) for dim in draft.dims]
        if not any(draft.moving(dim) for dim in range(len(draft.dims))):
            return draft.dims
        here = [tuple(atom for atom in goal if isinstance(draft.state[atom], int)) for goal in draft.goal]
        for homes in product(range(len(draft.dims)), repeat=len(leaving)):
            final = [
                goal + tuple(atom for atom, home in zip(leaving, homes, strict=True) if home == dim)
                for dim, goal in enumerate(here)
            ]
            if [draft.mesh.degree(dim) for dim in final] == sizes:
                return final
    result = list(draft.dims)
    for src, dst in combinations([dim for dim in range(len(draft.dims)) if dim not in draft.unordered], 2):
        there = tuple(atom for atom in draft.dims[src] if draft.target[atom] == dst)
        back = tuple(atom for atom in draft.dims[dst] if draft.target[atom] == src)
        if there and draft.mesh.degree(there) == draft.mesh.degree(back):
            result[src] = tuple(atom for atom in result[src] if atom not in there) + back
            result[dst] = tuple(atom for atom in result[dst] if atom not in back) + there
    return result
