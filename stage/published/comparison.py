"""Predictions beside measurements: errors of the rows of a set, and what was left out by why."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from stage.errors import StageError
from stage.published.row import Row

__all__ = ["Compared", "compare", "summarize"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A row's case and its group, and what is predicted beside what was measured: seconds, or bytes."""

    case: str
    predicted: float
    measured: float
    group: str = "all"

    @property
    def error(self) -> float:
        """The relative error, negative where too little is predicted."""
        return self.predicted / self.measured - 1


def compare(
    rows: Iterable[Row], left_out: Callable[[Row], str | None], predicted: Callable[[Row], Compared]
) -> tuple[tuple[Compared, ...], dict[str, int]]:
    """The rows that are predicted, and how many are left out by why.

    A row that is no job of this tool is left out with what is said of it.
    """
    found: list[Compared] = []
    without: Counter[str] = Counter()
    for row in rows:
        why = left_out(row)
        try:
            if why is None:
                found.append(predicted(row))
        except StageError as err:
            why = f"no job of this tool: {err}"
        if why is not None:
            without[why] += 1
    return tuple(found), dict(without)


def summarize(rows: Sequence[Compared]) -> dict[str, float]:
    """Median, mean and worst of the absolute errors; nothing of no rows."""
    errors = [abs(row.error) for row in rows]
    return {"median": median(errors), "mean": fmean(errors), "worst": max(errors)} if errors else {}
