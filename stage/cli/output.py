"""Printing: JSON, tables that fit the terminal, and a progress bar.

A report is plain values (numbers, texts, lists of mappings, mappings), and one function prints any of them,
so that what `--json` gives and what a table shows are the same thing. Colours and the progress bar appear on
a terminal only.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "formula",
    "print_json",
    "print_report",
    "print_table",
    "print_warning",
    "progress_bar",
    "quantity",
]

Progress = Callable[[int, int], None]
REDRAW_SECONDS = 0.1

MOST_KEPT_WHOLE = 36
"""The longest word that a narrow column does not break."""

UNITS = (("bytes", "B"), ("flops", "FLOP"), ("_ops", "FLOP"))
"""What a number counts, by a part of its name."""


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object, in the order of its keys."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_warning(text: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"stage: warning: {text}\n")


def print_report(report: Mapping[str, object]) -> None:
    """Print nested plain values: scalars and flat mappings as lines, lists of mappings as tables."""
    lines = {key: value for key, value in report.items() if not _is_nested(value)}
    _print_lines(lines)
    for key, value in report.items():
        if isinstance(value, Mapping) and _is_nested(value):
            print(f"\n{_words(key)}")
            print_report(value)
        elif isinstance(value, Mapping) and value:
            print(f"\n{_words(key)}")
            _print_lines(value)
        elif isinstance(value, Sequence) and _is_nested(value):
            print(f"\n{_words(key)}")
            print_table(value)


def print_table(records: Sequence[Mapping[str, object]]) -> None:
    """Print records as a table with a column for each key that any of them has."""
    from rich.table import Table

    columns = list(dict.fromkeys(key for record in records for key in record))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in columns:
        numeric = all(isinstance(record.get(key, 0), int | float) for record in records)
        longest = max(
            len(word) for record in records for word in quantity(key, record.get(key)).split() or [""]
        )
        width = min(longest, MOST_KEPT_WHOLE)
        table.add_column(
            _words(key), justify="right" if numeric else "left", overflow="fold", min_width=width
        )
    for record in records:
        table.add_row(*(quantity(key, record.get(key)) for key in columns))
    console = _console()
    with console.capture() as shown:
        console.print(table)
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))  # without the padding at the end


def quantity(key: str, value: object) -> str:
    """A value as a reader wants it: exact below a million, then four digits and a unit.

    >>> quantity("bytes", 3 * 2**20), quantity("flops_forward", 15_990_000_000_000), quantity("layers", 1234)
    ('3.000 MiB', '15.99 TFLOP', '1,234')
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    unit = next((unit for part, unit in UNITS if part in key), "")
    if abs(value) < 10**6:
        return f"{value:,} {unit}".rstrip()
    step, prefixes = (1024, " KMGTPE") if unit == "B" else (1000, " kMGTPE")
    power = 0
    scaled: float = value
    while abs(scaled) >= step and power < len(prefixes) - 1:
        scaled, power = scaled / step, power + 1
    digits = f"{scaled:#.4g}".rstrip(".") if abs(scaled) < 10**4 else f"{scaled:.3e}"
    return f"{digits} {prefixes[power]}{'i' if unit == 'B' else ''}{unit}"


def formula(expression: str) -> str:
    """An expression as it is read, which a line can be broken in.

    >>> formula("2*batch*seq**2/(cp*dp)")
    '2 batch seq^2 / (cp dp)'
    """
    return expression.replace("**", "^").replace("*", " ").replace("/", " / ")


@contextmanager
def progress_bar(label: str, *, quiet: bool) -> Iterator[Progress | None]:
    """A function of (done, total) that moves a bar on a terminal's standard error; None elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        shown = 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if done == total or now - shown > REDRAW_SECONDS:
                shown = now
                bar.update(task, completed=done, total=total)

        yield show


@contextmanager
def interruptible() -> Iterator[None]:
    """Say on standard error what an interrupt leaves behind."""
    try:
        yield
    except KeyboardInterrupt as stop:
        for note in getattr(stop, "__notes__", ()):
            sys.stderr.write(f"stage: interrupted: {note}\n")
        raise


def _print_lines(values: Mapping[str, object]) -> None:
    width = max((len(_words(key)) for key in values), default=0)
    console = _console()
    for key, value in values.items():
        shown = quantity(key, value)
        exact = isinstance(value, int) and abs(value) >= 10**6
        text = f"{value:,} ({shown})" if exact else shown
        console.print(f"{_words(key):<{width}}  {text}", soft_wrap=True)


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _is_nested(value: object) -> bool:
    if isinstance(value, Mapping):
        return True
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def _words(key: str) -> str:
    return key.replace("_", " ")


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_text(item) for item in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
