"""What is left of a rank's program when only its communication matters.

If every node that takes the communication slot runs behind the one before it (a chain), then no timing can
change the order of communication; computations then matter only as paths between communications, and are left
out. Else all nodes stay, and a run of them is one of several possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stage.trace.verify_node import RECV, SEND
from stage.trace.verify_order import Structure

__all__ = ["Plan", "make_plan"]

FRONT_LIMIT = 64
NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """Nodes to run: what each is, how many it waits for, which wait for it, and in which order free ones go.

    `positions` are those of the nodes in the file, `communication` the columns of a record they have there
    (-1 for others). `unchained` has the positions of the first two nodes that no dependency orders.
    """

    positions: Sequence[int]
    kinds: Sequence[int]
    waits: Sequence[int]
    children: Sequence[Sequence[int]]
    priorities: Sequence[int]
    communication: Sequence[int]
    unchained: tuple[int, int] | None


def make_plan(structure: Structure) -> Plan:
    """Return the plan of a rank whose nodes can run in the order of the file."""
    chain = Chain()
    unchained = chain.follow(structure)
    if unchained is None and not chain.wide:
        return build(structure, chain.kept, chain.parents, None)
    count = len(structure.ids)
    parents = [structure.parents_of(at) for at in range(count)]
    return build(structure, range(count), parents, unchained)


def build(
    structure: Structure,
    kept: Sequence[int],
    parents: Sequence[Sequence[int]],
    unchained: tuple[int, int] | None,
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
    return Plan(
        kept,
        kinds[chosen].tolist(),
        [len(found) for found in parents],
        children,
        priority[chosen].tolist(),
        column[chosen].tolist(),
        unchained,
    )


class Chain:
    """Follows a program in file order and keeps its communication.

    For each node: `last`, the number of its latest ancestor (or itself) in the chain, and `front`, the
    receives it needs that this one does not need already.
    """

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.parents: list[list[int]] = []
        self.wide = False
        self.members: list[int] = []
        self.needed: dict[int, int] = {}

    def follow(self, structure: Structure) -> tuple[int, int] | None:
        """Follow all nodes; return the first two of the slot that nothing orders, or None."""
        last: list[int] = []
        front: list[frozenset[int]] = []
        starts, parents = structure.starts.tolist(), structure.parents.tolist()
        for at, kind in enumerate(structure.kinds):
            latest, receives = -1, NOTHING
            for parent in parents[starts[at] : starts[at + 1]]:
                latest = max(latest, last[parent])
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

    def outstanding(self, receives: frozenset[int], latest: int) -> frozenset[int]:
        """Return the receives that the chain up to `latest` does not need already."""
        needed, beyond = self.needed, latest + 1
        if len(receives) > FRONT_LIMIT:
            self.wide = True
            return NOTHING
        return frozenset(receive for receive in receives if needed.get(receive, beyond) > latest)

    def keep(
        self, at: int, kind: int, latest: int, receives: frozenset[int]
    ) -> tuple[int, frozenset[int], int | None]:
        """Keep a communication; return its `last`, its `front`, and one before that it does not follow."""
        parents = sorted(receives)
        if latest >= 0:
            parents.append(self.members[latest])
        if kind != RECV:
            if latest != len(self.members) - 1:
                return latest, receives, self.kept[self.members[-1]]
            for receive in receives:
                self.needed.setdefault(receive, len(self.members))
            latest = len(self.members)
            self.members.append(len(self.kept))
        self.kept.append(at)
        self.parents.append(parents)
        return latest, NOTHING if kind != RECV else frozenset((len(self.kept) - 1,)), None
