"""Activation recomputation: run forward nodes again in the backward pass instead of keeping what they made.

`full` keeps a layer's input alone and runs the whole layer again before its backward, collectives included (as
Megatron-LM does, which also repeats the last reduction). Parts of a layer run again right before the first node that
reads what they make, in whole or as far as backward reads them (`stage.recomputation.Module`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stage.graph import Graph, Node
from stage.ops import get_op
from stage.ops.collective import is_collective
from stage.passes.backward import Differentiated
from stage.passes.precision import ONCE, drop_unread, original
from stage.recomputation import MODULES, Module, Recomputation

__all__ = ["recompute"]

FOLLOWERS = ("rope", "join", "amax", "quantize")
"""Kernels that only rotate, put together or copy what others made; they are as cheap to run again as to read."""


def recompute(block: Differentiated, policy: Recomputation) -> Differentiated:
    """The block with the nodes that `policy` chooses run again in its backward graph.

    What only recomputed nodes made is no longer saved. Recomputed nodes have the phase `recompute`. A block that has
    nothing of what the policy names is returned as it is.
    """
    if policy.kind == "none":
        return block
    if policy.kind == "full":
        nodes = _running(block.forward)
        everything = _Again([nodes], {out for n in nodes for out in n.outputs})
        return drop_unread(_written(block, everything, at_once=True))
    again = _chosen(block, [MODULES[name] for name in policy.modules])
    return drop_unread(_written(block, again)) if again.made else block


def _running(forward: Graph) -> list[Node]:
    """The nodes that every forward runs."""
    return [node for node in forward.nodes if node.phase != ONCE]


@dataclass(frozen=True, slots=True)
class _Again:
    """Forward nodes that run again, in the groups that run together, and the tensors that are `made` again by them."""

    groups: list[list[Node]]
    made: set[str]


def _chosen(block: Differentiated, modules: Iterable[Module]) -> _Again:
    """What modules of a layer run again; a node that several have runs with the first whole one of them.

    Where backward gathers an operand again because it is not kept, a node that runs again has it gathered too.
    """
    forward, again, taken = block.forward, _Again([], set()), set[str]()
    for module in sorted(modules, key=lambda module: not module.whole):
        own = [node for node in _running(forward) if module.matches(node) and node.name not in taken]
        if module.whole:
            own = _with_gathers(forward, own) if module.gathers else own
            again.groups.append(own)
            again.made.update(_inner(forward, own))
        else:
            own = _with_followers(forward, own, taken)
            again.groups.extend([node] for node in own)
            again.made.update(out for node in own for out in node.outputs)
        taken.update(node.name for node in own)
    regathered = [n for n in forward.nodes if f"{original(n.outputs[0])}.again" in block.backward.tensors]
    if again.made:
        again.groups.extend([node] for node in regathered if node.name not in taken)
        again.made.update(node.outputs[0] for node in regathered)
    return again


def _with_gathers(forward: Graph, nodes: list[Node]) -> list[Node]:
    """The nodes of a module, and what gathers its input for it alone."""
    names, readers = {node.name for node in nodes}, forward.consumers()

    def serves(node: Node) -> bool:
        own = [reader.name for out in node.outputs for reader in readers.get(out, ())]
        return _moves(node) and bool(own) and names.issuperset(own)

    return [node for node in forward.nodes if node.name in names or serves(node)]


def _with_followers(forward: Graph, nodes: list[Node], taken: set[str]) -> list[Node]:
    """The nodes, and those that only move or rotate what they made."""
    names = {node.name for node in nodes}
    made = {out for node in nodes for out in node.outputs}
    for node in forward.nodes:
        follows = _moves(node) or node.op in FOLLOWERS
        if follows and node.name not in taken and made.intersection(node.inputs):
            names.add(node.name)
            made.update(node.outputs)
    return [node for node in forward.nodes if node.name in names]


def _moves(node: Node) -> bool:
    return is_collective(node.op) or not get_op(node.op).kernel


def _inner(forward: Graph, nodes: list[Node]) -> set[str]:
    """Results of a module that no other node reads forward; those that one does are kept where backward reads them."""
    own = {node.name for node in nodes}
    outside = {name for node in forward.nodes if node.name not in own for name in node.inputs}
    return {out for node in nodes for out in node.outputs} - outside


@dataclass(slots=True)
class _Writer:
    """A backward graph while it is written anew, each node after what runs again for it."""

    again: _Again
    nodes: list[Node] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    group: dict[str, list[Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.group = {out: nodes for nodes in self.again.groups for node in nodes for out in node.outputs}

    def source(self, name: str) -> str:
        """The tensor that stands for one of the forward graph; what makes it is written."""
        if name in self.again.made:
            self.run(self.group[name])
            return f"{name}.recomputed"
        return name

    def run(self, group: list[Node]) -> None:
        """Nodes that run again together."""
        if group[0].name in self.done:
            return
        self.done.update(node.name for node in group)
        own = {out for node in group for out in node.outputs}
        for node in group:
            inputs = tuple(f"{name}.recomputed" if name in own else self.source(name) for name in node.inputs)
            outputs = tuple(f"{name}.recomputed" for name in node.outputs)
            name = f"{node.name}.recompute"
            self.nodes.append(replace(node, name=name, inputs=inputs, outputs=outputs, phase="recompute"))


def _written(block: Differentiated, again: _Again, *, at_once: bool = False) -> Differentiated:
    writer = _Writer(again)
    if at_once:
        for group in again.groups:
            writer.run(group)
    for node in block.backward.nodes:
        inputs = tuple(writer.source(name) for name in node.inputs)
        writer.nodes.append(replace(node, inputs=inputs))
    return _rebuilt(block, tuple(writer.nodes))


def _rebuilt(block: Differentiated, nodes: tuple[Node, ...]) -> Differentiated:
    tensors, layouts = dict(block.backward.tensors), dict(block.backward.layouts)
    for name in (out for node in nodes if node.phase == "recompute" for out in node.outputs):
        old = name.removesuffix(".recomputed")
        tensors[name] = block.forward.tensors[old].named(name)
        if old in block.forward.layouts:
            layouts[name] = block.forward.layouts[old]
    own = {out for node in nodes for out in node.outputs} | set(block.seeds)
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name not in own)
    saved = tuple(name for name in read if tensors[name].role != "parameter")
    backward = replace(
        block.backward, tensors=tensors, nodes=nodes, inputs=(*block.seeds, *saved), layouts=layouts
    )
    return replace(block, backward=backward.check(), saved=saved)
