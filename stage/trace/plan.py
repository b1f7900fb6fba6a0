"""What a job asks of its stages: how the step is organised, apart from what a block computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stage.mesh import Mesh
from stage.pipeline.schedule import Pipeline
from stage.trace.buckets import Bucket
from stage.trace.lower import Lowered
from stage.trace.parameters import Parameter, Sharding
from stage.trace.streams import chain, stream_of
from stage.trace.template import COMMUNICATION, Ref, TemplateNode

__all__ = ["StagePlan", "StepPlan", "UnitPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The organisation of a step.

    `message` is the bytes of an activation between stages. `per_micro_batch` reduces gradients after every backward,
    not once. `overlap` starts a bucket's reduction when it is complete, not at the end. `tied_elements` are those of
    the token table whose gradient first and last stage sum, because both use it and stand on different ranks.
    `experts` says whether any stage has some. Under FSDP parameters are gathered while `prefetch` blocks before run, or
    with 0 once the block before is done. `reshard` are the axes over which gathered parameters are sharded again
    between forward and backward; None are all that they were gathered over. With `delayed_scaling` the scales of
    8-bit tensors come from largest values that are reduced after every forward and backward. `data` are the
    sets of axes over which gradients are reduced, `streams` how communication is ordered (`stage.trace.streams`).
    """

    pipeline: Pipeline
    schedule: str
    steps: int
    message: int
    dtype: str
    grad_dtype: str
    param_dtype: str
    per_micro_batch: bool
    overlap: bool
    clip: bool
    tied_elements: int
    experts: bool
    sharding: Sharding
    prefetch: int
    reshard: tuple[str, ...] | None
    data: tuple[tuple[str, ...], ...]
    streams: str
    delayed_scaling: bool
    mesh: Mesh
    widths: Mapping[str, int]

    @property
    def reductions(self) -> tuple[str, ...]:
        """The streams on which gradients are reduced."""
        parts = (part for data in self.data for part in self.sharding.split(data) if part)
        return tuple(dict.fromkeys(stream_of(part, self.streams) for part in parts)) or (COMMUNICATION,)

    def chain(self, nodes: Sequence[TemplateNode]) -> tuple[TemplateNode, ...]:
        """The nodes with the order of each stream added as dependencies."""
        return chain(nodes, self.streams)

    def collective(
        self,
        name: str,
        kind: str,
        elements: int,
        axes: tuple[str, ...],
        deps: tuple[Ref, ...],
        phase: str,
        dtype: str = "gradient",
    ) -> TemplateNode:
        """A collective of `elements` gradients (or parameters, with another dtype) a device."""
        size, names = (
            elements * self.widths[dtype],
            {"gradient": self.grad_dtype, "parameter": self.param_dtype},
        )
        return TemplateNode(
            name, kind, kind, size, axes=axes, deps=deps, dtype=names.get(dtype, dtype), phase=phase
        )


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A block on a rank: its templates, its parameters, and its layer (-1 for embedding and head).

    `parameters` are those the block owns, `reads` also one that it shares with a block before it on the rank. A
    `head` is not gathered again for its backward, which follows its forward at once.
    """

    kind: str
    layer: int
    templates: Lowered
    parameters: tuple[Parameter, ...]
    reads: tuple[Parameter, ...]
    head: bool = False


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What the ranks of a pipeline rank hold: the blocks of all chunks, and gradient buckets.

    A chunk is a range of `units`.
    """

    rank: int
    units: tuple[UnitPlan, ...]
    chunks: tuple[range, ...]
    buckets: tuple[Bucket, ...]
