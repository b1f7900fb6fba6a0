"""What a pipeline schedule is: the order in which each rank runs forwards and backwards of its stages.

A model is cut into **virtual stages**, of which a rank holds one or several, its **chunks**. An action runs one chunk
on one micro-batch: `F` forward, `B` backward, or its halves `I` (the gradient of the input, for which the stage before
waits) and `W` (the gradients of the weights, for which nobody waits before the end of the step).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Action", "Phases", "Pipeline", "Schedule"]


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank's order: `kind` is `F`, `B`, `I` or `W`."""

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


class Phases(NamedTuple):
    """A rank's actions: those that fill the pipeline, those while it is full, and those that drain it."""

    warmup: Sequence[Action] = ()
    steady: Sequence[Action] = ()
    cooldown: Sequence[Action] = ()

    @property
    def actions(self) -> list[Action]:
        """All actions, in order."""
        return [*self.warmup, *self.steady, *self.cooldown]

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, phase)) or "-" for phase in self)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The shape of a pipeline: `ranks` (pp), micro-batches of a step, chunks a rank, and where stages are.

    Stages go round the ranks in a loop (0, 1, .., 0, 1, ..), or down and up again in a V (0, 1, .., 1, 0).

    >>> loop, v = Pipeline(4, 8, 2), Pipeline(4, 8, 2, v_shaped=True)
    >>> [loop.stage(1, chunk) for chunk in (0, 1)], [v.stage(1, chunk) for chunk in (0, 1)]
    ([1, 5], [1, 6])
    >>> loop.place(4), v.place(4)
    ((0, 1), (3, 1))
    """

    ranks: int
    micro_batches: int
    chunks: int = 1
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        """Virtual stages of all ranks."""
        return self.ranks * self.chunks

    @property
    def marks(self) -> tuple[str, ...]:
        """What nodes of a micro-batch are marked with besides it."""
        return ("chunk",) * (self.chunks > 1) + ("pipeline_phase",) * (self.ranks > 1)

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is a rank's chunk."""
        backwards = self.v_shaped and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if backwards else rank)

    def place(self, stage: int) -> tuple[int, int]:
        """The rank that holds a virtual stage, and which of its chunks it is."""
        chunk, along = divmod(stage, self.ranks)
        return (self.ranks - 1 - along if self.v_shaped and chunk % 2 else along), chunk


def _anything(_pipeline: Pipeline) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: its name, the order of a rank, and what it demands.

    `chunks` are how many a rank may hold: the least (which is the default) and the most, None for any. `refuses` says
    in a sentence why a pipeline of allowed chunks is not possible, else None. `splits` says whether there are `I` and
    `W` besides, or instead of, `B`.
    """

    name: str
    order: Callable[[Pipeline, int], Phases]
    chunks: tuple[int, int | None] = (1, 1)
    v_shaped: bool = False
    splits: bool = False
    refuses: Callable[[Pipeline], str | None] = field(default=_anything)

    def allows(self, chunks: int) -> bool:
        """Whether a rank may hold so many chunks."""
        least, most = self.chunks
        return chunks >= least and (most is None or chunks <= most)
