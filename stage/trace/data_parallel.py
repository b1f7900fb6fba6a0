"""Data-parallel work of a rank, placed into its program as it goes.

ZeRO 0 all-reduces each bucket of gradients; ZeRO 1 and 2 reduce-scatter it, update the shard and gather the parameters
after the step (Rajbhandari et al. 2020; Megatron-LM's distributed optimizer). ZeRO 3 is FSDP: each block gathers its
parameters before its forward and again before its backward, so many blocks ahead of the compute as are prefetched, and
reduce-scatters its gradients. What the nodes are is said by `fsdp`, `reduction` and `optimizer`; here is when they run.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from stage.pipeline.schedule import Action
from stage.precision import FP8
from stage.trace.buckets import Bucket
from stage.trace.fsdp import gather_template, scatter_template
from stage.trace.optimizer import adam_template, gather_bucket_template, update_template
from stage.trace.plan import StagePlan, StepPlan
from stage.trace.program import NO_EARLIER, Assembly
from stage.trace.reduction import bucket_key, reduction_template
from stage.trace.scaling import rounding_template
from stage.trace.template import COMPUTE, Template

__all__ = ["DataParallel"]

Make = Callable[[int, Bucket, StepPlan], Template]


@dataclass(slots=True)
class DataParallel:
    """What one rank does for data parallelism; blocks are named by their position on the rank.

    `first` says whether an action is one of a step's first micro-batch, which reads what the step before left.
    """

    plan: StagePlan
    step: StepPlan
    assembly: Assembly
    templates: dict[tuple[object, ...], Template] = field(default_factory=dict)
    whole: dict[int, int] = field(default_factory=dict)
    updated: int = -1
    first: bool = False
    _completed: Counter[int] = field(default_factory=Counter)
    _last: bool = False
    _fsdp: bool = field(init=False)
    _due: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fsdp = self.step.sharding.zero == 3
        buckets = enumerate(self.plan.buckets)
        for i, bucket in sorted(
            buckets, key=lambda item: not item[1].expert
        ):  # experts stand behind attention
            self._due.setdefault(bucket.unit, []).append(i)

    def begin(self, action: Action) -> Hashable:
        """Turn to an action; where what this returns is equal, actions of a kind and chunk place the same."""
        completes = action.kind in ("B", "W")
        self._completed[action.chunk] += completes
        self.first = action.micro_batch == 0 and not self._fsdp
        self._last = completes and self._completed[action.chunk] == self.step.pipeline.micro_batches
        return self.first, self._last, frozenset(self.whole)

    def gather(self, unit: int, micro_batch: int, phase: str, free: int) -> int:
        """The node after which a block's parameters are whole; -1 where they always are, or the chunk has no such one.

        They are gathered once the node `free` has run, and not again while they are whole: the head's backward follows
        its forward at once, and without resharding after forward they stay whole until the end of their backward.
        Parameters that ZeRO 1 and 2 gathered at the end of a step are waited for by the first forward of the next.
        """
        if unit not in self.plan.chunks[self.assembly.chunk]:
            return -1
        if not self._fsdp:
            return self.updated if phase == "forward" and self.first else -1
        if unit in self.whole:
            return self.whole[unit]
        plan = self.plan.units[unit]
        key = ("gather", plan.kind, phase)
        if key not in self.templates:
            self.templates[key] = gather_template(plan, self.step, phase)
        template = self.templates[key]
        if not template.nodes:
            return -1
        first = self.assembly.place(template, plan.layer, micro_batch, free=free)
        last = first + len(template.nodes) - 1
        if plan.head or self.step.reshard == ():
            self.whole[unit] = last
        return last

    def release(self, unit: int) -> None:
        """Give up a block's gathered parameters; its backward has used them."""
        self.whole.pop(unit, None)

    def complete(self, unit: int, micro_batch: int) -> None:
        """Reduce the gradients that a block has completed: those of all micro-batches after its last one."""
        if not (self._last or self.step.per_micro_batch):
            return
        if self._fsdp:
            self._scatter(unit, micro_batch)
        elif self._early:
            for i in self._due.get(unit, ()):
                self._reduce(i, "backward", micro_batch)

    @property
    def _early(self) -> bool:
        """Whether gradients are reduced as soon as they are complete, not at the end of a step."""
        return self.step.overlap or self.step.per_micro_batch

    def _scatter(self, unit: int, micro_batch: int) -> None:
        plan = self.plan.units[unit]
        key = ("scatter", plan.kind)
        if key not in self.templates:
            self.templates[key] = scatter_template(plan, self.step)
        if self.templates[key].nodes:
            ready = self.assembly.last(COMPUTE)
            self.assembly.place(self.templates[key], plan.layer, micro_batch, grad=ready)

    def _reduce(self, index: int, phase: str, micro_batch: int = -1) -> None:
        def make(index: int, bucket: Bucket, step: StepPlan) -> Template:
            return reduction_template(index, bucket, step, phase)

        ready = self.assembly.last(COMPUTE)
        self._place(index, self.plan.buckets[index], make, phase, micro_batch, grad=ready)

    def finish(self) -> None:
        """Everything after the last backward of a step."""
        self._completed.clear()
        if not (self._fsdp or self._early):
            for i in range(len(self.plan.buckets)):
                self._reduce(i, "finalize")
        ready = {f"reduced.{stream}": self.assembly.last(stream) for stream in self.step.reductions}
        ready["grad"] = self.assembly.last(COMPUTE)
        key = ("update",)
        if key not in self.templates:
            self.templates[key] = update_template(self.plan, self.step)
        template, last = self.templates[key], -1
        if template.nodes:
            last = self.assembly.place(template, -1, -1, NO_EARLIER, **ready) + len(template.nodes) - 1
        adams = [] if self._fsdp else self._update(ready=last, **ready)
        self._gather_updated(adams, self._rounded())

    def _update(self, **ready: int) -> list[int]:
        """Update each bucket; the nodes that do."""
        return [
            self._place(i, bucket, adam_template, "adam", **ready)
            for i, bucket in enumerate(self.plan.buckets)
        ]

    def _rounded(self) -> int:
        """Write weights that are stored in 8 bits; the last node before they can be gathered."""
        key = ("rounding",)
        if key not in self.templates:
            self.templates[key] = rounding_template(self.plan, self.step)
        if self.templates[key].nodes:
            self.assembly.place(self.templates[key], adam=self.assembly.last(COMPUTE))
        return self.assembly.last(COMPUTE)

    def _gather_updated(self, adams: list[int], rounded: int) -> None:
        """Gather the buckets that are sharded, one after another."""
        self.updated = -1
        for i, bucket in enumerate(self.plan.buckets if adams else ()):
            if bucket.shard and self.step.sharding.zero:
                ports = {"adam": rounded if bucket.dtype == FP8 else adams[i], "before": self.updated}
                self.updated = self._place(i, bucket, gather_bucket_template, "gather", **ports)

    def _place(
        self, index: int, bucket: Bucket, make: Make, what: str, micro_batch: int = -1, **ports: int
    ) -> int:
        key = bucket_key(index, bucket, what)
        if key not in self.templates:
            self.templates[key] = make(index, bucket, self.step)
        template = self.templates[key]
        if not template.nodes:
            return -1
        return self.assembly.place(template, -1, micro_batch, NO_EARLIER, bucket=index, **ports)
