"""What is left of a program when only communication matters must run, or block, as the whole program does."""

import random

import numpy as np

from stage.trace.verify_node import COLL, COMP, RECV, SEND
from stage.trace.verify_order import Structure
from stage.trace.verify_plan import Plan, build, make_plan
from stage.trace.verify_record import PEER, ROWS, RankRecord
from stage.trace.verify_run import run_together

Row = tuple[int, int, int, int, int, int]


def record(rank: int, kinds: list[int], parents: list[list[int]], columns: list[Row]) -> RankRecord:
    starts = np.cumsum([0, *map(len, parents)]).astype(np.int32)
    flat = np.array([parent for found in parents for parent in found], np.int32)
    structure = Structure(np.arange(len(kinds), dtype=np.uint64), bytes(kinds), flat, starts)
    rows = [(*row, row[PEER], 0, 0) for row in columns]
    found = np.array(rows, np.int64).reshape(-1, ROWS).T
    return RankRecord(rank, structure, found, comparable=True, runnable=True)


def whole(found: RankRecord) -> Plan:
    count = len(found.structure.ids)
    structure = found.structure
    parents = [structure.parents_of(at) for at in range(count)]
    return build(structure, range(count), parents, None, structure.streams)


def random_rank(rank: int, chance: random.Random, events: list[tuple[int, Row]]) -> RankRecord:
    """One rank: its communications in some order, chained but for receives, with computations in between."""
    kinds: list[int] = []
    parents: list[list[int]] = []
    columns: list[Row] = []
    last = -1
    for kind, row in events:
        for _ in range(chance.randint(0, 2)):
            parents.append(sorted(chance.sample(range(len(kinds)), min(len(kinds), chance.randint(0, 2)))))
            kinds.append(COMP)
        found = set(chance.sample(range(len(kinds)), min(len(kinds), chance.randint(0, 2))))
        if kind != RECV and last >= 0:
            found.add(last)
        if kind != RECV:
            last = len(kinds)
        parents.append(sorted(found))
        kinds.append(kind)
        columns.append(row)
    return record(rank, kinds, parents, columns)


def random_set(chance: random.Random, ranks: int) -> dict[int, RankRecord]:
    """Ranks whose collectives and messages pair up, each in an order that is a little its own."""
    events: list[list[tuple[int, Row]]] = [[] for _ in range(ranks)]
    for tag in range(chance.randint(1, 8)):
        if chance.random() < 0.4:
            for rank in range(ranks):
                events[rank].append((COLL, (COLL, 0, 8, 1 + tag, 0, 0)))
        else:
            src, dst = chance.sample(range(ranks), 2)
            events[src].append((SEND, (SEND, 0, 8, 0, dst, tag)))
            events[dst].append((RECV, (RECV, 0, 8, 0, src, tag)))
    for own in events:
        if len(own) > 1 and chance.random() < 0.5:
            at = chance.randrange(len(own) - 1)
            own[at], own[at + 1] = own[at + 1], own[at]
    return {rank: random_rank(rank, chance, own) for rank, own in enumerate(events)}


def test_plan_of_communication_runs_or_blocks_as_the_whole_program_does() -> None:
    chance = random.Random(5)  # noqa: S311 - seeded test data
    outcomes = {True: 0, False: 0}
    for _ in range(600):
        records = random_set(chance, chance.choice([2, 3]))
        members = {1 + tag: list(records) for tag in range(8)}
        plans = {rank: make_plan(found.structure) for rank, found in records.items()}
        assert all(plan.unchained is None for plan in plans.values())
        assert all(COMP not in plan.kinds for plan in plans.values())
        full = {rank: whole(found) for rank, found in records.items()}
        for rendezvous in (False, True):
            short = run_together(records, plans, members, rendezvous=rendezvous)
            long = run_together(records, full, members, rendezvous=rendezvous)
            assert (short is None) == (long is None)
            outcomes[short is None] += 1
    assert min(outcomes.values()) > 100, "both outcomes are tried"


def test_program_with_very_many_open_receives_is_run_whole() -> None:
    count = 200
    kinds = [RECV] * count + [COMP, SEND]
    parents: list[list[int]] = [[] for _ in range(count)] + [list(range(count)), [count]]
    columns: list[Row] = [(RECV, 0, 8, 0, 1, tag) for tag in range(count)] + [(SEND, 0, 8, 0, 1, count)]
    found = record(0, kinds, parents, columns)
    plan = make_plan(found.structure)
    assert (len(plan.kinds), plan.unchained) == (count + 2, None)
    assert run_together({0: found}, {0: plan}, {}) is None, "the other rank takes no part"


def test_first_two_unordered_communications_are_named() -> None:
    columns: list[Row] = [(COLL, 0, 8, 1, 0, 0)] * 3
    found = record(0, [COLL, COLL, COMP, COLL], [[], [0], [0], [2]], columns)
    assert make_plan(found.structure).unchained == (1, 3)
