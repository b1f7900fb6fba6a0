"""Unfuse: take apart the kernels that need a whole sum inside, where the table of a strategy shards what is summed.

A norm over a sharded dim becomes its sums and its scaling; a bias in the epilogue of a contraction over a sharded dim
becomes an addition after it, for each device would add it to its part of the sum. What the parts leave pending between
them is then reduced as any other tensor is. A table that shards neither leaves the graph as it is.
"""

from stage.graph import Graph, Node
from stage.mesh import Mesh
from stage.ops import get_op
from stage.passes.shard import Table, axes_of
from stage.tensor import Tensor

__all__ = ["unfuse"]


def unfuse(graph: Graph, table: Table, mesh: Mesh) -> Graph:
    """The graph with such norms and biases apart."""
    tensors, nodes = dict(graph.tensors), list[Node]()
    for node in graph.nodes:
        parts, fresh = _parts(graph, node, table, mesh)
        nodes += parts
        made = {name for part in parts for name in part.outputs}
        tensors = {name: t for name, t in tensors.items() if name in made or name not in node.outputs}
        tensors |= {tensor.name: tensor for tensor in fresh}
    return graph.with_nodes(tuple(nodes), tensors=tensors).check()


def _parts(graph: Graph, node: Node, table: Table, mesh: Mesh) -> tuple[list[Node], list[Tensor]]:
    """What runs in place of a node, and the tensors that its parts hand on."""
    if node.op == "norm":
        x = graph.tensors[node.inputs[0]]
        if axes_of(x.dim_names, table, mesh).get(node.attrs["over"]):
            return _norm(node, x)
    if node.op == "contract" and len(node.inputs) > 2 and _sums_shards(graph, node, table, mesh):
        return _bias(node, graph.tensors[node.outputs[0]])
    return [node], []


def _sums_shards(graph: Graph, node: Node, table: Table, mesh: Mesh) -> bool:
    """Whether a contraction sums over a dim that is sharded."""
    factors = get_op(node.op).factors(node.attrs, graph.operands(node), graph.results(node))
    read = {name for names in factors.operands for name in names if isinstance(name, str)}
    axes = axes_of(read, table, mesh)
    return any(axes.get(name) for name in read - set(factors.results[0]))


def _norm(node: Node, x: Tensor) -> tuple[list[Node], list[Tensor]]:
    name, (source, *weights) = f"{node.name}.sums", node.inputs
    dims, dtype = get_op("norm_sums").infer(node.attrs, [x])[0]
    sums = Node("norm_sums", name, (source,), (name,), node.attrs)
    scale = Node("norm_scale", node.name, (source, name, *weights), node.outputs[:1], node.attrs)
    return [sums, scale], [Tensor(name, dims, dtype)]


def _bias(node: Node, result: Tensor) -> tuple[list[Node], list[Tensor]]:
    product = result.named(f"{node.name}.product")
    x, w, bias = node.inputs
    contract = Node(node.op, node.name, (x, w), (product.name,), node.attrs)
    add = Node("add", f"{node.name}.add_bias", (product.name, bias), node.outputs)
    return [contract, add], [product]
