"""What a manifest says of the job: its inputs, and what they resolved to."""

from pathlib import Path
from typing import Any

import stage
from stage.pipeline.stages import Unit
from stage.request import Request

__all__ = ["describe"]

PRECISION = ("fp8", "fp8_param_gather", "fp8_dispatch")


def describe(request: Request, stages: list[list[Unit]]) -> dict[str, Any]:
    """The inputs and what they resolved to, for the manifest."""
    strategy = request.strategy
    return {
        "stage": stage.__version__,
        "model": request.model.name,
        "origin": Path(request.origin).name,
        "strategy": strategy.name,
        "sizes": dict(sorted({**request.model.sizes, **request.sizes}.items())),
        "mesh": {**request.degrees, "atoms": [list(atom) for atom in request.mesh.atoms]},
        "batch": request.batch,
        "micro_batch": request.micro_batch,
        "micro_batches": request.micro_batches,
        "seq": request.seq,
        "steps": request.steps,
        "schedule": strategy.schedule,
        "vpp": request.pipeline.chunks,
        "recompute": str(strategy.recompute),
        "zero": strategy.zero,
        "bucket_size": strategy.bucket_size,
        "overlap_grad": strategy.overlap_grad,
        "reshard_after_forward": strategy.reshard_after_forward,
        "prefetch": strategy.prefetch,
        "tp_overlap_chunks": strategy.tp_overlap_chunks,
        "moe_shared_expert_overlap": strategy.moe_shared_expert_overlap,
        "streams": strategy.streams,
        "grad_reduce": request.grad_reduce,
        "dtype": request.dtype,
        "grad_dtype": request.grad_dtype,
        "param_dtype": request.param_dtype,
        "clip": request.clip,
        "attention": request.model.options.attention,
        "mask": request.model.options.mask,
        "dropout": request.model.options.dropout,
        "stage_layers": [sum(unit.layer >= 0 for unit in units) for units in stages],
        "placement": None if request.placement is None else list(request.placement),
        **({} if strategy.context == "all_gather" else {"context": strategy.context}),
        **({} if strategy.context_balance == "zigzag" else {"context_balance": strategy.context_balance}),
        **_loads(request),
        **({key: getattr(strategy, key) for key in PRECISION} if strategy.fp8 != "none" else {}),
    }


def _loads(request: Request) -> dict[str, Any]:
    """What the manifest says of experts and their exchanges where it is not the default."""
    strategy, load = request.strategy, request.expert_load
    exchange = {} if strategy.alltoall == "collective" else {"alltoall": strategy.alltoall}
    if load is None:
        return exchange
    return exchange | {
        "expert_load": strategy.expert_load,
        "expert_popularity": [list(row) for row in load.rows],
        "seed": strategy.seed,
        "capacity_factor": strategy.capacity_factor,
        "pad_to_capacity": strategy.pad_to_capacity,
    }
