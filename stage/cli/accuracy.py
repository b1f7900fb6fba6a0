"""`stage bench-accuracy`: predictions of published runs beside what was measured."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stage.cli.options import Json
from stage.cli.output import print_json, print_table, progress_bar
from stage.errors import StageError

__all__ = ["HELP", "bench_accuracy"]

HELP = """Predict the step times of published runs and compare.

\b
Examples:
  stage bench-accuracy --set simumax_b200_real_vs_perf
  stage bench-accuracy                              all sets; takes minutes
  stage bench-accuracy --rows more.csv --set korthikanti2022_table5_e2e --json"""

Rows = Annotated[
    Path | None,
    typer.Option("--rows", metavar="FILE.csv", help="Other rows, with the columns of the set."),
]
Set = Annotated[str | None, typer.Option("--set", metavar="NAME", help="One set of stage/published/data.")]


def bench_accuracy(*, name: Set = None, rows: Rows = None, json: Json = False) -> None:
    """Predict the rows of each set and print their errors."""
    from stage.published.row import published_rows, read_rows
    from stage.published.time_accuracy import TIME_SETS, time_set

    if rows is not None and name is None:
        raise StageError(f"--rows {rows}: give --set too, the set whose columns the file has")
    if name is not None:
        time_set(name)
    names = list(TIME_SETS) if name is None else [name]
    with progress_bar("predicting sets", quiet=json) as progress:
        found = []
        for done, one in enumerate(names, 1):
            found.append(_set(one, published_rows(one) if rows is None else read_rows(rows)))
            if progress is not None:
                progress(done, len(names))
    if json:
        print_json({"sets": found})
        return
    print_table([group for one in found for group in one["groups"]])
    if name is not None:
        print()
        print_table(found[0]["rows"])


def _set(name: str, rows: list[Any]) -> dict[str, Any]:
    """The errors of a set as plain values: by group, by row, and what was left out by why."""
    from stage.cost.roofline import Roofline
    from stage.published.time_accuracy import time_accuracy, time_set

    accuracy, bounds = time_accuracy(name, rows, Roofline), time_set(name).bounds
    return {
        "set": name,
        "groups": [
            {"set": name, "group": group, **numbers, "bound": bounds.get(group)}
            for group, numbers in accuracy.groups.items()
        ],
        "rows": [
            {"case": row.case, "predicted": row.predicted, "measured": row.measured, "error": row.error}
            for row in accuracy.rows
        ],
        "left_out": dict(accuracy.left_out),
        "public_tools": dict(time_set(name).public),
    }
