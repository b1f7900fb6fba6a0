"""Which queries a device has in attention, where the sequence is cut into consecutive parts.

Under a causal mask a later query meets more keys, so such parts are unequal work; a zig-zag, in which a device has two
parts from both ends, makes them equal and needs nothing of this. A part is a device's coordinates over the atoms that
shard the queries, whatever axes these are of.
"""

from collections.abc import Iterable, Mapping

from stage.graph import Graph, Node
from stage.mesh import Mesh
from stage.ops import get_op
from stage.ops.masks import Chunk

__all__ = ["own_chunk", "query_atoms"]

QUERIES = "seq"


def query_atoms(graphs: Iterable[Graph]) -> frozenset[str]:
    """The atoms that shard the queries of some op under a mask."""
    return frozenset(atom for graph in graphs for node in graph.nodes for atom in _atoms(graph, node))


def own_chunk(graph: Graph, node: Node, place: Mapping[str, int], mesh: Mesh) -> Chunk | None:
    """The part of the sequence that the queries of an op are on the device at a place, None where they are all."""
    atoms = _atoms(graph, node)
    return (mesh.index(atoms, place), mesh.degree(atoms)) if atoms else None


def _atoms(graph: Graph, node: Node) -> tuple[str, ...]:
    """The atoms that shard the queries of an op whose work depends on which they are, major first."""
    if node.attrs.get("mask", "full") == "full":
        return ()
    ins, outs = graph.operands(node), graph.results(node)
    factors = get_op(node.op).factors(node.attrs, ins, outs)
    for tensor, names in zip((*ins, *outs), (*factors.operands, *factors.results), strict=True):
        if QUERIES in names:
            return graph.layouts[tensor.name].dims[names.index(QUERIES)]
    return ()
