"""How well peak memory of published runs is predicted: errors of the rows of a set, and what was left out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from stage.errors import StageError
from stage.published import megatron_ci, simumax_b200
from stage.published.comparison import Compared, compare, summarize
from stage.published.row import Row

__all__ = ["BOUNDS", "MEMORY_SETS", "MemoryAccuracy", "memory_accuracy"]

MEMORY_SETS: Mapping[str, ModuleType] = {
    "simumax_b200_real_vs_perf": simumax_b200,
    "megatron_ci_golden_iter_time_memory": megatron_ci,
}
BOUNDS: Mapping[str, float] = {
    "simumax_b200_real_vs_perf": 0.03,
    "megatron_ci_golden_iter_time_memory": 0.05,
}


@dataclass(frozen=True, slots=True)
class MemoryAccuracy:
    """Rows that were predicted, and how many were left out by why."""

    rows: tuple[Compared, ...]
    left_out: Mapping[str, int]

    @property
    def summary(self) -> dict[str, float]:
        """Median, mean and worst of the absolute errors; nothing of no rows."""
        return summarize(self.rows)


def memory_accuracy(name: str, rows: Iterable[Row]) -> MemoryAccuracy:
    """The rows of a set, predicted; a row that is no job is left out with what is said of it."""
    if name not in MEMORY_SETS:
        raise StageError(f"set '{name}' has no memory; choose one of {', '.join(MEMORY_SETS)}")
    model = MEMORY_SETS[name]

    def predicted(row: Row) -> Compared:
        return Compared(row["case"], model.predict_memory(row), model.measured_memory(row))

    return MemoryAccuracy(*compare(rows, model.left_out, predicted))
