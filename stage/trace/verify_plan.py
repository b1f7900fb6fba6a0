"""What is left of a rank's program when only its communication matters.

If on each stream every node that takes its slot runs behind the one before it (a chain), then no timing can
change the order of communication; computations then matter only as paths between communications, and are left
out. Else all nodes stay, and a run of them is one of several possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stage.trace.verify_node import RECV, SEND
from stage.trace.verify_order import Structure

__all__ = ["Plan", "make_plan"]

FRONT_LIMIT = 64
NOTHING: frozenset[int] = frozenset()

Latest = tuple[int, ...]
"""For each stream the number of a member of its chain, -1 for none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Nodes to run: what each is, how many it waits for, which wait for it, and in which order free ones go.

    `positions` are those of the nodes in the file, `communication` the columns of a record they have there
    (-1 for others). `streams` has the number of the slot that each takes, of which there are `slots`.
    `unchained` has the positions of the first two nodes of one slot that no dependency orders.
    """

    positions: Sequence[int]
    kinds: Sequence[int]
    waits: Sequence[int]
    children: Sequence[Sequence[int]]
    priorities: Sequence[int]
    communication: Sequence[int]
    unchained: tuple[int, int] | None
    streams: Sequence[int]
    slots: int


def make_plan(structure: Structure, *, one_slot: bool = False) -> Plan:
    """Return the plan of a rank whose nodes can run in the order of the file; with `one_slot` as on one stream."""
    streams = {} if one_slot else structure.streams
    chain = Chain(streams)
    unchained = chain.follow(structure)
    if unchained is None and not chain.wide:
        return build(structure, chain.kept, chain.parents, None, streams)
    count = len(structure.ids)
    parents = [structure.parents_of(at) for at in range(count)]
    return build(structure, range(count), parents, unchained, streams)


def build(
    structure: Structure,
    kept: Sequence[int],
    parents: Sequence[Sequence[int]],
    unchained: tuple[int, int] | None,
    streams: Mapping[int, str],
) -> Plan:
    """Return the plan over some nodes; `parents` are positions among them."""
    children: list[list[int]] = [[] for _ in kept]
    for at, found in enumerate(parents):
        for parent in found:
            children[parent].append(at)
    kinds = np.frombuffer(structure.kinds, np.uint8)
    column = np.where(kinds >= SEND, np.cumsum(kinds >= SEND) - 1, -1)
    priority = np.empty(len(kinds), np.int64)
    priority[np.argsort(structure.ids, kind="stable")] = np.arange(len(kinds))
    chosen = np.array(kept, np.int64)
    numbers = number(streams)
    return Plan(
        kept,
        kinds[chosen].tolist(),
        [len(found) for found in parents],
        children,
        priority[chosen].tolist(),
        column[chosen].tolist(),
        unchained,
        [numbers[streams.get(at, "")] for at in kept],
        len(numbers),
    )


def number(streams: Mapping[int, str]) -> dict[str, int]:
    """Return a number for each stream, 0 for what names none."""
    return {name: at for at, name in enumerate(dict.fromkeys(("", *streams.values())))}


class Chain:
    """Follows a program in file order and keeps its communication.

    For each node: `last`, on each stream the number of its latest ancestor (or itself) in the chain, and `front`,
    the receives it needs that these do not need already. `needed` has the first members that need a receive.
    """

    def __init__(self, streams: Mapping[int, str]) -> None:
        self.kept: list[int] = []
        self.parents: list[list[int]] = []
        self.wide = False
        self.streams, self.numbers = streams, number(streams)
        self.members: list[list[int]] = [[] for _ in self.numbers]
        self.needed: dict[int, tuple[int, int]] = {}

    def follow(self, structure: Structure) -> tuple[int, int] | None:
        """Follow all nodes; return the first two of a slot that nothing orders, or None."""
        last: list[Latest] = []
        front: list[frozenset[int]] = []
        starts, parents = structure.starts.tolist(), structure.parents.tolist()
        none: Latest = (-1,) * len(self.numbers)
        merge = max if len(none) == 1 else later
        for at, kind in enumerate(structure.kinds):
            latest, receives = none, NOTHING
            for parent in parents[starts[at] : starts[at + 1]]:
                found = last[parent]
                if found is not latest:
                    latest = found if latest is none else merge(latest, found)
                if front[parent] is not receives:
                    receives = receives | front[parent]
            if len(receives) > 1:
                receives = self.outstanding(receives, latest)
            if kind:
                latest, receives, before = self.keep(at, kind, latest, receives)
                if before is not None:
                    return before, at
            last.append(latest)
            front.append(receives)
        return None

    def outstanding(self, receives: frozenset[int], latest: Latest) -> frozenset[int]:
        """Return the receives that the chains up to `latest` do not need already."""
        if len(receives) > FRONT_LIMIT:
            self.wide = True
            return NOTHING
        return frozenset(receive for receive in receives if not self.known(receive, latest))

    def known(self, receive: int, latest: Latest) -> bool:
        """Return whether the chains up to `latest` need a receive."""
        stream, place = self.needed.get(receive, (0, latest[0] + 1))
        return place <= latest[stream]

    def keep(
        self, at: int, kind: int, latest: Latest, receives: frozenset[int]
    ) -> tuple[Latest, frozenset[int], int | None]:
        """Keep a communication; return its `last`, its `front`, and one before that it does not follow."""
        parents = sorted(receives)
        parents += [chain[place] for chain, place in zip(self.members, latest, strict=True) if place >= 0]
        if kind != RECV:
            stream = self.numbers[self.streams.get(at, "")]
            chain = self.members[stream]
            if latest[stream] != len(chain) - 1:
                return latest, receives, self.kept[chain[-1]]
            for receive in receives:
                self.needed.setdefault(receive, (stream, len(chain)))
            latest = (*latest[:stream], len(chain), *latest[stream + 1 :])
            chain.append(len(self.kept))
        self.kept.append(at)
        self.parents.append(parents)
        return latest, NOTHING if kind != RECV else frozenset((len(self.kept) - 1,)), None


def later(first: Latest, second: Latest) -> Latest:
    """Return the later of two members on each stream, the first where all of its are."""
    found = tuple(map(max, first, second))
    return first if found == first else found
