"""What one block of a model holds in memory of one device: between its runs, and while it runs.

From its forward until its backward a block keeps what backward reads (`Differentiated.saved`), its own input with it;
its output is the next one's input and counts there. Where backward is split, its first part leaves behind what the
second reads. A gradient added to another one is added in place, as autograd's buffers are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from stage.cost.lifetimes import ACTIVATION, TEMPORARY, Lifetimes, Span, roots, spans
from stage.cost.runtime import Runtime
from stage.graph import Graph, Node
from stage.ops import get_op
from stage.passes.backward import Differentiated
from stage.passes.precision import ONCE
from stage.passes.split import SplitBackward, split_backward
from stage.tensor import Tensor
from stage.trace.concrete import Concrete

__all__ = ["BlockMemory"]

FP32 = 4


@dataclass(frozen=True)
class BlockMemory:
    """The memory of a block on the devices that a `concrete` describes.

    Where backward is `split` there are runs of its parts. With `sharded` parameters (FSDP) gradients of parameters are
    not its own to count.
    """

    both: Differentiated
    concrete: Concrete
    runtime: Runtime
    split: bool = False
    sharded: bool = False

    @cached_property
    def kept(self) -> dict[str, int]:
        """Bytes of the tensors that are kept from forward to backward, by name."""
        return {name: self._size(name) for name in self._saved}

    @cached_property
    def handed(self) -> dict[str, int]:
        """Bytes of the tensors that the first part of a split backward leaves to the second, by name."""
        return {name: self._size(name) for name in self._handed}

    def ends(self, kind: str) -> tuple[frozenset[str], frozenset[str]]:
        """The tensors that a run is given by the block next to it, and those that it hands to the other one."""
        cotangents = frozenset(self._root.get(c, c) for c in self.both.cotangents[:1] if c is not None)
        inputs = frozenset(self.both.forward.inputs[:1])
        return (inputs, frozenset(self._outputs)) if kind == "F" else (frozenset(self.both.seeds), cotangents)

    @cached_property
    def weights(self) -> int:
        """Bytes of copies of weights that are made once a step and last for all of it."""
        return sum(self._size(name) for name in self._static if self._tensor(name).role == "weight")

    @cached_property
    def runs(self) -> dict[str, Lifetimes]:
        """The lifetimes in each kind of action; where backward is split, of its parts too."""
        backward = self.both.backward
        given = dict.fromkeys(self._saved, ACTIVATION) | dict.fromkeys(self.both.seeds, TEMPORARY)
        cotangent = dict.fromkeys(self.ends("B")[1], TEMPORARY)
        found = {"F": self._forward(), "B": self._lifetimes(backward, given, cotangent)}
        if self.split:
            late = dict.fromkeys(self._handed, ACTIVATION)
            found["I"] = self._lifetimes(self._parts.input, given, late | cotangent)
            found["W"] = self._lifetimes(self._parts.weight, late, {})
        return found

    def _forward(self) -> Lifetimes:
        graph = self.both.forward
        nodes = [node for node in graph.nodes if node.phase != ONCE]
        kept = dict.fromkeys((*self._saved, *self._outputs), ACTIVATION)
        entry = graph.inputs[0]
        found = spans(nodes, self._root, {entry: ACTIVATION}, kept, self._counted)
        copied = [
            Span(
                f"{span.tensor} before its copy to fp32",
                span.first,
                len(nodes) - 1,
                self._width(span),
                TEMPORARY,
            )
            for span in found
            if span.tensor in self._copied
        ]
        return Lifetimes(tuple(node.name for node in nodes), (*found, *copied))

    def _lifetimes(self, graph: Graph, given: Mapping[str, int], kept: Mapping[str, int]) -> Lifetimes:
        found = spans(graph.nodes, self._root, given, kept, self._counted) if graph.nodes else []
        found += [extra for at, node in enumerate(graph.nodes) for extra in self._extras(node, at)]
        return Lifetimes(tuple(node.name for node in graph.nodes), tuple(found))

    def _extras(self, node: Node, at: int) -> list[Span]:
        """What a node needs while it runs: gradients before they are added to their buffers, and workspaces."""
        found = []
        added = self.runtime.fused_accumulation and get_op(node.op).is_matmul
        for out in node.outputs if not self.sharded else ():
            gradient = self._tensors[out]
            if gradient.role == "gradient" and (gradient.shared or not added):
                size = self._bytes(gradient, lambda _: self.concrete.width("compute"))
                found.append(Span(out, at, at, size, TEMPORARY))
        if node.op == "attention_backward":
            query, rows = self._tensors[node.inputs[1]], self._tensors[node.inputs[-1]]
            size = self._bytes(query, lambda _: FP32) + self._bytes(rows, lambda _: FP32)
            found.append(Span(f"workspace of {node.name}", at, at, size, TEMPORARY))
        return found

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        return self.both.backward.tensors

    @cached_property
    def _parts(self) -> SplitBackward:
        return split_backward(self.both)

    @cached_property
    def _root(self) -> dict[str, str]:
        """For each tensor of both graphs the one in whose memory it lives."""
        forward, backward = self.both.forward, self.both.backward
        found = roots(backward.nodes, roots(forward.nodes))
        last: dict[str, int] = {}
        for at, node in enumerate(backward.nodes):
            last.update({found.get(name, name): at for name in node.inputs})
        late = {found.get(name, name) for name in self._parts.weight.inputs} if self.split else set()
        for at, node in enumerate(backward.nodes):
            into = self._overwritten(node)
            own = found.get(into, into) if into is not None else None
            if own is None or own in late or last.get(own, at) > at:
                continue
            last[own] = last.get(node.outputs[0], at)
            found |= {name: own for name, memory in found.items() if memory == node.outputs[0]}
        return found

    def _overwritten(self, node: Node) -> str | None:
        """The operand in whose memory a node of backward may leave its result."""
        if node.phase != "backward":
            return None
        if node.op == "add":
            return node.inputs[0] if node.inputs[0] not in self.both.saved else None
        if node.op == "target_backward" and len(node.inputs) > 2:
            return node.inputs[-1]
        if node.op == "softmax_backward" and self.runtime.fused_loss:
            return node.inputs[1]
        return None

    @cached_property
    def _static(self) -> frozenset[str]:
        """What is made once a step, and lasts for all of it."""
        once = (node for node in self.both.forward.nodes if node.phase == ONCE)
        return frozenset(out for node in once for out in node.outputs)

    @cached_property
    def _outputs(self) -> tuple[str, ...]:
        return tuple(self._root.get(out, out) for out in self.both.forward.outputs)

    @cached_property
    def _saved(self) -> tuple[str, ...]:
        """The memory that is kept for backward, once for all that live in it, and without what others count."""
        own = dict.fromkeys(self._root.get(name, name) for name in self.both.saved)
        return tuple(name for name in own if self._counted(name) is not None and name not in self._outputs)

    @cached_property
    def _handed(self) -> tuple[str, ...]:
        weight = self._parts.weight
        own = dict.fromkeys(self._root.get(name, name) for name in weight.inputs)
        return tuple(name for name in own if self._counted(name) is not None)

    def _counted(self, name: str) -> int | None:
        """The bytes of a tensor; None of parameters and their gradients, and of copies that last for a step."""
        static = name in self._static or self._tensor(name).role in ("parameter", "gradient")
        return None if static else self._size(name)

    @cached_property
    def _copied(self) -> frozenset[str]:
        """Logits that cross entropy copies to fp32, and keeps so."""
        if self.runtime.fused_loss:
            return frozenset()
        losses = (node.inputs[0] for node in self.both.forward.nodes if node.op == "sum_exp")
        names = (self._root.get(name, name) for name in losses)
        return frozenset(name for name in names if self.concrete.width(self._tensors[name].dtype) < FP32)

    def _size(self, name: str) -> int:
        width: Callable[[str], int] = (lambda _: FP32) if name in self._copied else self.concrete.width
        return self._bytes(self._tensor(name), width)

    def _width(self, span: Span) -> int:
        return self._bytes(self._tensor(span.tensor), self.concrete.width)

    def _tensor(self, name: str) -> Tensor:
        return self._tensors[name] if name in self._tensors else self.both.forward.tensors[name]

    def _bytes(self, tensor: Tensor, width: Callable[[str], int]) -> int:
        layouts = self.both.backward.layouts
        layout = layouts[tensor.name] if tensor.name in layouts else self.both.forward.layouts[tensor.name]
        size: int = ceil(self.concrete.local(tensor, layout).bytes(width))
        return size
