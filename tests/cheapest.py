"""Reference planners for resharding: a naive one, and an exhaustive search over short plans on small meshes."""

import heapq
import itertools
import math
from collections.abc import Iterator

from stage.layout import Layout
from stage.mesh import Mesh
from stage.step import Reorder, Step


def naive_plan(src: Layout, dst: Layout) -> list[Step]:
    """One atom at a time: whatever is not where it should be is reduced and gathered, then everything is sliced."""
    steps: list[Step] = []
    for dim, atoms in enumerate(src.dims):
        kept = 0
        while kept < min(len(atoms), len(dst.dims[dim])) and atoms[kept] == dst.dims[dim][kept]:
            kept += 1
        steps += [Step((atom,), dim, _whole(dst, atom)) for atom in reversed(atoms[kept:])]
    left = sorted(src.pending - dst.pending)
    steps += [Step((atom,), "P", _whole(dst, atom), (), src.reduction) for atom in left]
    layout = src
    for step in steps:
        layout = step.apply(layout)
    for dim, goal in enumerate(dst.dims):
        for atom in goal[len(layout.dims[dim]) :]:
            steps.append(Step((atom,), layout.state(atom), dim))
            layout = steps[-1].apply(layout)
    return steps + [Step((atom,), "I", "R") for atom in sorted(layout.invariant - dst.invariant)]


def _whole(dst: Layout, atom: str) -> str:
    return "R" if dst.state(atom) == "R" else "I"


def cheapest(src: Layout, dst: Layout, mesh: Mesh, size: int) -> int:
    """The fewest elements any plan sends that moves each atom straight to its target, besides permutes.

    As our own planner, it may not shard a dim more finely on the way than one of the two layouts does.
    """
    best, queue, order = {src: 0}, [(0, 0, src)], itertools.count(1)
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout == dst:
            return cost
        if cost > best[layout]:
            continue
        shards = {a: mesh.degree(a) for a in layout.sharding}
        for step in _moves(layout, dst, mesh):
            there = step.apply(layout)
            if not _divides(there, src, dst, mesh):
                continue
            volume = size // math.prod(n for atom, n in shards.items() if atom not in step.axes)
            total = cost + step.sent(mesh.degree(step.axes), volume)
            if total < best.get(there, total + 1):
                best[there] = total
                heapq.heappush(queue, (total, next(order), there))
    raise AssertionError(f"{dst} cannot be reached from {src}")


def _divides(layout: Layout, src: Layout, dst: Layout, mesh: Mesh) -> bool:
    return all(
        any(mesh.degree(end) % mesh.degree(now) == 0 for end in ends)
        for now, *ends in zip(layout.dims, src.dims, dst.dims, strict=True)
    )


def _moves(layout: Layout, dst: Layout, mesh: Mesh) -> Iterator[Step]:
    """Every step that brings some atoms straight to their target, and every permute."""
    goal = {atom: dst.state(atom) for atom in mesh.names}
    for atom in mesh.names:
        now = layout.state(atom)
        if now in ("R", "I", "P") and isinstance(goal[atom], int):
            yield Step((atom,), now, goal[atom])
        if now == "I" and goal[atom] == "R":
            yield Step((atom,), "I", "R")
    left = [atom for atom in mesh.names if atom in layout.pending and goal[atom] in ("R", "I")]
    for count in range(1, len(left) + 1):
        for axes in itertools.combinations(left, count):
            for end in {"I", *(goal[atom] for atom in axes)}:
                if end == "I" or all(goal[atom] == "R" for atom in axes):
                    yield Step(axes, "P", end)
    for dim, atoms in enumerate(layout.dims):
        for count in range(1, len(atoms) + 1):
            yield from _out_of(dim, atoms[-count:], goal)
    yield from _permutes(layout, mesh)


def _out_of(dim: int, last: tuple[str, ...], goal: dict[str, int | str]) -> Iterator[Step]:
    ends = {goal[atom] for atom in last}
    if ends == {"R"}:
        yield Step(last, dim, "R")
    elif "R" not in ends:
        yield Step(last, dim, "I")
    (end,) = ends if len(ends) == 1 else ("",)
    if isinstance(end, int) and end != dim:
        for order in itertools.permutations(last):
            yield Step(order, dim, end, () if order == last else ((dim, last, ()), (end, (), order)))


def _permutes(layout: Layout, mesh: Mesh) -> Iterator[Step]:
    degrees = [mesh.degree(dim) for dim in layout.dims]
    for order in itertools.permutations(layout.sharding):
        for cuts in itertools.combinations_with_replacement(range(len(order) + 1), len(degrees) - 1):
            bounds = list(itertools.pairwise((0, *cuts, len(order))))
            dims = tuple(order[start:stop] for start, stop in bounds)
            if dims != layout.dims and [mesh.degree(dim) for dim in dims] == degrees:
                changes = tuple(_changes(layout, dims))
                used = {atom for _, before, _ in changes for atom in before}
                axes = tuple(atom for atom in mesh.names if atom in used)
                yield Step(axes, changes[0][0], changes[0][0], changes)


def _changes(layout: Layout, dims: tuple[tuple[str, ...], ...]) -> Iterator[Reorder]:
    for dim, (before, after) in enumerate(zip(layout.dims, dims, strict=True)):
        kept = 0
        while kept < len(before) and before[: kept + 1] == after[: kept + 1]:
            kept += 1
        if before != after:
            yield dim, before[kept:], after[kept:]
