"""Split backward: the input gradient, which the stage before waits for, and the weight gradients, which can wait.

Qi et al. 2023 (Zero Bubble Pipeline Parallelism, section 1). Of a block's backward graph whatever serves gradients of
parameters alone is the weight part: contractions and reductions for weights and biases, the embedding's backward, and
what gathers their operands again. All else is the input part: a norm's kernel, which makes both gradients at once, and
recomputation, which both parts read.
"""

from collections.abc import Collection
from dataclasses import dataclass

from stage.graph import Graph, Node
from stage.passes.backward import Differentiated

__all__ = ["SplitBackward", "split_backward"]


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """The two parts of a backward graph; `weight` reads tensors of the forward graph and of `input`."""

    input: Graph
    weight: Graph


def split_backward(block: Differentiated) -> SplitBackward:
    """The parts of a block's backward; together they have its nodes, each once and in its order."""
    backward = block.backward
    chosen = _weight_nodes(backward, set(block.gradients.values()))
    first = [node for node in backward.nodes if node.name not in chosen]
    second = [node for node in backward.nodes if node.name in chosen]
    made = {out for node in second for out in node.outputs}
    read = {name for node in second for name in node.inputs}
    outputs = [name for name in backward.outputs if name not in made]
    handed = [out for node in first for out in node.outputs if out in read and out not in outputs]
    return SplitBackward(
        _part(backward, "input", first, (*outputs, *handed)),
        _part(backward, "weight", second, [name for name in backward.outputs if name in made]),
    )


def _weight_nodes(backward: Graph, gradients: Collection[str]) -> set[str]:
    """Nodes all of whose results are gradients of parameters or are read by such nodes alone."""
    consumers = backward.consumers()
    chosen: set[str] = set()
    for node in reversed(backward.nodes):
        returned = [out for out in node.outputs if out in backward.outputs]
        readers = [reader.name for out in node.outputs for reader in consumers.get(out, ())]
        serves = bool(returned or readers) and chosen.issuperset(readers)
        if serves and node.phase != "recompute" and set(returned) <= set(gradients):
            chosen.add(node.name)
    return chosen


def _part(backward: Graph, name: str, nodes: list[Node], outputs: Collection[str]) -> Graph:
    """Some of the nodes as a graph of their own."""
    made = {out for node in nodes for out in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name not in made)
    inputs = tuple(name for name in read if backward.tensors[name].role != "parameter")
    given = [out for out in outputs if out in made]
    tensors = {n: t for n, t in backward.tensors.items() if n in made | read.keys()}
    layouts = {n: layout for n, layout in backward.layouts.items() if n in tensors}
    return Graph(f"{backward.name}.{name}", tensors, tuple(nodes), inputs, tuple(given), layouts).check()
