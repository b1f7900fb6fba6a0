"""Chunks: a collective next to a matrix multiplication is split, so that parts of one overlap with parts of the other.

Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models,
section 3; Megatron-LM's `--tp-comm-overlap`. Tokens of a sequence are dealt into N chunks. An all-gather whose result
matrix multiplications alone read becomes N, and each of these multiplications N that wait for their own chunk only.
A matrix multiplication whose result is reduced becomes N, each chunk of which is reduced while the next is computed.
Where the collective moves the sequence itself, a chunk has an N-th of each device's tokens.

Multiplications that sum over tokens, those for weight gradients, stay whole and wait for all chunks. So does an
all-gather that only they read: it overlaps with the input gradient before it as a whole, as in TransformerEngine's bulk
overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from stage.errors import LayoutError
from stage.graph import Graph, Node
from stage.mesh import Mesh
from stage.ops import get_op
from stage.passes.backward import Differentiated
from stage.symbols import evaluate
from stage.tensor import Tensor

__all__ = ["chunk", "chunk_both"]

TOKENS = "seq"
REDUCTIONS = ("reduce_scatter", "all_reduce")

Blocks = tuple[int, int]
"""Of how many runs the chunks of a node's operands and of its results consist (`stage.ops.chunk`)."""


@dataclass(slots=True)
class _Choice:
    """Which nodes are split: their blocks by name."""

    graph: Graph
    mesh: Mesh
    blocks: dict[str, Blocks] = field(default_factory=dict)

    def choose(self) -> dict[str, Blocks]:
        consumers, producers = self.graph.consumers(), self.graph.producers()
        for node in self.graph.nodes:
            readers = consumers.get(node.outputs[0], [])
            products = [reader for reader in readers if self._splits(reader)]
            if node.op == "all_gather" and products and all(get_op(r.op).is_matmul for r in readers):
                self._join(node, products)
        for node in self.graph.nodes:
            if node.op in REDUCTIONS and node.inputs[0] not in self.graph.outputs:
                source = producers.get(node.inputs[0])
                if source is not None and self._splits(source) and consumers[node.inputs[0]] == [node]:
                    self._join(node, [source])
        return self.blocks

    def _join(self, collective: Node, products: Sequence[Node]) -> None:
        """Split a collective with the multiplications next to it, unless these are split in another way already."""
        names, step = self.graph.tensors[collective.inputs[0]].dim_names, collective.attrs["step"]
        dim = names.index(TOKENS) if TOKENS in names else None
        if dim is None:
            return
        known = {self.blocks[node.name] for node in products if node.name in self.blocks}
        moves = dim in (step.src, step.dst)
        count = self.mesh.degree(step.axes) if moves else next(iter(known), (1, 1))[0]
        if known <= {(count, count)}:
            gathers = collective.op == "all_gather"
            shard = 1 if moves else count
            self.blocks[collective.name] = (shard, count) if gathers else (count, shard)
            self.blocks.update(dict.fromkeys((node.name for node in products), (count, count)))

    def _splits(self, node: Node) -> bool:
        """Whether a node is a matrix multiplication each of whose results has its own tokens, whichever they are."""
        op, operands, results = get_op(node.op), self.graph.operands(node), self.graph.results(node)
        if not op.is_matmul or "mask" in node.attrs:
            return False
        factors = op.factors(node.attrs, operands, results)
        named = [
            (tensor.dim_names, names)
            for tensor, names in zip(
                (*operands, *results), (*factors.operands, *factors.results), strict=True
            )
        ]
        tokens = [names[dims.index(TOKENS)] if TOKENS in dims else None for dims, names in named]
        return None not in tokens[len(operands) :] and len({*tokens} - {None}) == 1


class _Chunker:
    """A graph on its way to being chunked."""

    def __init__(self, graph: Graph, count: int, blocks: Mapping[str, Blocks]) -> None:
        self.graph, self.count, self.blocks = graph, count, blocks
        self.tensors, self.layouts = dict(graph.tensors), dict(graph.layouts)
        self.nodes: list[Node] = []
        self.pieces: dict[tuple[str, int], list[str]] = {}
        self.numbered: dict[str, int] = {}

    def run(self) -> Graph:
        run: list[Node] = []
        for node in self.graph.nodes:
            if run and not self._follows(node, run):
                self._emit(run)
                run = []
            if node.name in self.blocks:
                run.append(node)
            else:
                self.nodes.append(node)
        self._emit(run)
        nodes = tuple(self.nodes)
        return replace(self.graph, tensors=self.tensors, layouts=self.layouts, nodes=nodes).check()

    def _follows(self, node: Node, run: Sequence[Node]) -> bool:
        """Whether a node can be run chunk by chunk together with those right before it."""
        if node.name not in self.blocks:
            return False
        made = {out: self.blocks[before.name][1] for before in run for out in before.outputs}
        return all(
            made.get(name, self.blocks[node.name][0]) == self.blocks[node.name][0] for name in node.inputs
        )

    def _emit(self, run: Sequence[Node]) -> None:
        """The chunks of nodes that follow each other, all of the first chunk before any of the second."""
        for node in run:
            blocks = self.blocks[node.name]
            for name in node.outputs:
                self.pieces[name, blocks[1]] = [self._piece(name) for _ in range(self.count)]
        for i, node in product(range(self.count), run):
            into, out_of = self.blocks[node.name]
            inputs = tuple(self._chunk(name, into, i) for name in node.inputs)
            outputs = tuple(self.pieces[name, out_of][i] for name in node.outputs)
            self.nodes.append(replace(node, name=f"{node.name}.chunk{i}", inputs=inputs, outputs=outputs))
        for node in run:
            for name in node.outputs:
                self._join(name, self.blocks[node.name][1])

    def _chunk(self, name: str, blocks: int, i: int) -> str:
        """A chunk of an operand: made by a chunk of the node that makes it, or a view of it; weights are whole."""
        tensor = self.tensors[name]
        if TOKENS not in tensor.dim_names:
            return name
        if (name, blocks) not in self.pieces:
            self.pieces[name, blocks] = found = [self._piece(name) for _ in range(self.count)]
            dim = tensor.dim_names.index(TOKENS)
            for j, piece in enumerate(found):
                attrs = {"dim": dim, "blocks": blocks, "index": j, "of": self.count}
                self.nodes.append(Node("chunk", piece, (name,), (piece,), attrs))
        return self.pieces[name, blocks][i]

    def _join(self, name: str, blocks: int) -> None:
        attrs = {"dim": self.tensors[name].dim_names.index(TOKENS), "blocks": blocks}
        self.nodes.append(
            Node("join_chunks", f"{name}.join", tuple(self.pieces[name, blocks]), (name,), attrs)
        )

    def _piece(self, name: str) -> str:
        """A new tensor of a chunk's size, which lies as the whole does."""
        i, tensor = self.numbered.get(name, 0), self.tensors[name]
        self.numbered[name] = i + 1
        attrs = {"dim": tensor.dim_names.index(TOKENS), "of": self.count}
        ((dims, _),) = get_op("chunk").infer(attrs, [tensor])
        piece = f"{name}.chunk{i}"
        self.tensors[piece] = tensor.named(piece, dims=dims)
        self.layouts[piece] = self.layouts[name]
        return piece


def chunk(graph: Graph, count: int, mesh: Mesh, sizes: Mapping[str, int]) -> Graph:
    """A sharded graph with such collectives and multiplications in `count` chunks; without any, the graph itself.

    Work and bytes of the chunks are those of the whole, but for weights, which every chunk reads. A `LayoutError` names
    the tensor whose tokens on a device do not divide.
    """
    blocks = _Choice(graph, mesh).choose()
    for node in graph.nodes:
        if node.name in blocks:
            tensors = zip((*node.inputs, *node.outputs), _sides(node, blocks[node.name]), strict=True)
            for name, runs in tensors:
                _check(graph.tensors[name], graph, runs, count, mesh, sizes)
    return _Chunker(graph, count, blocks).run() if blocks else graph


def chunk_both(block: Differentiated, count: int, mesh: Mesh, sizes: Mapping[str, int]) -> Differentiated:
    """A block with both of its graphs in chunks; tensors that pass between them are whole. One is the block itself."""
    if count == 1:
        return block
    ahead, behind = (chunk(graph, count, mesh, sizes) for graph in (block.forward, block.backward))
    return replace(block, forward=ahead, backward=behind)


def _sides(node: Node, blocks: Blocks) -> tuple[int, ...]:
    """The runs of each operand and result."""
    return (blocks[0],) * len(node.inputs) + (blocks[1],) * len(node.outputs)


def _check(tensor: Tensor, graph: Graph, runs: int, count: int, mesh: Mesh, sizes: Mapping[str, int]) -> None:
    """Raise a `LayoutError` where a device's tokens of a tensor, or each run of them, do not divide into chunks."""
    if TOKENS not in tensor.dim_names:
        return
    whole, axes = evaluate(tensor.size(TOKENS), sizes), graph.layouts[tensor.name].dims
    own = whole // mesh.degree(axes[tensor.dim_names.index(TOKENS)])
    if own % (runs * count):
        raise LayoutError(
            f"{TOKENS} = {whole} of {tensor.name} leaves shards of {own // runs} tokens, which do not divide into "
            f"tp_overlap_chunks = {count}; choose a number that divides {own // runs}"
        )
