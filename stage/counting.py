"""Counting a model: its parameters, and the floating-point operations of its matrix multiplications.

Both are read from the graphs of its blocks: a kind of block is built and differentiated once, in symbols, and
its closed forms are evaluated and multiplied by the number of layers that repeat it. A multiply-add counts as
2, the vocabulary is not padded, and the mask is the one in the model's options.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stage.graph import Graph, Node
from stage.model import Block, Model
from stage.ops import get_op
from stage.passes.backward import differentiate
from stage.symbols import evaluate
from stage.tensor import Size

__all__ = [
    "Flops",
    "closed_forms",
    "count_block_flops",
    "count_block_parameters",
    "count_flops",
    "count_parameters",
]


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of the matrix multiplications of one forward and one backward pass."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Those of both passes."""
        return self.forward + self.backward


def count_parameters(model: Model) -> int:
    """The parameters of the model, exactly; one that several blocks share (a tied head) is counted once."""
    own, shared = 0, dict[str, int]()
    for block, times in _repetitions(model).items():
        for name, elements, is_shared in _parameters(model, block):
            if is_shared:
                shared[name] = elements
            else:
                own += elements * times
    return own + sum(shared.values())


def count_block_parameters(model: Model, block: Block) -> int:
    """The parameters that one block holds, those that it shares with others included."""
    return sum(elements for _, elements, _ in _parameters(model, block))


def count_flops(model: Model, batch: int, seq: int) -> Flops:
    """The operations of a step of `batch` sequences of `seq` tokens, as a model is credited with them.

    A fused attention kernel that makes its scores again in backward is credited with twice its forward work,
    not with the 2.5 times that it executes.
    """
    forward = backward = 0
    for block, times in _repetitions(model).items():
        one = count_block_flops(model, block, batch, seq)
        forward += times * one.forward
        backward += times * one.backward
    return Flops(forward, backward)


def count_block_flops(model: Model, block: Block, batch: int, seq: int) -> Flops:
    """The operations of one block, counted as `count_flops` counts them."""
    sizes = {**model.values, "batch": batch, "seq": seq, "sources": 1}
    both = differentiate(model.graph(block))
    return Flops(_total(both.forward, sizes), _total(both.backward, sizes))


def closed_forms(graph: Graph, *, executed: bool = False) -> list[tuple[Node, Size]]:
    """Every matrix multiplication of a graph with its operations, in the symbols of the graph.

    They are those that the model is credited with or, if asked for, those that a kernel has `executed`.

    >>> from stage.blocks import gated_mlp
    >>> from stage.graph import Builder
    >>> b = Builder("mlp")
    >>> graph = b.graph(gated_mlp(b, b.input("x", "batch", "seq", "d_model")))
    >>> [(node.name, expr) for node, expr in closed_forms(graph)][0]
    ('gate_proj', 2*batch*d_ff*d_model*seq)
    """
    found = []
    for node in graph.nodes:
        op = get_op(node.op)
        cost = op.flops if executed else op.model_flops
        if op.model_flops is not None and cost is not None:
            found.append((node, cost(node.attrs, graph.operands(node), graph.results(node))))
    return found


def _total(graph: Graph, sizes: Mapping[str, int]) -> int:
    return sum(evaluate(expr, sizes) for _, expr in closed_forms(graph))


def _repetitions(model: Model) -> Counter[Block]:
    """How often the model has each of its blocks."""
    return Counter(model.blocks)


def _parameters(model: Model, block: Block) -> list[tuple[str, int, bool]]:
    """Name, elements and whether it is shared of each parameter of a block."""
    sizes = model.values
    return [(t.name, evaluate(t.elements, sizes), t.shared) for t in model.graph(block).parameters]
