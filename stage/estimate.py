"""What a job would take on a system: seconds, memory and where both go, as plain values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage.cost.estimate import Estimate, estimate_job
from stage.cost.plugins import load_cost_model
from stage.cost.pricing import price_job
from stage.cost.spread import job_spread
from stage.cost.system import System
from stage.cost.system_file import load_system
from stage.cost.work import CostModel
from stage.memory import JobMemory, job_memory
from stage.model import Model
from stage.request import Request, resolve_request
from stage.strategy import Strategy
from stage.synthesis import JobPlan, plan_job

__all__ = ["estimate", "estimate_request", "estimate_time"]


def estimate(
    model: str | Path | Model,
    strategy: str | Path | Strategy | None = None,
    *,
    system: str | Path | System,
    cost: str | Path = "roofline",
    **options: Any,
) -> dict[str, Any]:
    """The estimate of a job, whose `options` are those of `stage.synthesize`, on a system by a cost model.

    >>> found = estimate("llama3-8b", system="h100", gpus=8, tp=2, batch=8, seq=4096, sizes={"layers": 2})
    >>> 0 < found["mfu"] < found["hfu"] + 1e-9 < 1, found["fits"]
    (True, True)
    """
    described = system if isinstance(system, System) else load_system(system)
    return estimate_request(resolve_request(model, strategy, **options), described, cost)


def estimate_request(request: Request, system: System, cost: str | Path = "roofline") -> dict[str, Any]:
    """The same of a definite job; seconds are those of one step, bytes those of the rank that holds most."""
    plan = plan_job(request)
    found = estimate_time(plan, system, load_cost_model(cost, system))
    memory = job_memory(plan)
    tokens = request.batch * request.seq / request.mesh.world
    return {
        "model": request.model.name,
        "strategy": request.strategy.name,
        "system": system.name,
        "cost": str(cost),
        "gpus": request.mesh.world,
        "step_seconds": found.step_seconds,
        "tokens_per_second_per_gpu": tokens / found.step_seconds,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "compute_seconds": found.compute_seconds,
        "exposed_communication_seconds": found.exposed_communication_seconds,
        "bubble_seconds": found.bubble_seconds,
        "bubble_fraction": found.bubble_fraction,
        "peak_memory_bytes": memory.peak.bytes,
        "reserved_memory_bytes": memory.reserved,
        "device_memory_bytes": system.memory_bytes,
        "fits": memory.reserved <= system.memory_bytes,
        "communication": _communication(found),
        "memory": _memory(memory),
        "classes": _classes(found, memory, request.steps),
    }


def estimate_time(plan: JobPlan, system: System, model: CostModel) -> Estimate:
    """Where the time of a step goes on a system, as this model prices its work."""
    request, made = plan.request, plan.job()
    prices = price_job(made, model, job_spread(system, made))
    return estimate_job(made, prices, system.peak(request.dtype), request.steps)


def _communication(found: Estimate) -> list[dict[str, object]]:
    """Seconds of each kind of communication, and how many of them nothing hides."""
    return [
        {"kind": kind, "seconds": seconds, "exposed_seconds": found.exposed.get(kind, 0.0)}
        for kind, seconds in found.communication.items()
    ]


def _memory(memory: JobMemory) -> Mapping[str, object]:
    """Where the peak is, and what it is made of."""
    peak = memory.peak
    return {"action": peak.action, "block": peak.block, "node": peak.node, **peak.categories}


def _classes(found: Estimate, memory: JobMemory, steps: int) -> list[dict[str, object]]:
    """The parts of a step of each class of ranks, and its peak memory."""
    return [
        {
            "class": number,
            "compute_seconds": part.compute / steps,
            "exposed_seconds": sum(part.exposed.values()) / steps,
            "bubble_seconds": part.bubble / steps,
            "peak_memory_bytes": held.peak.bytes,
        }
        for number, (part, held) in enumerate(zip(found.classes, memory.ranks, strict=True))
    ]
