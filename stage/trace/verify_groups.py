"""Process groups: the table of them, the place of a rank in those it uses, equal collectives."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stage.trace.node import CommType
from stage.trace.report import Findings, plural, short
from stage.trace.verify_node import COLL, GROUP_LIMIT, Facts
from stage.trace.verify_record import GROUP, KIND, SIZE, TYPE, Columns, RankRecord

__all__ = ["Groups", "check_collectives", "read_groups"]

MODULUS = 500
EMPTY = np.zeros((3, 0), np.int64)


@dataclass(frozen=True, slots=True)
class Groups:
    """Members by number of group; `known` is False where the set says nothing of its groups.

    Group 0 is all ranks and stands in no table. Members are the keys of a mapping, in ring order.
    """

    world: int
    members: Mapping[int, Mapping[int, None]]
    known: bool

    def check_use(self, rank: int, communication: Iterable[Facts], findings: Findings) -> bool:
        """Check a rank's place in each group that it has a collective on; return whether all is well."""
        first: dict[int, Facts] = {}
        for facts in communication:
            if facts.kind == COLL and facts.usable:
                first.setdefault(facts.group, facts)
        sound = True
        for group, facts in first.items():
            for rule, message in self.problems(rank, group):
                findings.add(rank, facts.id, rule, message)
                sound = False
        return sound

    def problems(self, rank: int, group: int) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with a collective of a rank on a group."""
        if group == 0:
            if self.world == 1:
                yield "group-size", "is a collective of one rank, which never ends: leave it out"
            return
        if not self.known:
            return
        members = self.members.get(group)
        if members is None:
            yield "group-unknown", f"is on group {group}, which the set does not list: add it to the groups"
        elif rank not in members:
            yield "group-member", f"is on group {group}, whose members {short(tuple(members))} lack this rank"
        elif len(members) < 2:
            yield "group-size", f"is on group {group} of one rank, which never ends: leave the node out"

    def present(self, group: int, users: Iterable[int], records: Mapping[int, RankRecord]) -> list[int]:
        """Return the members of a group that have a record; of an unlisted one, the ranks that use it."""
        if group == 0:
            return sorted(records)
        members: Iterable[int] = self.members.get(group, ()) if self.known else sorted(users)
        return [rank for rank in members if rank in records]


def read_groups(world: int, table: Mapping[str, Sequence[int]], findings: Findings) -> Groups:
    """Return the groups of a set after checking the table of them."""
    members: dict[int, dict[int, None]] = {}
    for name, ranks in table.items():
        canonical = name.isascii() and name.isdecimal() and name[0] != "0" and len(name) <= 10
        if not canonical or int(name) >= GROUP_LIMIT:
            text = f"the groups have the key {short(name)}: number them in decimals from 1"
            findings.add(None, None, "group-table", text)
            continue
        members[int(name)] = dict.fromkeys(ranks)
        for message in table_problems(world, ranks):
            findings.add(None, None, "group-table", f"group {name} {message}")
    warn_alike(members, findings)
    return Groups(world, members, bool(table))


def table_problems(world: int, ranks: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong with the members of one group."""
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank, count in Counter(ranks).items() if count > 1)
        yield f"lists rank {twice} more than once: list each member once, in ring order"
    outside = [rank for rank in ranks if not 0 <= rank < world]
    if outside:
        yield f"lists rank {outside[0]}, but the ranks are 0 to {world - 1}"
    if len(set(ranks)) < 2:
        yield f"has {plural(len(set(ranks)), 'member')}: list only groups of two ranks and more"


def warn_alike(members: Mapping[int, Iterable[int]], findings: Findings) -> None:
    """Warn where two groups of one rank have numbers that the simulator does not tell apart."""
    alike: dict[int, list[int]] = defaultdict(list)
    for group in sorted(members):
        alike[group % MODULUS].append(group)
    for found in alike.values():
        seen: dict[int, int] = {}
        for group in found if len(found) > 1 else ():
            for rank in members[group]:
                if seen.setdefault(rank, group) != group:
                    text = (
                        f"groups {seen[rank]} and {group} of rank {rank} share a range of tags in ASTRA-sim"
                    )
                    findings.warn(None, None, "group-number", text)
                    return


def check_collectives(
    records: Mapping[int, RankRecord], groups: Groups, findings: Findings
) -> dict[int, list[int]]:
    """Check that the n-th collective on a group has one type and size on all its members.

    Return the members that have a record, by group that is used.
    """
    members: dict[int, list[int]] = {}
    signatures: dict[int, dict[int, bytes]] = defaultdict(dict)
    shared: dict[bytes, bytes] = {}
    for rank, record in records.items():
        for group, signature in sequences(record).items():
            content = signature[:2].tobytes()
            signatures[group][rank] = shared.setdefault(content, content)
    for group in sorted(signatures):
        users = signatures[group]
        members[group] = groups.present(group, users, records)
        found = {rank: users.get(rank, b"") for rank in members[group]}
        compare_members(group, found, records, findings)
    return members


def sequences(record: RankRecord) -> dict[int, Columns]:
    """Return by group the types, the sizes and the positions of a rank's collectives, in order."""
    columns, positions = record.in_order()
    chosen = columns[KIND] == COLL
    found = np.vstack((columns[TYPE][chosen], columns[SIZE][chosen], positions[chosen]))
    groups = columns[GROUP][chosen]
    by_group = np.argsort(groups, kind="stable")
    numbers, starts = np.unique(groups[by_group], return_index=True)
    parts = np.split(found[:, by_group], starts[1:], axis=1)
    return {int(group): part for group, part in zip(numbers, parts, strict=False)}


def compare_members(
    group: int, signatures: Mapping[int, bytes], records: Mapping[int, RankRecord], findings: Findings
) -> None:
    """Report the first collective on a group that differs between members, for each member that is odd."""
    counts = Counter(signatures.values())
    if len(counts) < 2:
        return
    usual = max(counts.values())
    reference = next(rank for rank, signature in signatures.items() if counts[signature] == usual)
    expected = sequences(records[reference]).get(group, EMPTY)
    for rank, signature in signatures.items():
        if signature != signatures[reference]:
            found = sequences(records[rank]).get(group, EMPTY)
            report_difference(group, (rank, found), (reference, expected), records, findings)


def report_difference(
    group: int,
    odd: tuple[int, Columns],
    usual: tuple[int, Columns],
    records: Mapping[int, RankRecord],
    findings: Findings,
) -> None:
    """Report where the collectives of one member on a group first differ from those of another."""
    (rank, found), (reference, expected) = odd, usual
    shared = min(found.shape[1], expected.shape[1])
    where = "all ranks" if group == 0 else f"group {group}"
    differing = np.flatnonzero(np.any(found[:2, :shared] != expected[:2, :shared], axis=0))
    if len(differing):
        n = int(differing[0])
        node, other = records[rank].ident(found[2, n]), records[reference].ident(expected[2, n])
        text = (
            f"collective {n + 1} on {where} is {describe(found[:, n])}, but on rank {reference} "
            f"{describe(expected[:, n])} (node {other}): all members must run the same"
        )
        findings.add(rank, node, "collective-mismatch", text)
        return
    longer, columns = (rank, found) if found.shape[1] > shared else (reference, expected)
    extra = records[longer].ident(columns[2, shared])
    text = (
        f"runs {plural(found.shape[1], 'collective')} on {where}, but rank {reference} {expected.shape[1]}: "
        f"node {extra} of rank {longer} has no partner here"
    )
    findings.add(rank, extra if longer == rank else None, "collective-count", text)


def describe(column: Columns) -> str:
    """Return the type and the size of a collective as text."""
    kind = int(column[0])
    name = CommType(kind).name if kind in set(CommType) else f"comm_type {kind}"
    return f"{name} of {int(column[1])} bytes"
