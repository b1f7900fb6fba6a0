"""1F1B: a warm-up of forwards as deep as the pipeline below the rank, then pairs, then the last backwards.

PipeDream-Flush (Narayanan et al. 2021, section 2.2.1).
"""

from stage.pipeline.schedule import Action, Phases, Pipeline, Schedule

__all__ = ["ONE_FORWARD_ONE_BACKWARD"]


def one_forward_one_backward(pipeline: Pipeline, rank: int) -> Phases:
    """The order of a rank.

    >>> print(one_forward_one_backward(Pipeline(2, 3), 0))
    0F0 | 0F1 0B0 0F2 0B1 | 0B2
    """
    forwards, backwards = ([Action(kind, 0, i) for i in range(pipeline.micro_batches)] for kind in "FB")
    warmup = min(pipeline.ranks - rank - 1, pipeline.micro_batches)
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return Phases(
        forwards[:warmup], [action for pair in pairs for action in pair], backwards[len(backwards) - warmup :]
    )


ONE_FORWARD_ONE_BACKWARD = Schedule("1f1b", one_forward_one_backward)
