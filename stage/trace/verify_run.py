"""A run of all ranks together under the resource rules of the simulator, to prove that it comes to an end.

Each rank runs one computation at a time, and on each stream one of {collective, send, memory access} at a
time; a receive takes nothing. Free nodes are issued by ascending id. A collective is complete when all members
have issued it. A send is complete at once or, under `rendezvous`, when its receive has been issued. Every node
takes one step of a clock; where streams are chained, the outcome does not depend on times.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from stage.trace.node import CommType
from stage.trace.report import plural
from stage.trace.verify_node import COLL, COMP, RECV, SEND
from stage.trace.verify_plan import Plan
from stage.trace.verify_record import PARTNER, RankRecord

__all__ = ["Blocked", "run_together"]

Key = tuple[int, int, int, int, int]
HOPS = 4


@dataclass(frozen=True, slots=True)
class Blocked:
    """Where a run stopped before its end: a rank, the node it waits in, the rule it breaks, and why."""

    rank: int
    node: int | None
    rule: str
    message: str


@dataclass(slots=True)
class State:
    """One rank in the run; nodes are numbered as in its plan.

    `talking` has the node in each communication slot or -1, `slots` the free nodes of each, `outstanding` are
    receives without their message, `issued` counts collectives by group.
    """

    rank: int
    plan: Plan
    record: RankRecord
    columns: list[tuple[int, ...]]
    waits: list[int]
    left: int
    compute: list[tuple[int, int]] = field(default_factory=list)
    slots: list[list[tuple[int, int]]] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)
    computing: bool = False
    talking: list[int] = field(default_factory=list)
    outstanding: dict[int, None] = field(default_factory=dict)
    issued: dict[int, int] = field(default_factory=dict)

    def free(self, node: int) -> None:
        """Put a node that waits for nothing where it is issued from."""
        kind = self.plan.kinds[node]
        if kind == RECV:
            self.receives.append(node)
        else:
            queue = self.compute if kind == COMP else self.slots[self.plan.streams[node]]
            heappush(queue, (self.plan.priorities[node], node))

    def complete(self, node: int) -> None:
        """End a node, which may free others."""
        kind = self.plan.kinds[node]
        if kind == COMP:
            self.computing = False
        elif kind != RECV:
            self.talking[self.plan.streams[node]] = -1
        self.left -= 1
        for child in self.plan.children[node]:
            self.waits[child] -= 1
            if not self.waits[child]:
                self.free(child)

    def column(self, node: int) -> tuple[int, ...]:
        """Return the column of a communication node."""
        return self.columns[self.plan.communication[node]]

    def ident(self, node: int) -> int:
        """Return the id of a node in its file."""
        return self.record.ident(self.plan.positions[node])

    def describe(self, node: int) -> str:
        """Return what a communication node does as text."""
        kind, comm_type, size, group, peer, tag, *_ = self.column(node)
        if kind == COLL:
            where = f"group {group}" if group else "all ranks"
            return f"{CommType(comm_type).name} of {plural(size, 'byte')} on {where}"
        way = "send to" if kind == SEND else "receive from"
        return f"{way} rank {peer} of {plural(size, 'byte')} with tag {tag}"

    def waits_for(
        self, states: Mapping[int, "State"], members: Mapping[int, Sequence[int]]
    ) -> tuple[int | None, int | None]:
        """Return the node in which a blocked rank waits, and a rank that it waits for."""
        busy = [node for node in self.talking if node >= 0]
        for node in busy:
            if self.plan.kinds[node] == COLL:
                group = self.column(node)[3]
                number = self.issued[group]
                behind = (rank for rank in members[group] if states[rank].issued.get(group, 0) < number)
                return node, next(behind, None)
        waiting = next(iter((*busy, *self.outstanding)), None)
        return waiting, None if waiting is None else self.column(waiting)[PARTNER]


Issued = tuple[State, int]


class Run:
    """All ranks at one step of the clock; `done` are the nodes that are complete at the next."""

    def __init__(self, states: Mapping[int, State], sizes: Mapping[int, int], *, rendezvous: bool) -> None:
        self.states = states
        self.sizes = sizes
        self.rendezvous = rendezvous
        self.done: list[Issued] = []
        self.sent: dict[Key, deque[Issued]] = defaultdict(deque)
        self.awaited: dict[Key, deque[Issued]] = defaultdict(deque)
        self.gathered: dict[tuple[int, int], list[Issued]] = defaultdict(list)
        self.mismatch: tuple[Issued, Issued] | None = None

    def to_end(self) -> None:
        """Run until nothing moves."""
        for state in self.states.values():
            for node, count in enumerate(state.waits):
                if not count:
                    state.free(node)
            self.issue(state)
        while self.done and self.mismatch is None:
            step, self.done = self.done, []
            for state, node in step:
                state.complete(node)
            for state in {state.rank: state for state, _ in step}.values():
                self.issue(state)

    def issue(self, state: State) -> None:
        """Issue the free nodes of a rank for which it has room."""
        for node in state.receives:
            self.receive(state, node)
        state.receives.clear()
        if state.compute and not state.computing:
            state.computing = True
            self.done.append((state, heappop(state.compute)[1]))
        for stream, free in enumerate(state.slots):
            if free and state.talking[stream] < 0:
                node = state.talking[stream] = heappop(free)[1]
                kind = state.plan.kinds[node]
                if kind == COLL:
                    self.gather(state, node)
                elif kind == SEND:
                    self.send(state, node)
                else:
                    self.done.append((state, node))

    def send(self, state: State, node: int) -> None:
        """Issue a send, and complete it and its receive where the rules let it."""
        _, _, size, _, _, tag, partner, channel, _ = state.column(node)
        key = state.rank, partner, channel, tag, size
        receives = self.awaited.get(key)
        if receives:
            other, receive = receives.popleft()
            del other.outstanding[receive]
            self.done += ((other, receive), (state, node))
            return
        if partner in self.states:
            self.sent[key].append((state, node))
        if partner not in self.states or not self.rendezvous:
            self.done.append((state, node))

    def receive(self, state: State, node: int) -> None:
        """Issue a receive, and complete it where its message is there."""
        _, _, size, _, _, tag, partner, channel, _ = state.column(node)
        key = partner, state.rank, channel, tag, size
        sends = self.sent.get(key)
        if sends:
            send = sends.popleft()
            self.done.append((state, node))
            if self.rendezvous:
                self.done.append(send)
        elif partner not in self.states:
            self.done.append((state, node))
        else:
            self.awaited[key].append((state, node))
            state.outstanding[node] = None

    def gather(self, state: State, node: int) -> None:
        """Issue a collective, and complete it on all members with the last of them."""
        _, kind, size, group = state.column(node)[:4]
        number = state.issued.get(group, 0)
        state.issued[group] = number + 1
        arrived = self.gathered[group, number]
        arrived.append((state, node))
        first, other = arrived[0]
        if first.column(other)[1:3] != (kind, size):
            self.mismatch = (first, other), (state, node)
        if len(arrived) == self.sizes[group]:
            self.done += self.gathered.pop((group, number))


def start_states(records: Mapping[int, RankRecord], plans: Mapping[int, Plan]) -> dict[int, State]:
    """Return all ranks before the first step; ranks with equal communication share its columns."""
    shared: dict[int, list[tuple[int, ...]]] = {}
    states = {}
    for rank, record in records.items():
        columns = shared.get(id(record.columns))
        if columns is None:
            columns = shared[id(record.columns)] = list(map(tuple, record.columns.T.tolist()))
        plan = plans[rank]
        state = states[rank] = State(rank, plan, record, columns, list(plan.waits), len(plan.kinds))
        state.slots, state.talking = [[] for _ in range(plan.slots)], [-1] * plan.slots
    return states


def run_together(
    records: Mapping[int, RankRecord],
    plans: Mapping[int, Plan],
    members: Mapping[int, Sequence[int]],
    *,
    rendezvous: bool = False,
) -> Blocked | None:
    """Return where a run of all ranks is blocked, or None if it comes to its end.

    `members` are those of each group that take part. Messages from and to a rank that does not take part are
    complete at once.
    """
    states = start_states(records, plans)
    run = Run(states, {group: len(ranks) for group, ranks in members.items()}, rendezvous=rendezvous)
    run.to_end()
    if run.mismatch is not None:
        (first, other), (state, node) = run.mismatch
        text = (
            f"meets {first.describe(other)} of rank {first.rank} in {state.describe(node)}: chain collectives"
        )
        return Blocked(state.rank, state.ident(node), "collective-order", text)
    blocked = next((state for state in states.values() if state.left), None)
    return None if blocked is None else explain(blocked, states, members)


def explain(blocked: State, states: Mapping[int, State], members: Mapping[int, Sequence[int]]) -> Blocked:
    """Return why a rank is blocked: what it waits for, what that waits for, and so on until it repeats."""
    parts, seen, state = [], set[int](), blocked
    while len(seen) < HOPS:
        seen.add(state.rank)
        node, missing = state.waits_for(states, members)
        if node is None or missing is None:
            parts.append("has nothing it could start")
            break
        where = (
            state.describe(node) if state is blocked else f"node {state.ident(node)} ({state.describe(node)})"
        )
        parts.append(f"waits in {where} for rank {missing}")
        state = states[missing]
        if not state.left:
            parts.append("has finished")
        if missing in seen or not state.left:
            break
    first = blocked.waits_for(states, members)[0]
    return Blocked(
        blocked.rank, None if first is None else blocked.ident(first), "deadlock", ", which ".join(parts)
    )
