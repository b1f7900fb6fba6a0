"""Templates: the nodes of one block in one phase with concrete numbers, to be repeated over layers and micro-batches.

A node of a template depends on other nodes of the same instance, on nodes of the **earlier** instances it belongs to
(the forward of the same layer and micro-batch, and for weight gradients its input gradient), and on **ports**: nodes
outside, which each instance connects.

Ports: `x` (what made the block's input), `dy` (what made the cotangent it starts from), `weights` (what gathered its
parameters), names of their own for data-parallel work, and **queues**, whose port is the last node before it on them
(`stage.trace.streams`).
"""

from dataclasses import dataclass

from stage.errors import TraceError
from stage.trace.peer import Peer

__all__ = ["COMMUNICATION", "COMPUTE", "EARLIER", "Ref", "Template", "TemplateNode"]

EARLIER = ("forward", "input")
"""The instances of the same block and micro-batch that a template may refer to."""

COMPUTE, COMMUNICATION = "compute", "comm"


@dataclass(frozen=True, slots=True)
class Ref:
    """A dependency: `self`, or one of `EARLIER`, with a node's index, or `port` with a name."""

    kind: str
    target: int | str


@dataclass(frozen=True, slots=True)
class TemplateNode:
    """One node of a trace, but for its id.

    `kind` is `compute`, a collective (`all_reduce`, ...), `send` or `recv`. Work: `flops` (2 a multiply-add) and
    `bytes` moved to and from memory for compute; `bytes` of the message for communication, over the mesh's `axes`
    (one group of ranks) or with the `peer` (along `axes` if it is part of a block). `model_flops` is what a FLOP count
    of the model credits it with. A message's tag is that of its instance and `tag_offset` more.
    `in_splits` and `out_splits` are the bytes that an uneven all-to-all sends to and receives from each member of its
    group, in group order. `stream` is the communication stream, where there are several.
    """

    name: str
    kind: str
    op: str
    bytes: int
    flops: int = 0
    model_flops: int = 0
    axes: tuple[str, ...] = ()
    peer: Peer | None = None
    tag_offset: int = 0
    channel: str = ""
    stream: str = ""
    deps: tuple[Ref, ...] = ()
    dtype: str = ""
    phase: str = "forward"
    matmul: bool = False
    shapes: str = ""
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("num_ops", self.flops), ("bytes", self.bytes)):
            if value >> 63:
                raise TraceError(
                    f"{self.name} has {what} = {value:.3g}, which no trace can hold (64 bits); "
                    "choose smaller sizes, a shorter seq or a smaller micro_batch"
                )

    @property
    def is_compute(self) -> bool:
        """Whether the node runs on the compute stream."""
        return self.kind == COMPUTE

    @property
    def queue(self) -> str:
        """What a node is chained on; a receive waits for those before it of its own `channel` alone."""
        return self.channel or self.stream or (COMPUTE if self.is_compute else COMMUNICATION)


@dataclass(frozen=True, slots=True)
class Template:
    """The nodes of one block in one phase, in program order.

    `block` and `phase` name it; `output` is what makes the tensor it hands on (its activation, or its cotangent).
    `numbers` are those an instance is named by (`layer`, `micro_batch`, or `bucket`, which then has so many `digits`)
    or marked with (`chunk`, `pipeline_phase`). `part` says which part of a split backward it is: `input` or `weight`.
    """

    block: str
    phase: str
    nodes: tuple[TemplateNode, ...]
    output: Ref | None = None
    numbers: tuple[str, ...] = ("layer", "micro_batch")
    part: str = ""
    digits: int = 0

    def lasts(self) -> dict[str, int]:
        """The index of the last node on each of its queues."""
        return {node.queue: i for i, node in enumerate(self.nodes)}

    @property
    def ports(self) -> tuple[str, ...]:
        """Names of the ports that nodes refer to, in order of first use."""
        return tuple(
            dict.fromkeys(str(r.target) for node in self.nodes for r in node.deps if r.kind == "port")
        )
