"""Cases: one configuration of a record file with the events it holds, and the verdict on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.records.event import Event

__all__ = ["Case", "Verdict"]


@dataclass(frozen=True, slots=True)
class Case:
    """A recorded configuration: `ranks` holds the events of those ranks that were recorded."""

    name: str
    config: Mapping[str, Any]
    ranks: Mapping[int, Sequence[Event]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case.

    `skipped` says why it was not compared; `explained` holds for each explanation its reason and the number of events
    it accounts for on all ranks; `unexplained` the lines of what none accounts for.
    """

    case: str
    ranks: int = 0
    events: int = 0
    skipped: str = ""
    explained: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    unexplained: Sequence[str] = ()

    @property
    def status(self) -> str:
        """`identical`, `explained`, `unexplained` or `skipped`."""
        if self.skipped:
            return "skipped"
        if self.unexplained:
            return "unexplained"
        return "explained" if self.explained else "identical"

    def lines(self) -> list[str]:
        """The verdict as text: one line, then an indented line for each explanation and each difference."""
        head = f"{self.case}: "
        if self.skipped:
            return [f"{head}skipped: {self.skipped}"]
        counted = f"{self.events} events on {self.ranks} rank{'s' * (self.ranks != 1)}"
        count = len(self.explained)
        known = f"{count} explained difference{'s' * (count != 1)}"
        if self.unexplained:
            known = f"UNEXPLAINED ({known})" if count else "UNEXPLAINED"
        lines = [f"{head}{known if count or self.unexplained else 'identical'} ({counted})"]
        lines += [f"  {slug} ({n} events): {reason}" for slug, (reason, n) in self.explained.items()]
        return lines + [f"  {line}" for line in self.unexplained]
