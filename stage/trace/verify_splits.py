"""Splits of uneven all-to-alls: what a member says it sends to another is what that one says it receives from it.

`in_splits` are the bytes that a rank sends to each member of the group and `out_splits` those it receives, in the order
of the group. A simulator runs the collective with one size, so that is what the busiest member sends or receives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stage.trace.classes import RankClasses
from stage.trace.image import Ints
from stage.trace.report import Findings, plural
from stage.trace.verify_groups import Groups
from stage.trace.verify_node import COLL, Splits
from stage.trace.verify_record import GROUP, KIND, SIZE, SPLITS, RankRecord

__all__ = ["Member", "check_splits", "members_by_class", "members_by_rank"]


Pair = tuple[int, int]
"""Of a collective the number of its splits, 0 for none, and its size."""


class Member(NamedTuple):
    """A member of a group: its rank, what is known of it, and the number that the group has there."""

    rank: int
    record: RankRecord
    group: int


def members_by_rank(
    records: Mapping[int, RankRecord], groups: Groups
) -> Iterator[tuple[int, list[Member | None]]]:
    """Yield each group that some rank has splits on, with its members in order; None for one without a record."""
    for group in uneven_groups(records):
        order: Iterable[int] = range(groups.world) if group == 0 else groups.members.get(group, ())
        found = ((rank, records.get(rank)) for rank in order)
        yield group, [Member(rank, one, group) if one and one.comparable else None for rank, one in found]


def members_by_class(
    records: Mapping[int, RankRecord], classes: RankClasses, numbers: Mapping[tuple[str, ...], Ints]
) -> Iterator[tuple[int, list[Member | None]]]:
    """Yield the same from the records of the first ranks of classes, each of which stands for its class.

    `numbers` has the group of each position of the mesh, for each set of axes.
    """
    table = classes.groups
    for group in uneven_groups(records):
        axes = max((key for key, first in table.first.items() if first <= group), key=table.first.__getitem__)
        found: list[Member | None] = []
        for rank in table.members(axes)[group - table.first[axes]].tolist():
            first = classes.first(classes.of(rank))
            number = int(numbers[axes][classes.position(first)])
            one = records.get(first)
            found.append(Member(rank, one, number) if one and one.comparable else None)
        yield group, found


def uneven_groups(records: Mapping[int, RankRecord]) -> list[int]:
    """The groups on which ranks whose communication was understood have collectives with splits."""
    found: set[int] = set()
    for record in records.values():
        columns = record.columns
        if record.comparable:
            found.update(columns[GROUP][(columns[KIND] == COLL) & (columns[SPLITS] > 0)].tolist())
    return sorted(found)


def check_splits(
    groups: Iterable[tuple[int, Sequence[Member | None]]], splits: Sequence[Splits], findings: Findings
) -> None:
    """Check the splits of each group; those of a record are `splits[number - 1]`, with the number in its columns.

    Collectives whose members have the splits of others before them are not looked at again.
    """
    sound: set[tuple[Pair | None, ...]] = set()
    for group, members in groups:
        known = [None if member is None else uneven(member) for member in members]
        counts = {columns.shape[1] for columns in known if columns is not None}
        if len(counts) != 1:
            continue  # the collectives themselves differ, which is found where they are compared
        table = np.concatenate([np.full((2, *counts), -1) if c is None else c[:2] for c in known])
        for n in sorted(np.unique(table, axis=1, return_index=True)[1].tolist()):
            found = tuple(None if c is None else (int(c[0, n]), int(c[1, n])) for c in known)
            if found in sound or not any(pair and pair[0] for pair in found):
                continue
            problem = first_problem(found, splits)
            if problem is None:
                sound.add(found)
                continue
            at, text = problem
            member, columns = members[at], known[at]
            assert member is not None, "a problem is of a member that is known"
            assert columns is not None, "a member that is known has columns"
            name = f"group {group}" if group else "all ranks"
            ident = member.record.ident(int(columns[2, n]))
            findings.add(member.rank, ident, "splits", f"collective {n + 1} on {name} {text}")
            break


def uneven(member: Member) -> Ints:
    """Splits, sizes and positions of the collectives of a member on its group, in order."""
    columns, positions = member.record.in_order()
    chosen = (columns[KIND] == COLL) & (columns[GROUP] == member.group)
    return np.vstack((columns[SPLITS][chosen], columns[SIZE][chosen], positions[chosen]))


def first_problem(found: Sequence[Pair | None], splits: Sequence[Splits]) -> tuple[int, str] | None:
    """The first member whose splits do not fit those of the others, and why; None if all fit."""
    at = {i: pair for i, pair in enumerate(found) if pair is not None}
    for i, (number, _) in at.items():
        if not number:
            return i, "has no splits, but other members have: write in_splits and out_splits on all"
        length = len(splits[number - 1].sent)
        if length != len(found):
            return (
                i,
                f"has splits for {plural(length, 'member')}, but the group has {len(found)}: one for each",
            )
    sent = {i: splits[number - 1].sent for i, (number, _) in at.items()}
    received = {i: splits[number - 1].received for i, (number, _) in at.items()}
    for i in at:
        j = next((j for j in at if sent[i][j] != received[j][i]), None)
        if j is not None:
            text = f"sends {plural(sent[i][j], 'byte')} to member {j}, which receives {received[j][i]}"
            return i, f"{text}: in_splits and out_splits must agree"
    largest = max(max(sum(sent[i]), sum(received[i])) for i in at)
    i, (_, size) = next(iter(at.items()))
    if len(at) == len(found) and size != largest:
        return i, f"has {plural(size, 'byte')}, but the busiest member moves {largest}: write that on all"
    return None
