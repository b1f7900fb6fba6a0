"""What the streams of a set prove, and what they leave open.

Where each stream of a rank is chained and each group has its collectives on one stream, the order in which members
take part in them depends on no time: a node waits for nodes before it and for the other members alone, so if one run
comes to its end every run does. A simulator that knows one slot for all communication has no such order unless all of
it is one chain.
"""

from collections.abc import Mapping, Sequence

from stage.trace.limits import ONE_AT_A_TIME
from stage.trace.report import Findings
from stage.trace.verify_node import COLL, COMP, RECV
from stage.trace.verify_order import reaches
from stage.trace.verify_plan import Plan, make_plan
from stage.trace.verify_record import GROUP, KIND, RankRecord
from stage.trace.verify_run import run_together

__all__ = ["check_one_slot", "plan_ranks", "warn_unchained"]


def plan_ranks(records: Mapping[int, RankRecord], *, one_slot: bool = False) -> dict[int, Plan]:
    """Return the plan of each rank, one for those of one structure; with `one_slot` as if they had one stream."""
    made: dict[int, Plan] = {}
    plans: dict[int, Plan] = {}
    for rank, record in records.items():
        key = id(record.structure)
        if key not in made:
            made[key] = make_plan(record.structure, one_slot=one_slot)
        plans[rank] = made[key]
    return plans


def warn_unchained(records: Mapping[int, RankRecord], plans: Mapping[int, Plan], findings: Findings) -> None:
    """Warn where dependencies leave the order of communication open, so that one run proves little."""
    for rank, record in records.items():
        pair = plans[rank].unchained or shared_group(record)
        if pair is not None:
            first, second = record.ident(pair[0]), record.ident(pair[1])
            text = (
                f"no dependency orders it and node {first}: with other times the ranks may block each other"
            )
            findings.warn(rank, second, "comm-unchained", text)


def shared_group(record: RankRecord) -> tuple[int, int] | None:
    """Return the positions of the first two collectives of one group on different streams that nothing orders."""
    structure = record.structure
    if not structure.streams:
        return None
    columns, positions = record.in_order()
    chosen = columns[KIND] == COLL
    before: dict[int, int] = {}
    for group, at in zip(columns[GROUP][chosen].tolist(), positions[chosen].tolist(), strict=True):
        last = before.get(group)
        before[group] = at
        if last is None or structure.streams.get(last) == structure.streams.get(at):
            continue
        if not reaches(structure, at, structure.parents_of(at), last):
            return last, at
    return None


def several(record: RankRecord) -> bool:
    """Return whether nodes that take the communication slot are on more than one stream."""
    structure = record.structure
    if not structure.streams:
        return False
    taking = (at for at, kind in enumerate(structure.kinds) if kind not in {COMP, RECV})
    return len({structure.streams.get(at, "") for at in taking}) > 1


def check_one_slot(
    records: Mapping[int, RankRecord], members: Mapping[int, Sequence[int]], findings: Findings
) -> None:
    """Warn where communication is ordered by streams alone, which a simulator with one slot does not know."""
    if not any(several(record) for record in records.values()):
        return
    plans = plan_ranks(records, one_slot=True)
    if all(plan.unchained is None for plan in plans.values()):
        return
    blocked = run_together(records, plans, members)
    if blocked is None:
        findings.warn(None, None, "one-slot", ONE_AT_A_TIME)
    else:
        text = f"{ONE_AT_A_TIME}; where all nodes take equally long it {blocked.message}"
        findings.warn(blocked.rank, blocked.node, "one-slot", text)
