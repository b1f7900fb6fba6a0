"""Options that overlap communication with compute must find something to overlap, or the user asked for nothing."""

from collections.abc import Sequence

from stage.errors import StrategyError
from stage.passes.backward import Differentiated
from stage.passes.overlap import overlaps
from stage.strategy import Strategy

__all__ = ["check_overlap"]


def check_overlap(strategy: Strategy, blocks: Sequence[Differentiated]) -> None:
    """Raise a `StrategyError` where an option that overlaps has changed none of the blocks of a model."""
    graphs = [graph for both in blocks for graph in (both.forward, both.backward)]
    if strategy.tp_overlap_chunks > 1 and not any(n.op == "chunk" for graph in graphs for n in graph.nodes):
        raise StrategyError(
            f"tp_overlap_chunks = {strategy.tp_overlap_chunks} splits nothing: no collective stands next to a matrix "
            "multiplication; leave it at 1, or shard heads or d_ff over tp above 1"
        )
    if strategy.moe_shared_expert_overlap and not any(overlaps(both.forward) for both in blocks):
        raise StrategyError(
            "moe_shared_expert_overlap finds no shared expert beside an all-to-all; leave it out, "
            "or take a model with shared experts and ep above 1"
        )
