"""Where the members of a group are: so many within a unit of each tier of a system, so many units in one of the next.

Ranks fill a system from the inside out: rank r is in node r // 8. A job that does not fill whole units is spread
evenly, as `System.levels` says. Members of a group over axes of a mesh are a base plus sums of strides.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stage.cost.system import System
from stage.errors import StageError
from stage.mesh import Mesh
from stage.trace.groups import PIPELINE_ENDS
from stage.trace.job import Job
from stage.trace.partition import Partition
from stage.trace.peer import Peer, peer_positions

__all__ = ["group_members", "group_spread", "job_spread", "members_spread", "unit_sizes"]

Ints = NDArray[np.int64]


def unit_sizes(system: System, world: int) -> tuple[int, ...]:
    """Ranks of a job in a unit of each tier; the last holds all.

    >>> from stage.cost.system_file import load_system
    >>> unit_sizes(load_system("h100"), 512), unit_sizes(load_system("h100"), 12)
    ((8, 256, 512), (6, 12, 12))
    """
    size, sizes = 1, []
    for tier in system.tiers:
        left = world // size
        largest = left if tier.ranks is None else min(left, tier.ranks)
        size *= next(count for count in range(largest, 0, -1) if left % count == 0)
        sizes.append(size)
    if size < world:
        raise StageError(f"system {system.name} connects {size} of {world} ranks: add a [[network]] tier")
    return tuple(sizes)


def group_spread(
    system: System,
    mesh: Mesh,
    between: tuple[str, ...] | Peer,
    positions: Ints | None = None,
    placement: Ints | None = None,
) -> tuple[int, ...]:
    """The spread of the groups over axes, or of the pairs of peers, that have a rank at these positions (None: any).

    Of groups that are spread differently it is that of the farthest, which the others wait for.
    `placement[position]` is the rank at a position of the mesh; without it they are the same.

    >>> from stage.cost.system_file import load_system
    >>> from stage.mesh import build_mesh
    >>> mesh = build_mesh(pp=2, dp=8, tp=4)
    >>> [group_spread(load_system("h100"), mesh, (axis,)) for axis in mesh.names]
    [(1, 2, 1), (2, 4, 1), (4, 1, 1)]
    """
    places = np.arange(mesh.world) if positions is None else positions
    members = group_members(mesh, between, places)
    return members_spread(system, members if placement is None else placement[members], mesh.world)


def job_spread(system: System, job: Job) -> Callable[[tuple[str, ...] | Peer, int], tuple[int, ...]]:
    """What gives the spread of a group over axes, or of two peers, for the ranks of a class of a job."""
    classes = Partition.of(job.mesh, job.variants)

    @cache
    def spread(between: tuple[str, ...] | Peer, number: int) -> tuple[int, ...]:
        return group_spread(system, job.mesh, between, classes.positions(number), job.placement)

    return spread


def group_members(mesh: Mesh, between: tuple[str, ...] | Peer, positions: Ints) -> Ints:
    """Positions of the members, a row for each group over axes or pair of peers with one of these positions."""
    if isinstance(between, Peer):
        return np.stack([positions, peer_positions(mesh, positions, between)], axis=1)
    if between == PIPELINE_ENDS:
        strides = [(mesh.world // mesh.degree("pp"), mesh.degree("pp"))]
        steps = np.array([0, (strides[0][1] - 1) * strides[0][0]])
    else:
        strides = [(mesh.stride(atom), mesh.degree(atom)) for atom in between]
        steps = np.zeros(1, np.int64)
        for stride, degree in strides:
            steps = np.add.outer(steps, stride * np.arange(degree)).ravel()
    bases = positions - sum(positions // stride % degree * stride for stride, degree in strides)
    members: Ints = np.unique(bases)[:, None] + steps
    return members


def members_spread(system: System, members: Ints | Sequence[Sequence[int]], world: int) -> tuple[int, ...]:
    """The spread of groups of ranks, a row each; of groups that are spread differently the farthest.

    Members spread unevenly count as evenly spread over the next larger number of units that divides theirs.

    >>> from stage.cost.system_file import load_system
    >>> members_spread(load_system("h100"), [[0, 1, 8, 9], [2, 3, 10, 11]], 16)
    (2, 2, 1)
    """
    rows = np.asarray(members, dtype=np.int64)
    outside = rows[(rows < 0) | (rows >= world)]
    if len(outside):
        raise StageError(f"a group has rank {outside[0]}, but ranks are 0 to {world - 1}: correct the groups")
    units = [_occupied(rows // size) for size in unit_sizes(system, world)]
    count, spread = rows.shape[1], [1] * len(units)
    outer = 1
    for at in range(len(units) - 1, -1, -1):
        inside = units[at - 1] if at else count
        even = next(n for n in range(inside, count + 1) if n % outer == 0 and count % n == 0)
        spread[at], outer = even // outer, even
    return tuple(spread)


def _occupied(units: Ints) -> int:
    """The largest number of different units in a row."""
    ordered = np.sort(units, axis=1)
    return 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).max(initial=0))
