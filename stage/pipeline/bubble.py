"""The bubble of a schedule: what ranks wait for each other if every action takes a given time and messages take none.

A forward starts when that of the stage before it is done, a backward (`B` or `I`) when that of the stage after it is,
and `W` when its `I` is. Each rank runs its actions one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stage.pipeline.schedule import Action, Pipeline
from stage.pipeline.schedules import order

__all__ = ["UNIT_COSTS", "Timeline", "run_schedule"]

UNIT_COSTS: Mapping[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""A whole backward is two contractions for each one of the forward."""

Done = dict[tuple[str, int, int], int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank starts its first action, ends its last one, and how long it works between."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    busy: tuple[int, ...]

    @property
    def makespan(self) -> int:
        """From the first action of any rank to the last."""
        return max(self.last) - min(self.first)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks during the makespan."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def window_bubble(self) -> float:
        """The largest idle share of a rank between its own first and last action."""
        return max(1 - b / (z - a) for a, z, b in zip(self.first, self.last, self.busy, strict=True))


def run_schedule(name: str, pipeline: Pipeline, costs: Mapping[str, int] = UNIT_COSTS) -> Timeline:
    """The timeline of a pipeline under a schedule; a deadlock of the schedule is an `AssertionError`.

    >>> from stage.pipeline.schedules import plan_pipeline
    >>> timeline = run_schedule("1f1b", plan_pipeline("1f1b", ranks=4, micro_batches=8))
    >>> timeline.makespan, timeline.bubble == (4 - 1) / (8 + 4 - 1)
    (33, True)
    """
    orders = [order(name, pipeline, rank).actions for rank in range(pipeline.ranks)]
    position, now = [0] * pipeline.ranks, [0] * pipeline.ranks
    first: dict[int, int] = {}
    done: Done = {}
    while any(at < len(actions) for at, actions in zip(position, orders, strict=True)):
        moved = False
        for rank, actions in enumerate(orders):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _ready(pipeline, rank, action, done)
                if ready is None:
                    break
                start = max(now[rank], ready)
                first.setdefault(rank, start)
                now[rank] = start + costs[action.kind]
                done[_key(action.kind, pipeline.stage(rank, action.chunk), action.micro_batch)] = now[rank]
                position[rank] += 1
                moved = True
        assert moved, f"schedule {name} of {pipeline} waits for itself"
    busy = tuple(sum(costs[action.kind] for action in actions) for actions in orders)
    return Timeline(tuple(first[rank] for rank in range(pipeline.ranks)), tuple(now), busy)


def _key(kind: str, stage: int, micro_batch: int) -> tuple[str, int, int]:
    return ("B" if kind == "I" else kind, stage, micro_batch)


def _ready(pipeline: Pipeline, rank: int, action: Action, done: Done) -> int | None:
    """When what an action needs is done; None if that has not been run yet."""
    stage, i = pipeline.stage(rank, action.chunk), action.micro_batch
    needs = []
    if action.kind == "F":
        needs += [("F", stage - 1, i)] if stage else []
    elif action.kind == "W":
        needs += [("B", stage, i)]
    else:
        needs += [("F", stage, i)] + ([("B", stage + 1, i)] if stage + 1 < pipeline.stages else [])
    times = [done.get(need) for need in needs]
    return None if None in times else max((t for t in times if t is not None), default=0)
