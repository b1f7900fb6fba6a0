"""Looped breadth-first: every chunk runs all micro-batches before the next one starts (Lamy-Poirier 2023).

Backward is the mirror of forward, last micro-batch first, so what a chunk made last is used first.
"""

from stage.pipeline.schedule import Action, Phases, Pipeline, Schedule

__all__ = ["LOOPED_BFS"]


def looped_bfs(pipeline: Pipeline, _rank: int) -> Phases:
    """The order is the same on every rank.

    >>> print(looped_bfs(Pipeline(2, 2, 2), 0))
    0F0 0F1 1F0 1F1 | - | 1B1 1B0 0B1 0B0
    """
    runs = [(chunk, i) for chunk in range(pipeline.chunks) for i in range(pipeline.micro_batches)]
    return Phases(
        warmup=[Action("F", *run) for run in runs], cooldown=[Action("B", *run) for run in reversed(runs)]
    )


LOOPED_BFS = Schedule("looped-bfs", looped_bfs, chunks=(1, None))
