"""Pipeline schedules: the order in which each stage runs its forwards and backwards.

An action is (`F` or `B`, micro-batch). Both schedules here keep one stage a rank; `order` is called for one stage and
knows nothing of what a stage holds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stage.errors import StrategyError

__all__ = ["SCHEDULES", "Action", "order"]


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a stage's order: `kind` is `F` or `B`."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def gpipe(_stage: int, _stages: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards in the same order, on every stage alike (Huang et al. 2019).

    >>> " ".join(map(str, gpipe(0, 2, 2)))
    'F0 F1 B0 B1'
    """
    return [Action(kind, i) for kind in "FB" for i in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B: a warm-up of forwards as deep as the pipeline below the stage, then pairs, then the last backwards.

    PipeDream-Flush (Narayanan et al. 2021, section 2.2).

    >>> " ".join(map(str, one_forward_one_backward(0, 2, 3)))
    'F0 F1 B0 F2 B1 B2'
    """
    warmup = min(stages - stage - 1, micro_batches)
    actions = [Action("F", i) for i in range(warmup)]
    for i in range(warmup, micro_batches):
        actions += [Action("F", i), Action("B", i - warmup)]
    return actions + [Action("B", i) for i in range(micro_batches - warmup, micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The actions of one stage; a `StrategyError` for a schedule that is not known."""
    if schedule not in SCHEDULES:
        raise StrategyError(
            f"schedule {schedule!r} is not known; choose one of {', '.join(sorted(SCHEDULES))}"
        )
    return SCHEDULES[schedule](stage, stages, micro_batches)
