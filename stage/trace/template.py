"""Templates: the nodes of one block in one phase with concrete numbers, to be repeated over layers and micro-batches.

A node of a template depends on other nodes of the same instance, on nodes of the forward instance it belongs to (the
same layer and micro-batch), and on **ports**: nodes outside, which each instance connects.

Ports: `x` (what made the block's input), `dy` (what made the cotangent it starts from), `weights` (what gathered its
parameters), `compute` and `comm` (the last node before it on the compute and on the communication stream), `recv`
(the receive before it), and names of their own for data-parallel work.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Ref", "Template", "TemplateNode"]

COMPUTE = "compute"
RECV = "recv"


@dataclass(frozen=True, slots=True)
class Ref:
    """A dependency: `self` or `forward` with a node's index, or `port` with a name."""

    kind: str
    target: int | str


@dataclass(frozen=True, slots=True)
class TemplateNode:
    """One node of a trace, but for its id.

    `kind` is `compute`, a collective (`all_reduce`, ...), `send` or `recv`. Work: `flops` (2 a multiply-add) and
    `bytes` moved to and from memory for compute; `bytes` of the message for communication, over the mesh's `axes`
    (one group of ranks) or to the `peer` stage. `model_flops` is what a FLOP count of the model credits it with.
    """

    name: str
    kind: str
    op: str
    bytes: int
    flops: int = 0
    model_flops: int = 0
    axes: tuple[str, ...] = ()
    peer: int = 0
    deps: tuple[Ref, ...] = ()
    dtype: str = ""
    phase: str = "forward"
    matmul: bool = False
    shapes: str = ""

    @property
    def is_compute(self) -> bool:
        """Whether the node runs on the compute stream."""
        return self.kind == COMPUTE

    @property
    def stream(self) -> str:
        """The stream a node is chained on: `compute`, `comm`, or `recv`, for a receive waits for its message alone."""
        return COMPUTE if self.is_compute else RECV if self.kind == RECV else "comm"


@dataclass(frozen=True, slots=True)
class Template:
    """The nodes of one block in one phase, in program order.

    `block` and `phase` name it; `output` is what makes the tensor it hands on (its activation, or its cotangent).
    `gradients` maps parameters to the index of the node after which their gradient is complete. `numbers` are those
    an instance is named by: `layer`, `micro_batch`, or `bucket`, which then has so many digits.
    """

    block: str
    phase: str
    nodes: tuple[TemplateNode, ...]
    output: Ref | None = None
    gradients: Mapping[str, int] = field(default_factory=dict)
    numbers: tuple[str, ...] = ("layer", "micro_batch")
    digits: int = 0

    def last(self, stream: str) -> int | None:
        """The index of the last node on the `compute`, `comm` or `recv` stream, or None."""
        return next((i for i in reversed(range(len(self.nodes))) if self.nodes[i].stream == stream), None)

    @property
    def ports(self) -> tuple[str, ...]:
        """Names of the ports that nodes refer to, in order of first use."""
        return tuple(
            dict.fromkeys(str(r.target) for node in self.nodes for r in node.deps if r.kind == "port")
        )


def chain(nodes: list[TemplateNode]) -> tuple[TemplateNode, ...]:
    """The nodes with each stream's order added as dependencies: compute, communication and receives."""
    last: dict[str, Ref] = {}
    chained = []
    for i, node in enumerate(nodes):
        before = last.get(node.stream, Ref("port", node.stream))
        deps = tuple(dict.fromkeys((*node.deps, before)))
        chained.append(replace(node, deps=deps))
        last[node.stream] = Ref("self", i)
    return tuple(chained)
