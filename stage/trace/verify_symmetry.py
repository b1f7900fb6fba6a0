"""Proof that the ranks of a class stand alike on the mesh, and that the formula of groups is a partition of the ranks.

Invariants that are checked:

* the classes are a partition by coordinates over axes of the mesh, `pp` among them, whose formulas agree;
* a placement is a permutation of the ranks;
* over each set of axes every rank is in exactly one group (of the first and last stage: over `pp_ends`), whose number
  is what the formula gives for the rank's position, and no number means two groups;
* all groups over the same axes that have members of one class have members of the same classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stage.trace.classes import RankClasses
from stage.trace.groups import PIPELINE_ENDS, GroupTable
from stage.trace.image import PEER_WIDTH, Ints
from stage.trace.partition import STAGES, Partition
from stage.trace.report import Findings, plural
from stage.trace.verify_groups import MODULUS
from stage.trace.verify_node import GROUP_LIMIT

__all__ = ["FormulaMembers", "check_formulas", "check_partition", "warn_alike"]


@dataclass(frozen=True, slots=True)
class FormulaMembers(Mapping[int, Mapping[int, None]]):
    """The members of each group by its number, made when they are asked for."""

    groups: GroupTable

    def __getitem__(self, number: int) -> Mapping[int, None]:
        for axes, first in self.groups.first.items():
            rows = self.groups.groups(axes)
            if first <= number < first + rows:
                return dict.fromkeys(self.groups.members(axes)[number - first].tolist())
        raise KeyError(number)

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self.groups.count + 1))

    def __len__(self) -> int:
        return self.groups.count


def check_partition(classes: RankClasses, findings: Findings) -> bool:
    """Check that every rank is of one class and has one place; without that there is no symmetry to use."""
    world, parts = classes.mesh.world, classes.partition
    if not parts.sound or not partitions(parts):
        text = (
            f"classes by coordinates over {' '.join(parts.axes)} are no partition of the mesh by its stages"
        )
        findings.add(None, None, "class-shape", f"{text} and other axes")
    placement = classes.placement
    if placement is not None and not np.array_equal(np.sort(placement), np.arange(world)):
        findings.add(
            None, None, "placement", f"the placement is not a permutation of {plural(world, 'rank')}"
        )
    if world > 1 << 7 * PEER_WIDTH:
        text = f"ranks up to {world - 1} do not fit the {PEER_WIDTH} bytes that peers have: write fewer"
        findings.add(None, None, "peer-range", text)
    return not findings.defects


def partitions(parts: Partition) -> bool:
    """Whether the formulas of the class of a position, of its positions and of the first of them agree."""
    found = np.full(parts.mesh.world, -1, np.int64)
    for number in range(parts.count):
        own = parts.positions(number)
        if len(own) != parts.ranks_per_class or own[0] != parts.first(number):
            return False
        found[own] = number
    return bool(np.array_equal(found, parts.numbers(np.arange(parts.mesh.world))))


def check_formulas(classes: RankClasses, findings: Findings) -> dict[tuple[str, ...], Ints]:
    """Check the formula of groups for each set of axes.

    Return the number of the group of each position, 0 where it has none.
    """
    found = {}
    used = [(0, 1)]
    groups, world = classes.groups, classes.mesh.world
    for axes, first in groups.first.items():
        rows = positions(classes, groups.members(axes))
        numbers = groups.numbers(axes, np.arange(world, dtype=np.int64))
        for rule, text in problems(classes, axes, rows, numbers):
            findings.add(None, None, rule, f"groups over {' '.join(axes)}: {text}")
        found[axes] = np.where(members_of(classes, axes), numbers, 0)
        used.append((first, first + len(rows)))
    used.sort()
    if any(start < end for (_, end), (start, _) in pairwise(used)):
        findings.add(None, None, "group-table", "a number means more than one group: number them from 1 on")
    if used[-1][1] > GROUP_LIMIT:
        findings.add(None, None, "group-table", f"{groups.count} groups do not fit an int of 32 bits")
    return found


def positions(classes: RankClasses, rows: Ints) -> Ints:
    """The positions on the mesh of ranks."""
    if classes.placement is None:
        return rows
    return np.argsort(classes.placement)[rows]


def members_of(classes: RankClasses, axes: tuple[str, ...]) -> NDArray[np.bool_]:
    """Which positions have a group over `axes`: all, but of the ends of pipelines only the first and last stage."""
    mesh = classes.mesh
    stages = mesh.degree(STAGES) if axes == PIPELINE_ENDS else 1
    stage = np.arange(mesh.world) // (mesh.world // stages)
    ends: NDArray[np.bool_] = (stage == 0) | (stage == stages - 1)
    return ends


def problems(
    classes: RankClasses, axes: tuple[str, ...], rows: Ints, numbers: Ints
) -> Iterator[tuple[str, str]]:
    """Yield why the groups over `axes` are no partition that treats the ranks of a class alike."""
    world, parts = classes.mesh.world, classes.partition
    if rows.shape[1] < 2:
        yield "group-table", "they have one member: list only groups of two ranks and more"
    expected = members_of(classes, axes).astype(np.int64)
    if rows.min() < 0 or not np.array_equal(np.bincount(rows.ravel(), minlength=world), expected):
        yield "group-table", "they do not have each rank in exactly one group"
        return
    numbers_of = parts.numbers(rows)
    present = presence(numbers_of, parts.count)
    kinds = np.unique(present, axis=0)
    first = np.array([parts.first(number) for number in range(parts.count)])
    firsts = presence(np.where(rows == first[numbers_of], numbers_of, -1), parts.count)
    if kinds.sum(axis=0).max() > 1 or np.any(firsts[firsts.any(axis=1)] != present[firsts.any(axis=1)]):
        yield "group-table", "they do not treat the ranks of a class alike"
    wrong = np.argwhere(numbers[rows] != classes.groups.first[axes] + np.arange(len(rows))[:, None])
    if len(wrong):
        at = rows[wrong[0][0], wrong[0][1]]
        text = f"the formula gives {numbers[at]} at position {at} of the mesh, but that group lacks the rank there"
        yield "group-member", f"{text} ({plural(len(wrong), 'rank')} like this)"


def presence(numbers: Ints, count: int) -> NDArray[np.bool_]:
    """Which classes stand in each row; those below 0 count nothing."""
    found = np.zeros((len(numbers), count + 1), np.bool_)
    found[np.arange(len(numbers))[:, None], numbers] = True
    return found[:, :count]


def warn_alike(numbers: Mapping[tuple[str, ...], Ints], findings: Findings) -> None:
    """Warn where two groups of one rank have numbers that the simulator does not tell apart."""
    names = list(numbers)
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            both = (numbers[one] > 0) & (numbers[other] > 0)
            alike = np.flatnonzero(both & ((numbers[one] - numbers[other]) % MODULUS == 0))
            if len(alike):
                place = alike[0]
                pair = f"{numbers[one][place]} and {numbers[other][place]}"
                text = f"groups {pair} of one rank share a range of tags in ASTRA-sim"
                findings.warn(None, None, "group-number", text)
                return
