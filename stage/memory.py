"""Peak memory of a job: of each class of ranks, from the lifetimes of tensors over its program.

>>> from stage.request import resolve_request
>>> found = job_memory(resolve_request("llama3-8b", tp=2, pp=2, seq=1024, sizes={"layers": 4}))
>>> len(found.ranks), found.peak.action
(2, '0B0')
"""

from dataclasses import dataclass
from typing import Any

from stage.cost.block_memory import BlockMemory
from stage.cost.memory import Peak, RankMemory, rank_memory
from stage.cost.runtime import Runtime
from stage.request import Request
from stage.synthesis import JobPlan, plan_job

__all__ = ["JobMemory", "job_memory"]

MEGATRON = Runtime()


@dataclass(frozen=True)
class JobMemory:
    """The memory of each class of ranks, by the numbers that classes have in `stage.trace.partition`."""

    ranks: tuple[RankMemory, ...]

    @property
    def peak(self) -> Peak:
        """The peak of the class that holds most."""
        return max((rank.peak for rank in self.ranks), key=lambda peak: peak.bytes)

    @property
    def reserved(self) -> int:
        """The bytes that a device must have for any class to fit."""
        return max(rank.reserved for rank in self.ranks)

    def describe(self) -> dict[str, Any]:
        """The memory of each class as plain values: what `stage estimate` reports."""
        return {
            "peak_memory_bytes": self.peak.bytes,
            "reserved_memory_bytes": self.reserved,
            "classes": [_described(rank) for rank in self.ranks],
        }


def _described(rank: RankMemory) -> dict[str, Any]:
    """A class: its peak and where that is, and the curve of what is held after each action."""
    peak = rank.peak
    return {
        "peak_bytes": peak.bytes,
        "reserved_bytes": rank.reserved,
        "categories": dict(peak.categories),
        "action": peak.action,
        "block": peak.block,
        "layer": peak.layer,
        "node": peak.node,
        "tensors": [{"name": name, "bytes": size} for name, size in peak.tensors],
        "in_flight": [
            {"chunk": chunk, "micro_batch": i, "bytes": size} for (chunk, i), size in peak.in_flight.items()
        ],
        "actions": [str(action) for action in rank.actions],
        "curve": rank.curve(),
    }


def job_memory(job: Request | JobPlan, runtime: Runtime = MEGATRON) -> JobMemory:
    """The memory of a job, planned or as it was asked for."""
    plan = job if isinstance(job, JobPlan) else plan_job(job)
    blocks: dict[tuple[int, int, tuple[int, ...]], BlockMemory] = {}
    sharded = plan.step.sharding.zero == 3
    ranks = []
    for number in range(plan.classes.count):
        place, own = plan.place(number), []
        for unit in (unit for units in plan.units(number) for unit in units):
            kind = plan.kinds[unit.kind]
            row = plan.load_row(unit)
            key = id(kind), row, tuple(place[atom] for atom in kind.variants)
            if key not in blocks:
                blocks[key] = BlockMemory(kind.both, kind.at(place, row), runtime, kind.split, sharded)
            own.append(blocks[key])
        ranks.append(rank_memory(plan.stage(number), plan.step, own, runtime))
    return JobMemory(tuple(ranks))
