"""Activation recomputation: run forward nodes again in the backward pass instead of keeping what they made.

`full` keeps a layer's input alone and runs the whole layer again, collectives included (as Megatron-LM does, which
also repeats the last reduction). `selective` runs the attention core again (Korthikanti et al. 2022, section 5).
"""

from collections.abc import Callable
from dataclasses import replace

from stage.graph import Graph, Node
from stage.passes.backward import Differentiated

__all__ = ["POLICIES", "recompute"]


POLICIES: dict[str, Callable[[Node], bool]] = {
    "full": lambda _: True,
    "selective": lambda node: "core" in node.name.split("."),
}
"""Which forward nodes of a layer each policy runs again."""


def recompute(block: Differentiated, policy: str) -> Differentiated:
    """The block with the nodes of `policy` (`full` or `selective`) run again in its backward graph.

    What only recomputed nodes made is no longer saved. Recomputed nodes have the phase `recompute`.
    """
    chosen = [node for node in block.forward.nodes if POLICIES[policy](node)]
    if not chosen:
        return block
    made = {out for node in chosen for out in node.outputs}
    if policy != "full":
        made -= _kept(block, {node.name for node in chosen}, made)
    renamed = {name: f"{name}.recomputed" for name in sorted(made)}
    every = {out: f"{out}.recomputed" for node in chosen for out in node.outputs}
    clones = [_clone(node, every) for node in chosen]
    first = 0 if policy == "full" else _first_reader(block.backward, made)
    nodes = [_redirect(node, renamed) for node in block.backward.nodes]
    nodes[first:first] = clones
    return _rebuilt(block, tuple(nodes), every)


def _kept(block: Differentiated, chosen: set[str], made: set[str]) -> set[str]:
    """Results of chosen nodes that others read forward; these are kept if backward reads them outside the core."""
    readers = [node for node in block.forward.nodes if node.name not in chosen]
    return {name for node in readers for name in node.inputs if name in made}


def _clone(node: Node, renamed: dict[str, str]) -> Node:
    return replace(
        node,
        name=f"{node.name}.recompute",
        inputs=tuple(renamed.get(name, name) for name in node.inputs),
        outputs=tuple(renamed[name] for name in node.outputs),
        phase="recompute",
    )


def _redirect(node: Node, renamed: dict[str, str]) -> Node:
    return replace(node, inputs=tuple(renamed.get(name, name) for name in node.inputs))


def _first_reader(backward: Graph, made: set[str]) -> int:
    for i, node in enumerate(backward.nodes):
        if made & set(node.inputs):
            return i
    return 0


def _rebuilt(block: Differentiated, nodes: tuple[Node, ...], renamed: dict[str, str]) -> Differentiated:
    tensors, layouts = dict(block.backward.tensors), dict(block.backward.layouts)
    for old, new in renamed.items():
        tensors[new] = block.forward.tensors[old].named(new)
        if old in block.forward.layouts:
            layouts[new] = block.forward.layouts[old]
    own = {out for node in nodes for out in node.outputs} | set(block.seeds)
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name not in own)
    saved = tuple(name for name in read if tensors[name].role != "parameter")
    backward = replace(
        block.backward, tensors=tensors, nodes=nodes, inputs=(*block.seeds, *saved), layouts=layouts
    )
    return replace(block, backward=backward.check(), saved=saved)
