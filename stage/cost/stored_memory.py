"""Parameters, gradients and optimizer states of a rank, as they are stored all through a step.

Bytes of a parameter (Rajbhandari et al. 2020, ZeRO, section 3; Megatron-LM's distributed optimizer): the dtype it is
used in, its gradient, and of Adam in fp32 two moments and, where it is not itself fp32, the master it is updated from.
ZeRO 1 shards Adam's, ZeRO 2 gradients too where they are scattered after every micro-batch, ZeRO 3 all: under FSDP the
shard of a parameter is its master, and what runs is a gathered copy of it.
"""

from dataclasses import dataclass

from stage.trace.fsdp import padded, parameter_groups
from stage.trace.plan import StagePlan, StepPlan

__all__ = ["Stored", "stored_memory"]

FP32 = 4
MOMENTS = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of one device, with the padding of buckets and shards."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer


def stored_memory(plan: StagePlan, step: StepPlan) -> Stored:
    """What the ranks of a stage store."""
    gradient = step.widths["gradient"]
    if step.sharding.zero == 3:
        shard = sum(
            padded(p, step, axes)
            for unit in plan.units
            for _, axes, _, group in parameter_groups(unit.parameters, step)
            for p in group
        )
        return Stored(FP32 * shard, gradient * shard, MOMENTS * FP32 * shard)
    scattered = step.sharding.zero == 2 and step.per_micro_batch
    parameters = gradients = optimizer = 0
    for bucket in plan.buckets:
        owned, width = bucket.owned(step.mesh), step.widths[bucket.dtype]
        parameters += bucket.elements * width
        gradients += (owned if scattered else bucket.elements) * gradient
        optimizer += owned * FP32 * (MOMENTS + (width < FP32))
    return Stored(parameters, gradients, optimizer)
