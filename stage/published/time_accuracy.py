"""How well step times of published runs are predicted: errors of the rows of a set, and what was left out.

A set is a table of `stage/published/data`, and a module that says of a row which job it is (`PublishedTimes`). A row's
prediction is the timeline of that job under a cost model made for its system and for how its host issues kernels, and
depends on nothing that was measured.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stage.cost.system import System
from stage.cost.system_file import load_system
from stage.cost.work import CostModel
from stage.errors import StageError
from stage.estimate import estimate_time
from stage.published import (
    korthikanti2022,
    mlperf_pretraining,
    mosaic_mpt,
    nvidia_dgxc,
    simumax_b200,
    vtrain_single,
)
from stage.published.comparison import Compared, compare, summarize
from stage.published.row import Row
from stage.request import Request
from stage.synthesis import plan_job

__all__ = [
    "TIME_SETS",
    "MakeCost",
    "PublishedTimes",
    "TimeAccuracy",
    "TimeSet",
    "predict_seconds",
    "time_accuracy",
    "time_set",
]

MakeCost = Callable[[System, str], CostModel]
"""A cost model of a system, for a host that issues kernels `eager`, `compiled` or in a `graph`."""


class PublishedTimes(Protocol):
    """What a module of a set says of its rows."""

    def cases(self, row: Row) -> list[Row]:
        """The measurements of a row, each as a row with a `case`; what follows is of these."""

    def group(self, row: Row) -> str:
        """The part of the set that a row belongs to, which has a bound of its own."""

    def left_out(self, row: Row) -> str | None:
        """Why a row is not predicted; None where it is."""

    def row_request(self, row: Row) -> Request:
        """The job of a row."""

    def row_system(self, row: Row) -> str:
        """The name of its system."""

    def row_issue(self, row: Row) -> str:
        """How its host issues kernels: `eager`, `compiled` or in a `graph`."""

    def measured_seconds(self, row: Row) -> float:
        """What was measured."""


@dataclass(frozen=True, slots=True)
class TimeSet:
    """A set: its module, the bound of each group's mean absolute error, and the errors that public tools have."""

    rows: PublishedTimes
    bounds: Mapping[str, float]
    public: Mapping[str, str] = field(default_factory=dict)


TIME_SETS: Mapping[str, TimeSet] = {
    "korthikanti2022_table5_e2e": TimeSet(
        korthikanti2022,
        {"all": 0.035},
        {"Calculon": "3.65 % (its own validation set)", "SimuMax": "5.4 to 6.0 %", "llm-analysis": "11.5 %"},
    ),
    "vtrain_ground_truth_single": TimeSet(
        vtrain_single,
        {"all": 0.10},
        {"Calculon": "38.9 %", "SimuMax": "30.4 %", "llm-analysis": "62 %"},
    ),
    "nvidia_dgxc_benchmarking_step_times": TimeSet(
        nvidia_dgxc,
        {"dense bf16": 0.06, "dense fp8": 0.06, "MoE and hybrid bf16": 0.08, "MoE and hybrid fp8": 0.08},
    ),
    "simumax_b200_real_vs_perf": TimeSet(
        simumax_b200, {"all": 0.05}, {"SimuMax": "about 2 to 4 % (fitted to shapes on that machine)"}
    ),
    "mlperf_gpt3_llama405b": TimeSet(mlperf_pretraining, {"all": 0.07}),
    "mosaic_llmfoundry_mpt_fsdp_a100_h100": TimeSet(mosaic_mpt, {"all": 0.08}),
}


@dataclass(frozen=True, slots=True)
class TimeAccuracy:
    """Cases that were predicted, and how many were left out by why."""

    rows: tuple[Compared, ...]
    left_out: Mapping[str, int]

    @property
    def groups(self) -> dict[str, dict[str, float]]:
        """Of each group how many cases it has, and the median, mean and worst of their absolute errors."""
        names = dict.fromkeys(row.group for row in self.rows)
        parts = {name: [row for row in self.rows if row.group == name] for name in names}
        return {name: {"cases": len(rows), **summarize(rows)} for name, rows in parts.items()}


def time_set(name: str) -> TimeSet:
    """The set of this name; a `StageError` that lists them for any other."""
    if name not in TIME_SETS:
        raise StageError(f"set '{name}' has no step times; choose one of {', '.join(TIME_SETS)}")
    return TIME_SETS[name]


def predict_seconds(request: Request, system: System, cost: CostModel) -> float:
    """Seconds of a step of a job on a system, whose work this model prices."""
    return estimate_time(plan_job(request), system, cost).step_seconds


def time_accuracy(name: str, rows: Iterable[Row], make: MakeCost) -> TimeAccuracy:
    """The rows of a set, predicted by the cost models that `make` makes.

    A row that is no job of this tool is left out with what is said of it.
    """
    told, costs = time_set(name).rows, _Costs(make)
    cases = (case for row in rows for case in told.cases(row))
    return TimeAccuracy(*compare(cases, told.left_out, lambda row: _compared(told, row, costs)))


class _Costs:
    """The cost models of the systems and hosts of a set, each made once."""

    def __init__(self, make: MakeCost) -> None:
        self.make = make
        self.made: dict[tuple[str, str], tuple[System, CostModel]] = {}

    def of(self, system: str, issue: str) -> tuple[System, CostModel]:
        key = system, issue
        if key not in self.made:
            described = load_system(system)
            self.made[key] = described, self.make(described, issue)
        return self.made[key]


def _compared(told: PublishedTimes, row: Row, costs: _Costs) -> Compared:
    """A row's prediction beside what was measured."""
    measured, request = told.measured_seconds(row), told.row_request(row)
    predicted = predict_seconds(request, *costs.of(told.row_system(row), told.row_issue(row)))
    return Compared(row["case"], predicted, measured, told.group(row))
