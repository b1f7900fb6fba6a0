"""Lifetimes of tensors while one block runs once: from the node that makes a tensor to the last one that reads it.

Memory is that of a program that runs nodes in their order and frees a tensor right after its last reader, as autograd
does. A change of view makes no tensor: views live in the memory of what they are views of.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stage.graph import Node
from stage.ops import get_op
from stage.ops.collective import is_collective
from stage.ops.ring import EXCHANGE

__all__ = ["ACTIVATION", "COMMUNICATION", "KINDS", "TEMPORARY", "Lifetimes", "Span", "roots", "spans"]

Ints = NDArray[np.int64]

KINDS = ("activations", "temporaries", "communication")
ACTIVATION, TEMPORARY, COMMUNICATION = range(len(KINDS))


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor of so many bytes that is there from the node number `first` to the node number `last`."""

    tensor: str
    first: int
    last: int
    bytes: int
    kind: int


@dataclass(frozen=True)
class Lifetimes:
    """The nodes of a run by name, and what is in memory at each of them."""

    nodes: tuple[str, ...]
    spans: tuple[Span, ...]
    levels: Ints = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Levels are bytes of each of `KINDS` at each node: the running sum of what comes and goes."""
        changes = np.zeros((len(self.nodes) + 1, len(KINDS)), np.int64)
        for span in self.spans:
            changes[span.first, span.kind] += span.bytes
            changes[span.last + 1, span.kind] -= span.bytes
        object.__setattr__(self, "levels", np.cumsum(changes, axis=0)[:-1])

    def alive(self, node: int) -> list[Span]:
        """The tensors that are there at a node, the largest first."""
        found = [span for span in self.spans if span.first <= node <= span.last and span.bytes]
        return sorted(found, key=lambda span: -span.bytes)


def roots(nodes: Sequence[Node], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """For each tensor the one in whose memory it lives; `known` are those of a graph before."""
    found = dict(known or {})
    for node in nodes:
        view = not get_op(node.op).kernel
        for out in node.outputs:
            found[out] = found.get(node.inputs[0], node.inputs[0]) if view else out
    return found


def spans(
    nodes: Sequence[Node],
    root: Mapping[str, str],
    given: Mapping[str, int],
    kept: Mapping[str, int],
    size: Callable[[str], int | None],
) -> list[Span]:
    """The spans of what nodes read and make.

    `given` are the tensors that are there before, with their kind; `kept` those that stay behind, with theirs. A tensor
    whose `size` is None is always there, or added to a buffer that is, and has no span.
    """
    first = dict.fromkeys(given, 0)
    last, kinds = dict(first), dict(given)
    for at, node in enumerate(nodes):
        for name in (*node.inputs, *node.outputs):
            own = root.get(name, name)
            first.setdefault(own, at)
            last[own] = at
            kinds.setdefault(own, COMMUNICATION if _moves(node) else TEMPORARY)
    for own, kind in kept.items():
        first.setdefault(own, 0)
        last[own], kinds[own] = len(nodes) - 1, kind
    sizes = {own: size(own) for own in first}
    return [
        Span(own, first[own], last[own], held, kinds[own]) for own, held in sizes.items() if held is not None
    ]


def _moves(node: Node) -> bool:
    return is_collective(node.op) or node.op == EXCHANGE
