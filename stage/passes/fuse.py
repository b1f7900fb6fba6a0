"""Fuse contractions of one operand whose results are alike into one, as production code stores q, k, v and gate, up.

The work is the same; the operand is read once instead of several times, and one weight stands for several.
"""

from stage.graph import Graph, Node
from stage.ops.contract_group import HEADS

__all__ = ["fuse"]


def _kind(graph: Graph, node: Node) -> tuple[str, tuple[str, ...], int] | None:
    """What must be equal for two nodes to be fused: operand, dims of the result, number of operands."""
    if node.op != "contract" or "factors" in node.attrs:
        return None
    weights = [graph.tensors[name] for name in node.inputs[1:]]
    if any(w.role != "parameter" for w in weights) or len(set(node.inputs)) != len(node.inputs):
        return None
    dims = tuple(HEADS.get(name, name) for name in graph.tensors[node.outputs[0]].dim_names)
    return node.inputs[0], dims, len(node.inputs)


def _joint_name(names: list[str]) -> str:
    """`attn.qkv_proj` of `attn.q_proj`, `attn.k_proj` and `attn.v_proj`; `mlp.gate_up_proj` of the other two."""
    scope = names[0].rpartition(".")[0]
    stems = [name.rpartition(".")[2].removesuffix("_proj") for name in names]
    joint = "".join(stems) if all(len(stem) == 1 for stem in stems) else "_".join(stems)
    return (f"{scope}." if scope else "") + f"{joint}_proj"


def fuse(graph: Graph) -> Graph:
    """The graph with such contractions fused; a graph without any is returned as it is."""
    groups: dict[tuple[str, tuple[str, ...], int], list[Node]] = {}
    for node in graph.nodes:
        kind = _kind(graph, node)
        if kind is not None:
            groups.setdefault(kind, []).append(node)
    joint = {nodes[0].name: nodes for nodes in groups.values() if len(nodes) > 1}
    gone = {node.name for nodes in joint.values() for node in nodes[1:]}
    nodes = [_fused(joint[n.name]) if n.name in joint else n for n in graph.nodes if n.name not in gone]
    return graph.with_nodes(tuple(nodes)).check() if joint else graph


def _fused(nodes: list[Node]) -> Node:
    weights = [node.inputs[1] for node in nodes]
    biases = [name for node in nodes for name in node.inputs[2:]]
    return Node(
        "contract_group",
        _joint_name([node.name for node in nodes]),
        (nodes[0].inputs[0], *weights, *biases),
        tuple(node.outputs[0] for node in nodes),
        {"parts": len(nodes)},
    )
