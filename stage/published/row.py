"""A row of a table of published measurements: texts by the names of columns."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from stage.errors import StageError
from stage.files import open_file

__all__ = ["Row", "decimal", "number", "published_rows", "read_rows", "text"]

Row = Mapping[str, str]


def text(row: Row, column: str, default: str = "") -> str:
    """What a cell says, or the default where it is empty; a `StageError` for a column that the table does not have."""
    if column not in row:
        raise StageError(
            f"column '{column}' is missing; this set has it, so give a table with the set's columns"
        )
    return row[column].strip() or default


def number(row: Row, column: str, default: int | None = None) -> int:
    """A cell as a whole number; a `StageError` where it is none."""
    found = text(row, column, "" if default is None else str(default))
    try:
        return round(float(found))
    except (ValueError, OverflowError):
        raise StageError(
            f"column '{column}' is {found!r}, where a number is needed; correct the row"
        ) from None


def decimal(row: Row, column: str) -> float:
    """A cell as a number above 0; a `StageError` where it is none."""
    found = text(row, column)
    try:
        value = float(found)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise StageError(f"column '{column}' is {found!r}, where a number above 0 is needed; correct the row")
    return value


def published_rows(name: str) -> list[Row]:
    """The rows of a set that are shipped; the set's module names their source."""
    return read_rows(Path(__file__).parent / "data" / f"{name}.csv")


def read_rows(file: str | Path) -> list[Row]:
    """The rows of a CSV file."""
    try:
        with open_file(Path(file)) as data, io.TextIOWrapper(data, encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))
    except OSError as err:
        raise StageError(f"{file}: {err.strerror}; give a CSV file that can be read") from err
    except (UnicodeDecodeError, csv.Error) as err:
        raise StageError(f"{file}: not a CSV file in UTF-8 ({err}); give one") from err
