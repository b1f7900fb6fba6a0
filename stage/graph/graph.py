"""A graph says what is computed: named tensors, and nodes in the order they run.

Invariants
----------
* Every tensor has one producer: a node, the graph's inputs, or itself as a parameter.
* A node's operands are produced before it.
* In a sharded graph every tensor has a layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stage.errors import GraphError
from stage.layout import Layout
from stage.tensor import Tensor

__all__ = ["Graph", "Node"]


@dataclass(frozen=True, slots=True)
class Node:
    """One application of an op. `phase` is `forward`, `backward` or `recompute`."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "forward"


@dataclass(frozen=True, slots=True)
class Graph:
    """A program of one block on one device (unsharded), or of each device (sharded, with `layouts`)."""

    name: str
    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters, in order of first use."""
        return tuple(t for t in self.tensors.values() if t.role == "parameter")

    def operands(self, node: Node) -> list[Tensor]:
        """The tensors a node reads."""
        return [self.tensors[name] for name in node.inputs]

    def results(self, node: Node) -> list[Tensor]:
        """The tensors a node makes."""
        return [self.tensors[name] for name in node.outputs]

    def producers(self) -> dict[str, Node]:
        """The node that makes each tensor; inputs and parameters have none."""
        return {out: node for node in self.nodes for out in node.outputs}

    def consumers(self) -> dict[str, list[Node]]:
        """The nodes that read each tensor, in order."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found.setdefault(name, []).append(node)
        return found

    def with_nodes(self, nodes: tuple[Node, ...], **changes: Any) -> "Graph":
        """The graph with other nodes (and other fields, if given)."""
        return replace(self, nodes=nodes, **changes)

    def defects(self) -> Iterator[str]:
        """What is wrong with the graph, one sentence each; nothing for a well-formed one."""
        known = set(self.inputs) | {t.name for t in self.parameters}
        names: set[str] = set()
        for node in self.nodes:
            if node.name in names:
                yield f"two nodes of {self.name} are called {node.name}"
            names.add(node.name)
            for operand in node.inputs:
                if operand not in known:
                    yield f"{node.name} of {self.name} reads {operand}, which nothing before it makes"
            for out in node.outputs:
                if out in known:
                    yield f"{node.name} of {self.name} makes {out} again"
                known.add(out)
        for out in self.outputs:
            if out not in known:
                yield f"{self.name} returns {out}, which nothing makes"
        if self.layouts:
            for name in sorted(known - set(self.layouts)):
                yield f"{name} of {self.name} has no layout"

    def check(self) -> "Graph":
        """The graph itself if it is well formed, else a `GraphError` with the first defect."""
        for defect in self.defects():
            raise GraphError(f"{defect}; check the order of calls in the model's program")
        return self
