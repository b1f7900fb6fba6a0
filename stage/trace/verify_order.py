"""Dependencies within a rank: known, backward, acyclic; and the order in which its nodes are meant to run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stage.trace.report import Findings

__all__ = ["Structure", "check_order", "reaches"]

SEARCH_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Structure:
    """Nodes of a rank in the order of its file, and their dependencies on nodes before them.

    Parents of the node at position i are `parents[starts[i]:starts[i + 1]]`, as positions. `kinds` has a byte
    a node, as in `verify_node`. `streams` names the streams of nodes that take the communication slot, by position;
    nodes it leaves out are on the stream "".
    """

    ids: npt.NDArray[np.uint64]
    kinds: bytes
    parents: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    streams: Mapping[int, str] = field(default_factory=dict)

    def parents_of(self, at: int) -> list[int]:
        """Return the positions of the parents of a node."""
        parents: list[int] = self.parents[self.starts[at] : self.starts[at + 1]].tolist()
        return parents

    def order(self) -> npt.NDArray[np.intp] | None:
        """Return positions in the order of their ids if the nodes can run so, or None: the order of the file.

        Free nodes are issued by ascending id; so ids say in which order equal collectives match wherever they
        do not contradict dependencies.
        """
        if bool(np.all(self.ids[1:] > self.ids[:-1])):
            return None
        children = np.repeat(np.arange(len(self.ids)), np.diff(self.starts))
        if bool(np.all(self.ids[self.parents] < self.ids[children])):
            return np.argsort(self.ids, kind="stable")
        return None


def check_order(
    rank: int,
    structure: Structure,
    positions: Mapping[int, int],
    unresolved: Sequence[tuple[int, int]],
    findings: Findings,
) -> bool:
    """Report dependencies on nodes that do not stand before; return whether there are none.

    `unresolved` has the position of a node and the id it depends on, where no node before has that id.
    """
    forward: list[tuple[int, int]] = []
    for at, dep in unresolved:
        parent = positions.get(dep)
        if parent is not None:
            forward.append((at, parent))
            continue
        text = f"depends on node {dep}, which is not in the file, and can never start: remove or write it"
        findings.add(rank, int(structure.ids[at]), "dep-unknown", text)
    cyclic = find_cyclic(structure, forward) if forward else frozenset()
    for at, parent in forward:
        ident, dep = int(structure.ids[at]), int(structure.ids[parent])
        if at in cyclic and parent in cyclic:
            path = describe_cycle(structure, at, parent, cyclic)
            findings.add(
                rank, ident, "dep-cycle", f"waits for itself through {path}: no node of them can start"
            )
        else:
            text = f"depends on node {dep}, which stands behind it in the file: write parents first"
            findings.add(rank, ident, "dep-order", text)
    return not unresolved


def find_cyclic(structure: Structure, forward: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Return the positions of nodes on cycles or between cycles; each cycle has a forward dependency."""
    count = len(structure.ids)
    nodes = range(count)
    parents = [structure.parents_of(at) for at in nodes]
    for at, parent in forward:
        parents[at].append(parent)
    children: list[list[int]] = [[] for _ in nodes]
    for at in nodes:
        for parent in parents[at]:
            children[parent].append(at)
    left = prune(parents, children, set(nodes))
    return frozenset(prune(children, parents, left))


def prune(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], nodes: set[int]) -> set[int]:
    """Return what is left of nodes when those without a source among them are removed, again and again."""
    waiting = {at: sum(source in nodes for source in sources[at]) for at in nodes}
    free = [at for at, count in waiting.items() if not count]
    left = set(nodes)
    while free:
        at = free.pop()
        left.discard(at)
        for target in targets[at]:
            if target in left:
                waiting[target] -= 1
                if not waiting[target]:
                    free.append(target)
    return left


def describe_cycle(structure: Structure, at: int, parent: int, cyclic: frozenset[int]) -> str:
    """Return the way from a parent back to the node as text; the last steps of a long one are left out."""
    came: dict[int, int] = {parent: at}
    queue = [parent]
    for here in queue:
        if here == at or len(queue) > SEARCH_LIMIT:
            break
        for before in structure.parents_of(here):
            if before in cyclic and before not in came:
                came[before] = here
                queue.append(before)
    path = [at]
    while path[-1] != parent and path[-1] in came:
        path.append(came[path[-1]])
    names = [f"node {int(structure.ids[step])}" for step in reversed(path)]
    return ", ".join(names[:6]) + (", .." if len(names) > 6 else "")


def reaches(structure: Structure, at: int, among: Sequence[int], target: int) -> bool:
    """Return whether one of some parents of a node is the target or runs behind it."""
    stack, seen = list(among), set(among)
    while stack and len(seen) < SEARCH_LIMIT:
        here = stack.pop()
        if here == target:
            return True
        for parent in structure.parents_of(here):
            if target <= parent < at and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return False
