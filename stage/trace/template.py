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
SEND, RECV = "send", "recv"


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
        return self.kind == COMPUTE

    @property
    def takes_comm_slot(self) -> bool:
        """Whether the node is chained on the communication stream; a receive waits for its message alone."""
        return self.kind not in (COMPUTE, RECV)


@dataclass(frozen=True, slots=True)
class Template:
    """The nodes of one block in one phase, in program order.

    `block` and `phase` name it; `output` is what makes the tensor it hands on (its activation, or its cotangent).
    `gradients` maps parameters to the index of the node after which their gradient is complete. `numbers` are those
    an instance is named by: `layer`, `micro_batch`.
    """

    block: str
    phase: str
    nodes: tuple[TemplateNode, ...]
    output: Ref | None = None
    gradients: Mapping[str, int] = field(default_factory=dict)
    numbers: tuple[str, ...] = ("layer", "micro_batch")

    def last(self, stream: str) -> int | None:
        """The index of the last node on the `compute`, `comm` or `recv` stream, or None."""
        on = {
            "compute": lambda node: node.is_compute,
            "comm": lambda node: node.takes_comm_slot,
            "recv": lambda node: node.kind == RECV,
        }[stream]
        return next((i for i in reversed(range(len(self.nodes))) if on(self.nodes[i])), None)

    @property
    def ports(self) -> tuple[str, ...]:
        """Names of the ports that nodes refer to, in order of first use."""
        return tuple(dict.fromkeys(str(r.target) for node in self.nodes for r in node.deps if r.kind == "port"))


def chain(nodes: list[TemplateNode]) -> tuple[TemplateNode, ...]:
    """The nodes with each stream's order added as dependencies: compute, communication and receives."""
    last: dict[str, Ref] = {}
    chained = []
    for i, node in enumerate(nodes):
        stream = "compute" if node.is_compute else "recv" if node.kind == RECV else "comm"
        before = last.get(stream, Ref("port", stream))
        deps = tuple(dict.fromkeys((*node.deps, before)))
        chained.append(replace(node, deps=deps))
        last[stream] = Ref("self", i)
    return tuple(chained)
