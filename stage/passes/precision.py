"""Multiply in 8 bits: quantised copies of a block's operands, made where they are smallest, read by its products.

Every covered product reads row copies of input and weight; the gradient of its input reads a row copy of the output's
cotangent and a column copy of the weight, and that of its weight column copies of both (`stage.precision`). A tensor is
quantised before it is gathered, so the gather moves 8 bits and its scales; what is reduced stays as it was. Backward
keeps the column copy of a shard instead of the tensor. Transformer Engine 2.19, `module/linear.py`, does the same:

* a copy with blocks is gathered as it is, the column copy again for the weight's gradient;
* under one scale a tensor only row copies are gathered, and transposed behind the gather; of `tensorwise` the ranks
  that gather reduce the largest value first (one fp32 number);
* weights are quantised in both copies before the first micro-batch of a step and kept, or under FSDP, which keeps no
  whole weights, after every gather; stored in 8 bits they only lack the column copy.

With `dispatch` a token is quantised before it leaves for its expert, forward and backward, and what experts return
stays as it was (DeepSeek-V3 report, 2024, section 3.3.3); its column copy is made of the row copy behind the exchange.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from stage.errors import LayoutError
from stage.graph import Graph, Node
from stage.layout import Layout
from stage.mesh import Mesh
from stage.passes.backward import Differentiated
from stage.passes.origin import Origin, carried, find_origin
from stage.passes.products import WEIGHT, Product, covered, find_products
from stage.precision import COLUMN, FP8, ROW, Recipe
from stage.step import Step
from stage.symbols import exact
from stage.tensor import Tensor

__all__ = ["ONCE", "Precision", "drop_unread", "original", "quantize"]

ONCE = "once"
"""The phase of nodes that a block runs once a step, before its first forward."""

Names = tuple[str, ...]
SUFFIX = {ROW: "fp8", COLUMN: "fp8_t"}


@dataclass(frozen=True, slots=True)
class Precision:
    """How a block is quantised.

    Weights are `cached` from the first micro-batch of a step on, or quantised wherever they are read; `stored` ones are
    parameters in 8 bits already. With `dispatch` tokens are quantised before they leave for their experts.
    """

    recipe: Recipe
    cached: bool = True
    stored: bool = False
    dispatch: bool = False


class _Quantizer:
    """Both graphs of a block while they are rewritten; `nodes` and `phase` are those of the one whose turn it is."""

    def __init__(
        self, block: Differentiated, precision: Precision, mesh: Mesh, sizes: Mapping[str, int]
    ) -> None:
        self.block, self.precision, self.recipe = block, precision, precision.recipe
        self.mesh, self.sizes = mesh, sizes
        self.products = find_products(block.forward)
        self.parameters = {gradient: name for name, gradient in block.gradients.items()}
        self.tensors: dict[str, Tensor] = {**block.forward.tensors, **block.backward.tensors}
        self.layouts: dict[str, Layout] = {**block.forward.layouts, **block.backward.layouts}
        self.producers = block.forward.producers() | block.backward.producers()
        self.copies: dict[tuple[Names, str, str], Names] = {}
        self.nodes: list[Node] = []
        self.phase = ""
        self.bypassed: set[str] = set()

    def run(self) -> Differentiated:
        for name, product in self.products.items() if self.precision.stored else ():
            tensor = self.tensors[name]
            scales = self.recipe.scales(product.matrix(WEIGHT, tensor), ROW, weight=True)
            self.tensors[name] = tensor.named(name, dtype=FP8, scales=scales)
        forward, backward = (self._rewritten(g) for g in (self.block.forward, self.block.backward))
        backward = _alive(backward, self.block.backward.outputs, self.bypassed)
        read = [name for node in backward for name in node.inputs]
        forward = _alive(forward, (*self.block.forward.outputs, *read), self.bypassed)
        return _closed(self.block, forward, backward, self.tensors, self.layouts)

    def _rewritten(self, graph: Graph) -> list[Node]:
        self.nodes, self.phase = [], "forward" if graph is self.block.forward else "backward"
        for node in graph.nodes:
            inputs = list(node.inputs)
            product, operands = covered(node, self.products, self.parameters) or (None, ())
            for role in operands:
                assert product is not None
                span = slice(role.operands.start, role.operands.stop)
                inputs[span] = self._operand(product, role.kind, node.inputs[span], role.copy)
            self.nodes.append(replace(node, inputs=tuple(inputs)))
        return self.nodes

    def _operand(self, product: Product, kind: str, names: Names, copy: str) -> Names:
        """Copies of tensors that are stored side by side; made once, or where weights are not kept once a graph."""
        key = (names, copy, self._reach(kind))
        if key not in self.copies:
            make = self._weight if kind == WEIGHT else self._moved
            self.copies[key] = make(product, kind, names, copy)
        return self.copies[key]

    def _reach(self, kind: str) -> str:
        """The graph whose nodes alone may read a copy, "" for both: whole weights that are not kept are made again."""
        return self.phase if kind == WEIGHT and not self.precision.cached else ""

    def _weight(self, product: Product, kind: str, names: Names, copy: str) -> Names:
        phase = ONCE if self.precision.cached else self.phase
        if not self.precision.stored:
            return self._quantized(product, kind, [Origin(name) for name in names], phase)[copy]
        if copy == COLUMN:
            return self._requantized(product, kind, names, phase)
        if self.precision.cached:
            self._operand(product, kind, names, COLUMN)
        return names

    def _moved(self, product: Product, kind: str, names: Names, copy: str) -> Names:
        origins = [find_origin(name, self.producers, self.precision.dispatch) for name in names]
        for name, origin in zip(names, origins, strict=True):
            self._check(product, kind, origin.source, origin.gathered)
            self._check(product, kind, name, frozenset())
            self.bypassed |= {out for node in origin.chain for out in node.outputs}
        apart = any(o.dispatched or (o.gathered and not self.recipe.block) for o in origins)
        if copy == COLUMN and apart:
            return self._requantized(product, kind, self._operand(product, kind, names, ROW), self.phase)
        whole = self._quantized(product, kind, origins, self.phase)[copy]
        return tuple(self._replayed(o.chain, name, copy) for o, name in zip(origins, whole, strict=True))

    def _quantized(
        self, product: Product, kind: str, origins: Sequence[Origin], phase: str
    ) -> dict[str, Names]:
        """Both copies of the sources, by a kernel that is put in where they are first wanted."""
        sources = tuple(o.source for o in origins)
        keys = {copy: (sources, f"{copy} of source", self._reach(kind)) for copy in (ROW, COLUMN)}
        if keys[ROW] not in self.copies:
            base = f"{product.name}.{kind}"
            amax = self._amax(base, origins, phase)
            made = [(i, copy) for i in range(len(sources)) for copy in (ROW, COLUMN)]
            outs = [self._copy(product, kind, sources[i], copy) for i, copy in made]
            self._emit(
                "quantize", f"{base}.quantize", (*sources, *amax), outs, phase, of=tuple(i for i, _ in made)
            )
            self.copies |= {keys[ROW]: tuple(outs[::2]), keys[COLUMN]: tuple(outs[1::2])}
        return {copy: self.copies[key] for copy, key in keys.items()}

    def _requantized(self, product: Product, kind: str, rows: Names, phase: str) -> Names:
        """Column copies made of row copies."""
        outs = [self._copy(product, kind, name, COLUMN) for name in rows]
        of = tuple(range(len(rows)))
        self._emit("requantize", f"{product.name}.{kind}.requantize", rows, outs, phase, of=of)
        return tuple(outs)

    def _copy(self, product: Product, kind: str, name: str, copy: str) -> str:
        """A copy of a tensor, which lives where it does."""
        tensor, weight = self.tensors[name], kind == WEIGHT
        scales = self.recipe.scales(product.matrix(kind, tensor), copy, weight)
        role = "weight" if weight and self.precision.cached else "activation"
        fresh = self._fresh(f"{original(name)}.{SUFFIX[copy]}")
        return self._new(tensor.named(fresh, dtype=FP8, role=role, scales=scales), self.layouts[name])

    def _amax(self, base: str, origins: Sequence[Origin], phase: str) -> Names:
        """The largest value of tensors under `tensorwise` scales, agreed upon by the ranks that will gather them."""
        if self.recipe.amax != "current":
            return ()
        layouts = [self.layouts[o.source] for o in origins]
        pending = frozenset(atom for layout in layouts for atom in layout.sharding)
        invariant = layouts[0].invariant - pending
        layout = Layout((), pending, invariant, "max" if pending else "sum")
        name = self._new(Tensor(self._fresh(f"{base}.amax"), (), "fp32"), layout)
        self._emit("amax", name, tuple(o.source for o in origins), [name], phase)
        gathered = frozenset(atom for o in origins for atom in o.gathered)
        if not gathered:
            return (name,)
        step = Step(tuple(a for a in self.mesh.names if a in gathered), "P", "R", reduction="max")
        agreed = self._new(Tensor(self._fresh(f"{name}.all_reduce"), (), "fp32"), step.apply(layout))
        self._emit("all_reduce", agreed, (name,), [agreed], phase, step=step)
        return (agreed,)

    def _replayed(self, chain: tuple[Node, ...], name: str, copy: str) -> str:
        """A copy moved as the tensor was that it is of."""
        for node in chain:
            moved, (out,) = list(node.inputs), node.outputs
            moved[carried(node)] = name
            like, scales = self.tensors[out], self.tensors[name].scales
            fresh = self._fresh(f"{out}.{SUFFIX[copy]}")
            name = self._new(like.named(fresh, dtype=FP8, scales=scales), self.layouts[out])
            self._emit(node.op, f"{node.name}.{SUFFIX[copy]}", tuple(moved), [name], self.phase, **node.attrs)
        return name

    def _check(self, product: Product, kind: str, name: str, gathered: frozenset[str]) -> None:
        """A `LayoutError` where a device's part of a tensor is no whole number of blocks."""
        tensor, layout = self.tensors[name], self.layouts[name]
        atoms, matrix = dict(zip(tensor.dim_names, layout.dims, strict=True)), product.matrix(kind, tensor)
        for dims, multiple in ((matrix.rows, self.recipe.rows), (matrix.columns, self.recipe.columns)):
            along = tuple(atom for dim in dims for atom in atoms[dim])
            split = along if dims == matrix.columns else gathered.intersection(along)
            whole = exact(prod(tensor.size(dim) for dim in dims), self.sizes)
            size = Fraction(whole) / self.mesh.degree(along)
            need = max(multiple, self.recipe.block) if split else multiple
            if size % need:
                raise LayoutError(
                    f"{' x '.join(dims)} = {size} on a device, of {name}, does not divide by {need}, which the fp8 "
                    f"recipe {self.recipe.name} needs; choose sizes, seq, micro_batch or degrees so that it does"
                )

    def _fresh(self, name: str) -> str:
        return f"{name}.backward" if name in self.tensors else name

    def _new(self, tensor: Tensor, layout: Layout) -> str:
        assert tensor.name not in self.tensors, f"{tensor.name} is made twice"
        self.tensors[tensor.name], self.layouts[tensor.name] = tensor, layout
        return tensor.name

    def _emit(
        self, op: str, name: str, inputs: Names, outputs: list[str], phase: str, **attrs: object
    ) -> None:
        self.nodes.append(Node(op, name, inputs, tuple(outputs), attrs, phase))


def _alive(nodes: Sequence[Node], wanted: Sequence[str], bypassed: set[str]) -> list[Node]:
    """The nodes without those bypassed ones whose results nobody reads any more."""
    read, kept = set(wanted), []
    for node in reversed(nodes):
        if read.intersection(node.outputs) or not bypassed.issuperset(node.outputs):
            kept.append(node)
            read.update(node.inputs)
    return kept[::-1]


def _closed(
    block: Differentiated, forward: list[Node], backward: list[Node],
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout],
) -> Differentiated:  # fmt: skip
    """The block with other nodes, and with what backward then reads."""
    own = {out for node in backward for out in node.outputs} | set(block.seeds)
    read = dict.fromkeys(name for node in backward for name in node.inputs if name not in own)
    saved = tuple(name for name in read if tensors[name].role != "parameter")
    ahead = {name: tensor for name, tensor in tensors.items() if name not in own}
    known = {name: layout for name, layout in layouts.items() if name not in own}
    return replace(
        block,
        forward=block.forward.with_nodes(tuple(forward), tensors=ahead, layouts=known).check(),
        backward=block.backward.with_nodes(
            tuple(backward), tensors=tensors, layouts=layouts, inputs=(*block.seeds, *saved)
        ).check(),
        saved=saved,
    )


def quantize(
    block: Differentiated, precision: Precision, mesh: Mesh, sizes: Mapping[str, int]
) -> Differentiated:
    """The block with its products in 8 bits; a `LayoutError` names dims that no block of scales divides."""
    return drop_unread(_Quantizer(block, precision, mesh, sizes).run())


def original(name: str) -> str:
    """The name of the tensor that a row copy, or any other tensor, is of."""
    return name.removesuffix(f".{SUFFIX[ROW]}")


def drop_unread(block: Differentiated) -> Differentiated:
    """The block without copies that nobody reads: a forward that runs again makes those of backward only then."""
    every = (*block.forward.nodes, *block.backward.nodes)
    read = {name for node in every for name in node.inputs}

    def trimmed(node: Node) -> Node:
        if node.op != "quantize":
            return node
        kept = [i for i, out in enumerate(node.outputs) if out in read]
        of = tuple(node.attrs["of"][i] for i in kept)
        return replace(node, outputs=tuple(node.outputs[i] for i in kept), attrs={"of": of})

    if not any(node.op == "quantize" and not read.issuperset(node.outputs) for node in every):
        return block
    forward, backward = ([trimmed(node) for node in g.nodes] for g in (block.forward, block.backward))
    return _closed(block, forward, backward, block.backward.tensors, block.backward.layouts)
