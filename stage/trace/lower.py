"""Lower a sharded graph to a template: symbols become exact integers, tensors become dependencies.

Each device's sizes are the global ones divided by the degrees of the axes that shard them, exactly. The costs of an
op are its record's formulas on those local sizes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from stage.errors import LayoutError
from stage.graph import Graph, Node
from stage.ops import Op, get_op
from stage.ops.collective import is_collective
from stage.ops.ring import EXCHANGE
from stage.passes.backward import Differentiated
from stage.passes.precision import ONCE
from stage.passes.products import count_products
from stage.passes.split import split_backward
from stage.precision import FP8
from stage.symbols import exact
from stage.tensor import Tensor, resolve_dtypes
from stage.trace.concrete import Concrete
from stage.trace.exchange import EXCHANGES, Moved
from stage.trace.pairwise import pairwise_nodes, results_of
from stage.trace.peer import Peer
from stage.trace.queries import own_chunk
from stage.trace.routing import holds_tokens
from stage.trace.streams import SINGLE, chain
from stage.trace.template import Ref, Template, TemplateNode

__all__ = ["Concrete", "Lowered", "lower"]


class _Lowering:
    """One graph on its way to a template."""

    def __init__(
        self,
        graph: Graph,
        concrete: Concrete,
        outside: Callable[[str], tuple[Ref, ...]],
        gathered: bool,
        messages: int = 0,
    ) -> None:
        self.graph, self.concrete, self.outside, self.gathered = graph, concrete, outside, gathered
        self.messages = messages
        self.local: dict[str, Tensor] = {}
        self.sources: dict[str, tuple[Ref, ...]] = {}
        self.nodes: list[TemplateNode] = []
        self.nothing: set[str] = set()

    def tensor(self, name: str) -> Tensor:
        if name not in self.local:
            self.local[name] = self.concrete.local(self.graph.tensors[name], self.graph.layouts[name])
        return self.local[name]

    def refs(self, name: str) -> tuple[Ref, ...]:
        """What must have run for a tensor to be there."""
        if name in self.sources:
            return self.sources[name]
        if self.graph.tensors[name].role == "parameter":
            return (Ref("port", "weights"),) if self.gathered else ()
        return self.outside(name)

    def run(self, once: bool = False) -> list[TemplateNode]:
        """The nodes of every micro-batch, or those that a block runs `once` a step."""
        for node in self.graph.nodes:
            if (node.phase == ONCE) != once:
                continue
            if self._idle(node):
                self.nothing.update(node.outputs)
                continue
            given = [name for name in node.inputs if name not in self.nothing]
            deps = tuple(dict.fromkeys(ref for name in given for ref in self.refs(name)))
            # nothing is added to a sum, or merged with a result: that is no work
            made = self._lowered(node, deps) if len(given) == len(node.inputs) else []
            kept = () if made and node.op == EXCHANGE else deps
            self.sources.update(dict.fromkeys(node.outputs, results_of(made, len(self.nodes), kept)))
            self.nodes += made
        return self.nodes

    def _lowered(self, node: Node, deps: tuple[Ref, ...]) -> list[TemplateNode]:
        """The nodes of an op: none for a change of view, and where the experts of this device have no tokens."""
        if is_collective(node.op):
            return self._collective(node, deps)
        if node.op == EXCHANGE:
            return self._exchange(node, deps)
        tensors = [self.tensor(name) for name in (*node.inputs, *node.outputs)]
        runs = get_op(node.op).kernel and all(tensor.elements for tensor in tensors)
        return [self._compute(node, deps)] if runs else []

    def _idle(self, node: Node) -> bool:
        """Whether an op is a step of a ring in which this device meets no key."""
        if "block" not in node.attrs:
            return False
        tensors = ([self.tensor(name) for name in names] for names in (node.inputs, node.outputs))
        return not get_op(node.op).flops(self._attributes(node), *tensors)

    def _compute(self, node: Node, deps: tuple[Ref, ...]) -> TemplateNode:
        op = get_op(node.op)
        ins, outs = [self.tensor(n) for n in node.inputs], [self.tensor(n) for n in node.outputs]
        attrs = self._attributes(node)
        moved = op.bytes(attrs, ins, outs, self.concrete.width)
        credited = 0
        if op.model_flops and node.phase != "recompute":
            credited = op.model_flops(attrs, *map(self._filled, (node.inputs, node.outputs)))
        return TemplateNode(
            name=node.name,
            kind="compute",
            op=node.op,
            bytes=max(1, round(moved)),
            flops=max(1, round(op.flops(attrs, ins, outs))),
            model_flops=round(credited),
            deps=deps,
            dtype=resolve_dtypes(_precision(op, ins, outs), self.concrete.dtypes),
            phase="forward" if node.phase == ONCE else node.phase,
            matmul=op.is_matmul,
            shapes=_shapes(ins, outs),
        )

    def _attributes(self, node: Node) -> dict[str, Any]:
        """The attributes of an op as numbers, and where they matter the queries of the device."""
        concrete = self.concrete
        attrs = {k: exact(v, concrete.sizes) if k == "window" else v for k, v in node.attrs.items()}
        if concrete.consecutive:
            attrs["chunk"] = own_chunk(self.graph, node, concrete.place, concrete.mesh)
        return attrs

    def _filled(self, names: Iterable[str]) -> list[Tensor]:
        """Tensors without the slots that hold no token, by which a model is not credited."""
        routing = self.concrete.routing
        if routing is None or not routing.padded:
            return [self.tensor(name) for name in names]
        graph = self.graph
        return [self.concrete.local(graph.tensors[x], graph.layouts[x], filled=True) for x in names]

    def _collective(self, node: Node, deps: tuple[Ref, ...]) -> list[TemplateNode]:
        """The node of a collective, as large as on the member that holds most; pairwise the messages of it."""
        tensor, place = self.tensor(node.inputs[0]), self.concrete.place
        width, size = self.concrete.scaled_width(self.graph.tensors[tensor.name]), tensor.elements
        moved = self._moved(node)
        if moved is not None and moved.routing is not None:
            size = moved.largest(place, exchange=node.op in EXCHANGES)
        if size != int(size):
            raise LayoutError(
                f"{tensor.name} has {tensor.elements} elements on a device: its tokens do not divide by the ranks that "
                "share them; choose a batch or seq that does"
            )
        found = TemplateNode(
            name=node.name,
            kind=node.op,
            op=node.op,
            bytes=int(size * width),
            axes=node.attrs["step"].axes,
            deps=deps,
            dtype=resolve_dtypes(tensor.dtype, self.concrete.dtypes),
            phase=node.phase,
            shapes=_shapes([tensor], []),
        )
        if moved is None or node.op not in EXCHANGES:
            return [found] if size else []
        exchange = moved.exchange(place).scaled(width)
        if self.concrete.pairwise:
            self.messages += 1
            return pairwise_nodes(replace(found, tag_offset=self.messages - 1), exchange)
        return [replace(found, in_splits=exchange.sent, out_splits=exchange.received)]

    def _moved(self, node: Node) -> Moved | None:
        """How a collective moves its tensor; None where all members hold and send alike, and a collective says so."""
        name, graph, routing = node.inputs[0], self.graph, self.concrete.routing
        tensor, axes = graph.tensors[name], node.attrs["step"].axes
        if not holds_tokens(tensor):
            routing = None
        if routing is None and not (self.concrete.pairwise and node.op in EXCHANGES):
            return None
        before, after = graph.layouts[name], graph.layouts[node.outputs[0]]
        whole, ordered = self.concrete.whole(tensor), node.op == "permute"
        return Moved(whole, axes, before, after, self.concrete.mesh, routing, ordered)

    def _exchange(self, node: Node, deps: tuple[Ref, ...]) -> list[TemplateNode]:
        """A send to the next rank along some axes, and the receive of what the rank before sends."""
        tensors, axes = [self.tensor(name) for name in node.inputs], node.attrs["axes"]
        send = TemplateNode(
            name=f"{node.name}.send",
            kind="send",
            op=node.op,
            bytes=int(sum(t.bytes(self.concrete.width) for t in tensors)),
            axes=axes,
            peer=Peer(axes, 1),
            tag_offset=self.messages,
            deps=deps,
            dtype=resolve_dtypes(tensors[0].dtype, self.concrete.dtypes),
            phase=node.phase,
            shapes=_shapes(tensors, []),
        )
        self.messages += 1
        name, channel = f"{node.name}.recv", f"recv {' '.join(axes)}"
        return [send, replace(send, name=name, kind="recv", peer=Peer(axes, -1), channel=channel, deps=())]


def _precision(op: Op, ins: list[Tensor], outs: list[Tensor]) -> str:
    """What a kernel computes in: its result's dtype, but a product of quantised operands in theirs."""
    return FP8 if op.is_matmul and ins[0].dtype == FP8 else outs[0].dtype


def _shapes(ins: list[Tensor], outs: list[Tensor]) -> str:
    """Shapes of operands and results, as text: `4096x4096,4096x1024->4096x1024`."""
    text = [
        ",".join("x".join(str(dim.size) for dim in t.dims) or "1" for t in group) for group in (ins, outs)
    ]
    return "->".join(part for part in text if part)


@dataclass(frozen=True, slots=True)
class Lowered:
    """The templates of a block; those of the split backward (`input` and `weight`) only where it was asked for.

    `messages` is how many a device sends in a forward and a backward. `once` is what it runs before its first forward
    of a step. `products` are those in 8 bits of a forward, one for each of a device's experts.
    """

    forward: Template
    backward: Template
    messages: int
    input: Template | None = None
    weight: Template | None = None
    once: Template | None = None
    products: int = 0


def lower(
    block: Differentiated,
    concrete: Concrete,
    *,
    gathered: bool = False,
    numbers: tuple[str, ...] = ("micro_batch",),
    split: bool = False,
    streams: str = SINGLE,
) -> Lowered:
    """The templates of a block, whose instances have these `numbers`.

    With `gathered` parameters (FSDP) every node that reads one depends on the port `weights`. The first input of the
    forward graph is the port `x`; the first seed of the backward graph the port `dy`. With `split` there are also the
    two parts of the backward. `streams` says how communication is ordered.
    """
    forward = block.forward
    x = forward.inputs[0]

    def given(name: str) -> tuple[Ref, ...]:
        return (Ref("port", "x"),) if name == x else ()

    ahead = _Lowering(forward, concrete, given, gathered)
    nodes = chain(ahead.run(), streams)
    first = Template(forward.name, "forward", nodes, _single(ahead.refs(forward.outputs[0])), numbers=numbers)
    begun = chain(
        _Lowering(forward, replace(concrete, routing=None), given, gathered).run(once=True), streams
    )
    once = Template(forward.name, "forward", begun, numbers=numbers) if begun else None
    products = count_products(forward, concrete.mesh, concrete.sizes)

    def outside(name: str) -> tuple[Ref, ...]:
        if name in block.seeds:
            return (Ref("port", "dy"),) if name == block.seeds[0] else ()
        return _handed(ahead, "forward", name)

    behind = _Lowering(block.backward, concrete, outside, gathered, ahead.messages)
    backward = _backward(block, behind, numbers, streams)
    if not split:
        return Lowered(first, backward, behind.messages, once=once, products=products)
    parts = split_backward(block)
    early = _Lowering(parts.input, concrete, outside, gathered, ahead.messages)
    inputs = _backward(block, early, numbers, streams, "input")

    def from_both(name: str) -> tuple[Ref, ...]:
        return _handed(early, "input", name) if name in early.sources else outside(name)

    late = _Lowering(parts.weight, concrete, from_both, gathered, early.messages)
    last = _backward(block, late, numbers, streams, "weight")
    return Lowered(first, backward, behind.messages, inputs, last, once, products)


def _backward(
    block: Differentiated, lowering: _Lowering, numbers: tuple[str, ...], streams: str, part: str = ""
) -> Template:
    """The template of a backward graph or of a part of one."""
    nodes = chain(lowering.run(), streams)
    cotangent = block.cotangents[0] if block.cotangents else None
    output = _single(lowering.refs(cotangent)) if cotangent and cotangent in lowering.graph.tensors else None
    return Template(block.forward.name, "backward", nodes, output, numbers, part)


def _handed(earlier: _Lowering, kind: str, name: str) -> tuple[Ref, ...]:
    """What made a tensor, as a later template refers to it."""
    return tuple(Ref(kind, ref.target) if ref.kind == "self" else ref for ref in earlier.refs(name))


def _single(refs: tuple[Ref, ...]) -> Ref | None:
    return refs[-1] if refs else None
