"""Interleaved 1F1B: as 1F1B, but a rank's chunks take turns (Narayanan et al. 2021, section 2.2.2).

The warm-up is as deep as the chunks below in the first round, and two forwards for each rank that follows, so that the
backward that comes back finds its forward done.
"""

from stage.pipeline.schedule import Phases, Pipeline, Schedule
from stage.pipeline.schedules.rounds import in_rounds, refuse_uneven_rounds, round_size

__all__ = ["INTERLEAVED"]


def interleaved(pipeline: Pipeline, rank: int) -> Phases:
    """The order of a rank.

    >>> print(interleaved(Pipeline(2, 2, 2), 0))
    0F0 0F1 1F0 1F1 | - | 1B0 1B1 0B0 0B1
    """
    forwards, backwards = in_rounds(pipeline, "F"), in_rounds(pipeline, "B")
    deep = (pipeline.chunks - 1) * round_size(pipeline) + 2 * (pipeline.ranks - 1 - rank)
    warmup = min(deep, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return Phases(
        forwards[:warmup], [action for pair in pairs for action in pair], backwards[len(backwards) - warmup :]
    )


INTERLEAVED = Schedule("interleaved", interleaved, chunks=(2, None), refuses=refuse_uneven_rounds)
