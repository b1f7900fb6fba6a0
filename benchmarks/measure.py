"""Measures of whole processes: what the operating system says they took, from start to exit."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Row", "Usage", "best_of", "free_bytes", "python", "run", "stage", "wall"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process took: seconds of wall and of processor, and its largest memory; and what it printed."""

    wall: float
    user: float
    system: float
    peak_bytes: int
    output: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the work, what was measured in which unit, and the bound; `ratio` is to `cp -r`."""

    work: str
    unit: str
    bound: float
    measured: float
    ratio: float | None = None

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        return self.measured <= self.bound


def run(command: Sequence[str]) -> Usage:
    """Run a command to its end; a failure is an error that shows what it printed."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPATH"] = str(ROOT)
    started = time.perf_counter()
    with subprocess.Popen(  # noqa: S603 - the benchmark's own commands
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    took = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{output}")
    return Usage(took, used.ru_utime, used.ru_stime, used.ru_maxrss * 1024, output)


def stage(*arguments: str) -> Usage:
    """Run the command line."""
    return run([sys.executable, "-m", "stage", *arguments])


def python(code: str, *arguments: str) -> Usage:
    """Run a program of Python."""
    return run([sys.executable, "-c", code, *arguments])


def best_of(count: int, measure: Callable[[], Usage], key: Callable[[Usage], float]) -> Usage:
    """The best of several runs."""
    return min((measure() for _ in range(count)), key=key)


def wall(usage: Usage) -> float:
    """Seconds from start to exit."""
    return usage.wall


def free_bytes(folder: Path) -> int:
    """What the disk of a folder has left."""
    return shutil.disk_usage(folder).free
