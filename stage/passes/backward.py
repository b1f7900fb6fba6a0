"""Backward, derived: the transpose of every op in reverse order.

Works on sharded and unsharded graphs alike. The layout of a cotangent is the dual of its primal's (replicated <->
pending, shards and invariants alike), and reshards are ops with transposes, so the collectives of the backward pass
need no rules of their own.

A column-parallel input that was gathered over an axis in `regather` is not kept: backward gathers it again from the
shard that is (Korthikanti et al. 2022, section 4.2.2). Tokens gathered at their experts are kept, as in Megatron-LM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stage.graph import Graph, Node
from stage.layout import Layout
from stage.ops import get_op
from stage.passes.shard import UNORDERED
from stage.tensor import Tensor

__all__ = ["Differentiated", "differentiate"]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A block's forward graph, its backward graph, and what passes between them.

    `saved` are the forward tensors (inputs included) that backward reads. `seeds` are the cotangents backward is
    given, one for each output; `cotangents` those it returns, one for each differentiable input (else None);
    `gradients` maps parameters to the tensor that holds their gradient.
    """

    forward: Graph
    backward: Graph
    saved: tuple[str, ...]
    seeds: tuple[str, ...]
    cotangents: tuple[str | None, ...]
    gradients: dict[str, str]


class _Tape:
    """The backward graph while it is written; implements `stage.ops.Tape`."""

    def __init__(self, graph: Graph, atoms: Sequence[str], regather: frozenset[str]) -> None:
        self.graph, self.atoms, self.regather = graph, atoms, regather
        self.producers = graph.producers()
        self.tensors: dict[str, Tensor] = dict(graph.tensors)
        self.layouts: dict[str, Layout] = dict(graph.layouts)
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.cotangents: dict[str, str] = {}
        self.owned: set[str] = set()
        self.again: dict[str, str] = {}
        self.current: Node | None = None

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def cotangent(self, tensor: str) -> str | None:
        return self.cotangents.get(tensor)

    def wants(self, tensor: str) -> bool:
        return self.tensors[tensor].role in ("activation", "parameter")

    def saved(self, tensor: str) -> str:
        producer = self.producers.get(tensor)
        if (
            producer is None
            or producer.op != "all_gather"
            or self.tensors[tensor].dims[producer.attrs["step"].src].name in UNORDERED
            or not set(producer.attrs["step"].axes) <= self.regather
        ):
            return tensor
        if tensor not in self.again:
            source = self.saved(producer.inputs[0])
            name = f"{tensor}.again"
            self.tensors[name] = self.tensors[tensor].named(name)
            self.layouts[name] = self.layouts[tensor]
            self._node("all_gather", f"{producer.name}.again", (source,), (name,), dict(producer.attrs))
            self.again[tensor] = name
        return self.again[tensor]

    def alias(self, wrt: str, cotangent: str) -> None:
        existing = self.cotangents.get(wrt)
        if existing is None:
            self.cotangents[wrt] = cotangent
        else:
            self._add(wrt, existing, cotangent)

    def emit(
        self, op: str, inputs: Sequence[str], wrt: Sequence[str], suffix: str = "backward", **attrs: Any
    ) -> None:
        assert self.current is not None
        operands, existing = list(inputs), {x: self.cotangents[x] for x in wrt if x in self.cotangents}
        adds_in = get_op(op).accumulates and len(wrt) == 1
        if adds_in and existing:
            operands.append(existing[wrt[0]])
        fresh = [self.cotangent_like(x) for x in wrt]
        self._node(op, f"{self.current.name}.{suffix}", tuple(operands), tuple(fresh), attrs)
        for x, name in zip(wrt, fresh, strict=True):
            if x in existing and not adds_in:
                self._add(x, existing[x], name)
            else:
                self.cotangents[x] = name

    def cotangent_like(self, primal: str) -> str:
        tensor = self.tensors[primal]
        gradient = tensor.role == "parameter"
        base = f"d.{primal}"
        name, i = base, 1
        while name in self.tensors:
            i += 1
            name = f"{base}.{i}"
        role, dtype = ("gradient", "gradient") if gradient else ("activation", tensor.dtype)
        self.tensors[name] = tensor.named(name, role=role, dtype=dtype)
        if primal in self.layouts:
            self.layouts[name] = self.layouts[primal].dual(self.atoms)
        return name

    def _add(self, wrt: str, existing: str, cotangent: str) -> None:
        name = self.cotangent_like(wrt)
        self._node("add", f"{wrt}.cotangent_sum", (existing, cotangent), (name,), {})
        self.cotangents[wrt] = name

    def _node(
        self, op: str, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], attrs: dict[str, Any]
    ) -> None:
        fresh, i = name, 1
        while fresh in self.names:
            i += 1
            fresh = f"{name}.{i}"
        self.names.add(fresh)
        self.nodes.append(Node(op, fresh, inputs, outputs, attrs, "backward"))


def differentiate(
    graph: Graph, atoms: Sequence[str] = (), regather: frozenset[str] = frozenset()
) -> Differentiated:
    """The graph with its derivative.

    `atoms` are the mesh's, needed for the layouts of a sharded graph; `regather` those over which gathered operands
    are gathered again instead of kept.
    """
    tape = _Tape(graph, atoms, regather)
    seeds = []
    for out in graph.outputs:
        seed = tape.cotangent_like(out)
        tape.cotangents[out] = seed
        seeds.append(seed)
    for node in reversed(graph.nodes):
        transpose = get_op(node.op).transpose
        if transpose is not None and any(out in tape.cotangents for out in node.outputs):
            tape.current = node
            transpose(tape, node)
    made = {out for node in tape.nodes for out in node.outputs} | set(seeds)
    read = dict.fromkeys(name for node in tape.nodes for name in node.inputs if name not in made)
    gradients = {t.name: tape.cotangents[t.name] for t in graph.parameters if t.name in tape.cotangents}
    cotangents = tuple(tape.cotangents.get(name) for name in graph.inputs)
    backward = Graph(
        f"{graph.name}.backward",
        tape.tensors,
        tuple(tape.nodes),
        (*seeds, *(name for name in read if tape.tensors[name].role != "parameter")),
        (*(c for c in cotangents if c is not None), *gradients.values()),
        tape.layouts,
    )
    saved = tuple(name for name in read if tape.tensors[name].role != "parameter")
    return Differentiated(graph, backward, saved, tuple(seeds), cotangents, gradients)
