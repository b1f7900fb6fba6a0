"""ZB-H1: 1F1B whose weight gradients wait until they fill what were bubbles (Qi et al. 2023, section 2.3).

A rank holds its weight gradients back by its distance from the first rank. So every rank keeps as many micro-batches
in flight as the first rank of 1F1B, and the bubble is a third of that of 1F1B. With several chunks the order is that
of interleaved 1F1B, filled up alike.
"""

from stage.pipeline.schedule import Action, Phases, Pipeline, Schedule
from stage.pipeline.schedules.rounds import in_rounds, refuse_uneven_rounds, round_size

__all__ = ["ZB_H1"]


def zb_h1(pipeline: Pipeline, rank: int) -> Phases:
    """The order of a rank.

    >>> print(zb_h1(Pipeline(2, 3), 1))
    - | 0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 | 0W2
    """
    forwards, backwards, weights = (in_rounds(pipeline, kind) for kind in "FIW")
    deep = (pipeline.chunks - 1) * round_size(pipeline) + pipeline.ranks - 1 - rank
    warmup = min(deep, len(forwards))
    runs: list[list[Action]] = []
    for i, backward in enumerate(backwards):
        forward = forwards[warmup + i : warmup + i + 1]
        weight = [weights[i - rank]] if i >= rank else []
        runs.append([*forward, backward, *weight])
    full = len(forwards) - warmup
    return Phases(
        forwards[:warmup],
        [action for run in runs[:full] for action in run],
        [action for run in runs[full:] for action in run] + weights[max(0, len(weights) - rank) :],
    )


ZB_H1 = Schedule("zb-h1", zb_h1, chunks=(1, None), splits=True, refuses=refuse_uneven_rounds)
