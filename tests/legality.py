"""The op table of ARCHITECTURE, applied to every node of a sharded graph, one mesh axis at a time.

What an op is linear in is written down here once more, apart from the passes: a pending sum may pass only there.
Factors that merge several dims (tokens of a mixture of experts) and blocks of heads that share a KV head are taken
apart first, so that `local_result` sees plain factors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stage.errors import LayoutError
from stage.graph import Graph, Node
from stage.layout import Layout, local_result
from stage.mesh import Mesh
from stage.ops import get_op
from stage.ops.ring import EXCHANGE
from stage.passes.shard import REPLICABLE, UNORDERED
from stage.tensor import Tensor
from tests.executor import Executor

Refined = tuple[tuple[str | None, ...], Layout]


@dataclass(frozen=True)
class Term:
    """Operands that are multiplied, of which `linear` may be pending (one at a time), to make some results."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    linear: tuple[int, ...] = ()
    additive: bool = False


LINEAR_IN_FIRST = frozenset(
    {
        *(
            "rope",
            "reduce",
            "split",
            "split_backward",
            "norm_backward",
            "attention_backward",
            "dropout_backward",
        ),
        *("attention_softmax_backward", "pointwise_backward", "embedding_backward", "loss_backward"),
        *("softmax_backward", "target_backward", "route_backward", "permute_tokens", "unpermute_tokens"),
        *("norm_sums_backward", "norm_scale_backward"),
    }
)
FIXED_OPERANDS = {
    "reduce": 1,
    "embedding_backward": 2,
    "target_backward": 2,
    "contract": 2,
    "norm_sums_backward": 2,
}
"""How many operands an op has before those that are added to its result."""


def terms(node: Node) -> list[Term]:
    """The sum that a node computes: products of operands, and operands that are only added."""
    n, outs = len(node.inputs), tuple(range(len(node.outputs)))
    if node.op == EXCHANGE:
        return [Term((i,), (i,), (i,)) for i in range(n)]
    if node.op in ("add", "join", "cast", "chunk", "join_chunks"):
        return [Term(tuple(range(n)), outs, tuple(range(n)), additive=True)]
    if node.op == "sort_by_expert":
        return [Term(tuple(range(n)), outs, (n - 1,))]
    if node.op.startswith("contract_group"):
        return _group_terms(node, node.attrs["parts"], n)
    if node.op in ("quantize", "requantize"):
        copies = enumerate(node.attrs["of"])  # rounding apart, a copy of a partial sum is one too
        return [Term((i,), (result,), (i,)) for result, i in copies]
    fixed = FIXED_OPERANDS.get(node.op, n)
    linear = (0, 1) if node.op == "contract" else (0,) if node.op in LINEAR_IN_FIRST else ()
    return [Term(tuple(range(fixed)), outs, linear), *(Term((i,), outs, (i,)) for i in range(fixed, n))]


def _group_terms(node: Node, parts: int, n: int) -> list[Term]:
    if node.op == "contract_group":
        products = [Term((0, 1 + i), (i,), (0, 1 + i)) for i in range(parts)]
        return products + [Term((1 + parts + i,), (i,), (1 + parts + i,)) for i in range(n - 1 - parts)]
    if node.op == "contract_group_wgrad":
        return [Term((0, 1 + i), (i,), (0, 1 + i)) for i in range(parts)]
    products = [Term((i, parts + i), (0,), (i, parts + i)) for i in range(parts)]
    return products + [Term((i,), (0,), (i,)) for i in range(2 * parts, n)]


@dataclass
class Checker:
    """Checks graphs on one mesh."""

    mesh: Mesh
    shapes: Executor

    def defects(self, graph: Graph) -> Iterator[str]:
        """What is illegal in a graph, one sentence each."""
        for node in graph.nodes:
            found = self._reshard(graph, node) if "step" in node.attrs else self._op(graph, node)
            yield from (f"{graph.name}: {node.name}: {text}" for text in found)

    def _reshard(self, graph: Graph, node: Node) -> Iterator[str]:
        tensor, step = graph.tensors[node.inputs[0]], node.attrs["step"]
        unordered = frozenset(i for i, dim in enumerate(tensor.dims) if dim.name in UNORDERED)
        if step.kind != node.op:
            yield f"its step is a {step.kind}"
        try:
            after = step.apply(graph.layouts[node.inputs[0]], unordered=unordered)
        except AssertionError as error:
            yield str(error)
            return
        if not same(after, graph.layouts[node.outputs[0]], unordered):
            yield f"its step leads to {after}, not to {graph.layouts[node.outputs[0]]}"

    def _op(self, graph: Graph, node: Node) -> Iterator[str]:
        op = get_op(node.op)
        names = (*node.inputs, *node.outputs)
        factors = op.factors(node.attrs, graph.operands(node), graph.results(node))
        rows = (*factors.operands, *factors.results)
        n = len(node.inputs)
        for term in terms(node):
            used = (*term.operands, *(n + i for i in term.results))
            refined = {
                i: self._refined(graph, names[i], rows[i], [(names[j], rows[j]) for j in used if j != i])
                for i in used
            }
            for i in term.results:
                yield from self._term(node, term, refined, n + i, op.reduction)

    def _term(
        self, node: Node, term: Term, refined: dict[int, Refined], result: int, reduction: str
    ) -> Iterator[str]:
        names, expected = refined[result]
        operands = [refined[i] for i in term.operands]
        pending = {i for i in term.operands if refined[i][1].pending}
        if not pending <= set(term.linear):
            yield f"operands {sorted(pending)} are pending, but {node.op} is linear in {term.linear} alone"
        known = {name for row, _ in operands for name in row}
        fresh = tuple(name for name in names if name is not None and name not in known)
        if fresh:  # a result made of a whole operand may be sharded on a dim that none of them has
            dims = tuple(expected.dims[names.index(name)] for name in fresh)
            held = operands[0][1].invariant.difference(*dims)
            operands.append((fresh, Layout(dims, invariant=held)))
        try:
            found = local_result(
                operands,
                names,
                self.mesh.names,
                linear=bool(term.linear),
                additive=term.additive,
                reduction=reduction,
                where=node.op,
            )
        except LayoutError as error:
            yield str(error)
            return
        if found != expected:
            yield f"its result is {found}, not {expected}"

    def _refined(
        self, graph: Graph, name: str, row: Sequence[object], others: Sequence[tuple[str, Sequence[object]]]
    ) -> Refined:
        """Factors and layout of a tensor with merged factors taken apart."""
        tensor, layout = graph.tensors[name], graph.layouts[name]
        factors: list[str | None] = []
        dims: list[tuple[str, ...]] = []
        for i, (factor, atoms) in enumerate(zip(row, layout.dims, strict=True)):
            parts = self._parts(
                tensor, i, factor, atoms, [(graph.tensors[x], graph.layouts[x], r) for x, r in others]
            )
            factors += [part for part, _ in parts]
            dims += [own for _, own in parts]
        return tuple(factors), replace(layout, dims=tuple(dims))

    def _parts(
        self,
        tensor: Tensor,
        dim: int,
        factor: object,
        atoms: tuple[str, ...],
        others: Sequence[tuple[Tensor, Layout, Sequence[object]]],
    ) -> list[tuple[str | None, tuple[str, ...]]]:
        if isinstance(factor, tuple):
            where = {
                atom: name
                for _, layout, row in others
                for name, own in zip(row, layout.dims, strict=True)
                if isinstance(name, str)
                for atom in own
            }
            split = [(part, tuple(a for a in atoms if where.get(a) == part)) for part in factor]
            assert sum(len(own) for _, own in split) == len(atoms), (
                f"{tensor.name}: {atoms} shard no token dim"
            )
            return list(split)
        assert factor is None or isinstance(factor, str)
        blocks = [
            t
            for t, _, row in [*others, (tensor, None, ())]
            for d in t.dims
            if d.name in REPLICABLE and factor == "heads"
        ]
        if factor != "heads" or not blocks:
            return [(factor, atoms)]
        kv_heads = next(
            n
            for t in blocks
            for d, n in zip(t.dims, self.shapes.shape(t), strict=True)
            if d.name in REPLICABLE
        )
        shared = len(atoms)
        while kv_heads % self.mesh.degree(atoms[:shared]):
            shared -= 1
        if tensor.dims[dim].name in REPLICABLE:
            return [("heads", atoms)]
        return [("heads", atoms[:shared]), ("heads of a group", atoms[shared:])]


def same(a: Layout, b: Layout, unordered: frozenset[int]) -> bool:
    """Whether two layouts are equal up to the order of atoms in dims without order."""

    def plain(layout: Layout) -> Layout:
        dims = (tuple(sorted(d)) if i in unordered else d for i, d in enumerate(layout.dims))
        return replace(layout, dims=tuple(dims))

    return plain(a) == plain(b)
