"""Tapes: what an action of a schedule places, recorded once, to be replayed for every other that does the same.

While a tape is recorded, numbers that differ from run to run (the first id, the micro-batch, what ran before) are
**symbols**: a symbol's number and an offset in one integer. A replay gives each symbol its value; rows of instances are
then sums of columns, and a micro-batch costs the same however many blocks it runs through.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stage.trace.program import Assembly, Rows

__all__ = ["Recorder", "Symbol", "Tape"]

Ints = NDArray[np.int64]

Symbol = tuple[str] | tuple[str, Hashable]
"""What stands for a number: a name, and what it is of. `own` is the first id of a run."""

OFFSET_BITS = 40
OFFSET = (1 << OFFSET_BITS) - 1


@dataclass(frozen=True, slots=True)
class Tape:
    """The instances that a run places, and what it leaves behind, in terms of `symbols`."""

    symbols: tuple[Symbol, ...]
    nodes: int
    rows: tuple[tuple[Rows, Ints], ...]
    lasts: tuple[tuple[str, int], ...]
    contexts: list[Sequence[int]] = field(default_factory=list)

    def value(self, number: int, values: Sequence[int]) -> int:
        """What a recorded number is in a run whose symbols have these values."""
        symbol = number >> OFFSET_BITS
        return number if symbol <= 0 else values[symbol - 1] + (number & OFFSET)

    def replay(self, assembly: Assembly, values: Sequence[int]) -> None:
        """Place the instances of one more run after all others."""
        self.contexts.append(values)
        lasts = {queue: self.value(number, values) for queue, number in self.lasts}
        assembly.advance(self.nodes, lasts)

    def unroll(self) -> None:
        """Hand the rows of all runs to those of their templates."""
        contexts = np.array(self.contexts, np.int64).reshape(len(self.contexts), len(self.symbols))
        values = np.concatenate([np.zeros((len(contexts), 1), np.int64), contexts], axis=1)
        for rows, numbers in self.rows:
            symbols = np.maximum(numbers >> OFFSET_BITS, 0)
            offsets = np.where(symbols > 0, numbers & OFFSET, numbers)
            rows.columns.append((offsets + values[:, symbols]).reshape(-1, numbers.shape[1]))


class Recorder(Assembly):
    """An assembly that records: it starts at the symbol `own`, and what is not its own are symbols."""

    def __init__(self, assembly: Assembly) -> None:
        super().__init__(step=assembly.step, chunk=assembly.chunk)
        self._program = assembly
        self._symbols: dict[Symbol, int] = {}
        self.nodes = self._first = self.symbol("own")
        self.step, self.pipeline_phase = self.symbol("step"), self.symbol("pipeline_phase")

    def symbol(self, name: str, *of: Hashable) -> int:
        """The number that stands for what has this name, and is of something."""
        return self._symbols.setdefault((name, *of), 1 + len(self._symbols)) << OFFSET_BITS  # type: ignore[arg-type]

    def renamed(self, tape: Tape, number: int, name: str) -> int:
        """A number of another tape as one of this: its symbol becomes that of the same in the run called `name`."""
        symbol = number >> OFFSET_BITS
        if symbol <= 0:
            return number
        return self.symbol(name, tape.symbols[symbol - 1]) + (number & OFFSET)

    def last(self, queue: str) -> int:
        """The id of the last node placed on a queue, which may have been before the recording began."""
        found = self._last.get(queue)
        return self.symbol("last", queue) if found is None else found

    def tape(self) -> Tape:
        """What was placed; its templates get their rows in the program that is recorded for."""
        rows = [(self._program.rows(own.template), np.array(own.placed, np.int64)) for own in self.templates]
        return Tape(tuple(self._symbols), self.nodes - self._first, tuple(rows), tuple(self._last.items()))
