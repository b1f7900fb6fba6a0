"""How well peak memory of published runs is predicted: errors of the rows of a set, and what was left out."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from types import ModuleType

from stage.errors import StageError
from stage.published import megatron_ci, simumax_b200
from stage.published.row import Row

__all__ = ["BOUNDS", "MEMORY_SETS", "Compared", "MemoryAccuracy", "memory_accuracy"]

MEMORY_SETS: Mapping[str, ModuleType] = {
    "simumax_b200_real_vs_perf": simumax_b200,
    "megatron_ci_golden_iter_time_memory": megatron_ci,
}
BOUNDS: Mapping[str, float] = {
    "simumax_b200_real_vs_perf": 0.03,
    "megatron_ci_golden_iter_time_memory": 0.05,
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A row's case, and its bytes as predicted and as measured."""

    case: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """The relative error, negative where too little is predicted."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class MemoryAccuracy:
    """Rows that were predicted, and how many were left out by why."""

    rows: tuple[Compared, ...]
    left_out: Mapping[str, int]

    @property
    def errors(self) -> list[float]:
        """Absolute relative errors, ascending."""
        return sorted(abs(row.error) for row in self.rows)

    @property
    def summary(self) -> dict[str, float]:
        """Median, mean and worst of them; nothing of no rows."""
        errors = self.errors
        return {"median": median(errors), "mean": fmean(errors), "worst": errors[-1]} if errors else {}


def memory_accuracy(name: str, rows: Iterable[Row]) -> MemoryAccuracy:
    """The rows of a set, predicted; a row that is no job is left out with what is said of it."""
    if name not in MEMORY_SETS:
        raise StageError(f"set '{name}' has no memory; choose one of {', '.join(MEMORY_SETS)}")
    found: list[Compared] = []
    without: Counter[str] = Counter()
    model = MEMORY_SETS[name]
    for row in rows:
        why = model.left_out(row)
        try:
            if why is None:
                found.append(Compared(row["case"], model.predict_memory(row), model.measured_memory(row)))
        except StageError as err:
            why = f"no job of this tool: {err}"
        if why is not None:
            without[why] += 1
    return MemoryAccuracy(tuple(found), dict(without))
