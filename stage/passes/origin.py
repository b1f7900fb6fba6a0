"""Where an operand of a sharded graph comes from: what it was before collectives brought it to where it is read."""

from collections.abc import Mapping
from dataclasses import dataclass

from stage.graph import Node

__all__ = ["Origin", "carried", "find_origin"]

GATHERS = frozenset({"all_gather", "vary"})
DISPATCH = GATHERS | {"all_to_all", "permute", "permute_tokens", "sort_by_expert", "slice", "pad"}


@dataclass(frozen=True, slots=True)
class Origin:
    """A source, and the nodes that moved it, first to last."""

    source: str
    chain: tuple[Node, ...] = ()

    @property
    def gathered(self) -> frozenset[str]:
        """The atoms over which it was gathered."""
        return frozenset(a for node in self.chain if node.op == "all_gather" for a in node.attrs["step"].axes)

    @property
    def dispatched(self) -> bool:
        """Whether its tokens were brought to their experts."""
        return any(node.op == "permute_tokens" for node in self.chain)


def find_origin(name: str, producers: Mapping[str, Node], dispatch: bool) -> Origin:
    """What a tensor was before it was gathered; with `dispatch`, before it left for its expert, if it did."""
    origin = _walk(name, producers, DISPATCH) if dispatch else Origin(name)
    return origin if origin.dispatched else _walk(name, producers, GATHERS)


def _walk(name: str, producers: Mapping[str, Node], moves: frozenset[str]) -> Origin:
    chain: list[Node] = []
    while (node := producers.get(name)) is not None and node.op in moves:
        chain.insert(0, node)
        name = node.inputs[carried(node)]
    return Origin(name, tuple(chain))


def carried(node: Node) -> int:
    """Which operand of such a node is moved; counts stand before it, and indices behind."""
    return len(node.inputs) - 1 if node.op == "sort_by_expert" else 0
