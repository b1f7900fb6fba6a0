"""GPipe: all forwards, then all backwards in the same order (Huang et al. 2019)."""

from stage.pipeline.schedule import Action, Phases, Pipeline, Schedule

__all__ = ["GPIPE"]


def gpipe(pipeline: Pipeline, _rank: int) -> Phases:
    """The order is the same on every rank.

    >>> print(gpipe(Pipeline(2, 2), 0))
    0F0 0F1 | - | 0B0 0B1
    """
    forwards, backwards = ([Action(kind, 0, i) for i in range(pipeline.micro_batches)] for kind in "FB")
    return Phases(warmup=forwards, cooldown=backwards)


GPIPE = Schedule("gpipe", gpipe)
