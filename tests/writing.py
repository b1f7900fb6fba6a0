"""A small job to write, and what tests of writing ask of a folder and of a process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import stage

__all__ = ["SIZES", "command", "content", "job", "start", "wait_for_ranks"]

SIZES = {"d_model": 64, "d_ff": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}


def job(gpus: int = 16, layers: int = 4, **options: Any) -> stage.TraceSet:
    """The trace set of a tiny model; of one layer, on one stage."""
    chosen: dict[str, Any] = {"tp": 2, "pp": min(layers, 2), "batch": gpus // 2, "seq": 32, **options}
    return stage.synthesize("llama3-8b", gpus=gpus, sizes={**SIZES, "layers": layers}, **chosen)


def command(out: Path | str, *more: str, gpus: int = 16, layers: int = 4) -> list[str]:
    """The command that writes the same trace set."""
    sizes = ",".join(f"{name}={value}" for name, value in {**SIZES, "layers": layers}.items())
    degrees = f"--gpus {gpus} --tp 2 --pp {min(layers, 2)} --batch {gpus // 2}"
    line = f"synth llama3-8b --set {sizes} {degrees} --seq 32 --json"
    return [sys.executable, "-m", "stage", *line.split(), "--out", str(out), *more]


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(*arguments: str) -> subprocess.Popen[str]:
    """A process whose output is read at its end; it gives way to the test, which must see it half-way."""
    arguments = ("nice", "-n", "10", *arguments)
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_ranks(process: subprocess.Popen[str], partial: Path, count: int) -> None:
    """Wait until a process has written, and noted, so many ranks; it must not have finished by then."""
    journal = partial / "unfinished.journal"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > count:
            assert process.poll() is None, "the run was over before it could be stopped: make it larger"
            return
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    raise AssertionError(process.communicate())
