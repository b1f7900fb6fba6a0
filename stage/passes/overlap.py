"""Shared experts run while tokens are under way to the others (Megatron-LM, `--moe-shared-expert-overlap`).

Nothing but the order of nodes changes. What a shared expert computes is placed right before the first kernel that
waits for the dispatch's all-to-all, so that it runs while that is in flight; collectives that it needs come before the
all-to-all, and those that follow from it come behind, in one order on all ranks. In backward the all-to-all is that of
the combine's gradient. The pass is run on the forward graph before that is differentiated, so that no gradient of the
shared expert is added to one that comes back from the others, and again on the backward graph.
"""

from collections.abc import Collection

from stage.graph import Graph, Node
from stage.ops import get_op
from stage.ops.collective import is_collective

__all__ = ["overlap", "overlaps"]

SCOPE = "shared"
DISPATCH = "all_to_all"


def overlaps(graph: Graph) -> bool:
    """Whether a graph has a shared expert and a dispatch that does not wait for it."""
    return _flight(graph, _own(graph)) is not None


def overlap(graph: Graph) -> Graph:
    """The graph with its shared expert placed beside the dispatch; one without the two is returned as it is."""
    own = _own(graph)
    flight = _flight(graph, own)
    if flight is None:
        return graph
    waiting = _behind(graph, {flight.name})
    landing = next(node for node in graph.nodes if node.name in waiting and _computes(node))
    kernels = {node.name for node in graph.nodes if node.name in own and _computes(node)}
    late = _behind(graph, kernels) | kernels
    lead = [node for node in graph.nodes if node.name in own and node.name not in late]
    body = [node for node in graph.nodes if node.name in own & late and node.name not in waiting]
    moved = {node.name for node in body}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node == flight:
            early = {before.name for before in nodes}
            nodes += [first for first in lead if first.name not in early]
            moved |= {first.name for first in lead}
        if node == landing:
            nodes += body
        if node.name not in moved:
            nodes.append(node)
    return graph.with_nodes(tuple(nodes)).check()


def _computes(node: Node) -> bool:
    return get_op(node.op).kernel and not is_collective(node.op)


def _own(graph: Graph) -> set[str]:
    """Nodes of shared experts, and what serves these alone without computing: collectives and views."""
    consumers = graph.consumers()
    own = {node.name for node in graph.nodes if SCOPE in node.name.split(".")}
    for node in reversed(graph.nodes):
        readers = [reader.name for out in node.outputs for reader in consumers.get(out, ())]
        if readers and own.issuperset(readers) and not _computes(node):
            own.add(node.name)
    return own


def _flight(graph: Graph, own: Collection[str]) -> Node | None:
    """The first all-to-all that shared experts do not wait for; None without the one or the other."""
    producers, needed = graph.producers(), set(own)
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(producers[name].name for name in node.inputs if name in producers)
    return next(
        (node for node in graph.nodes if own and node.op == DISPATCH and node.name not in needed), None
    )


def _behind(graph: Graph, names: Collection[str]) -> set[str]:
    """The nodes that wait for some of these."""
    made = {out for node in graph.nodes if node.name in names for out in node.outputs}
    found = set()
    for node in graph.nodes:
        if made.intersection(node.inputs):
            found.add(node.name)
            made.update(node.outputs)
    return found
