"""What the speed of synthesis is held to: `python -m benchmarks.speed`, or `make bench`.

Each row runs whole processes, prints what they took beside its bound, and all are written to
`benchmarks/results/speed.json`. `--quick` leaves out most models and writes fewer ranks beside `cp -r`.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import ROOT, Row, Usage, best_of, free_bytes, python, run, stage, wall
from stage.catalog import list_models

__all__ = ["main"]

RESULTS = ROOT / "benchmarks" / "results" / "speed.json"
REPEATS = 3
MIB = 1 << 20
DENSE = "gpt3-530b --set layers=118,d_model=18432,heads=48 --tp 8 --pp 16 --stage-layers 7x10,8x6"
LARGE = "llama3.1-405b --tp 8 --cp 2 --pp 16 --stage-layers 7,8x14,7 --gpus 131072 --batch 8192 --seq 8192"
QUICK_MODELS = ("llama3.1-405b", "mixtral-8x22b", "deepseek-v3", "gpt-oss-120b")

ZOO = """
import sys, stage
traces = stage.synthesize(sys.argv[1], gpus=16, tp=2, batch=16)
print(len(traces.rank(0)) + len(traces.rank(15)))
"""
EXPANSION = """
import resource, stage
def expand(micro_batches):
    traces = stage.synthesize("llama3.1-70b", gpus=32, tp=4, pp=4, batch=2 * micro_batches)
    started = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    traces = stage.synthesize("llama3.1-70b", gpus=32, tp=4, pp=4, batch=2 * micro_batches)
    for number in range(4):
        traces.classes.image(number)
    took = resource.getrusage(resource.RUSAGE_SELF).ru_utime - started
    return took, sum(summary["nodes"] for summary in traces.summaries)
(few, fewer_nodes), (many, nodes) = expand(32), expand(256)
print((many - few) / (nodes - fewer_nodes))
"""
RANKS = """
import json, sys, time, stage
traces = stage.synthesize(
    "llama3.1-405b", tp=8, cp=2, pp=16, gpus=131072, batch=8192, seq=8192, stage_layers=[7, *[8] * 14, 7]
)
size = len(traces.rank(0))
first = time.time() - float(sys.argv[1])
slowest = 0.0
for rank in [*range(0, 131072, 8192), *range(1, 131072, 4099), 131071]:
    started = time.perf_counter()
    assert traces.rank(rank)
    slowest = max(slowest, time.perf_counter() - started)
print(json.dumps([first, slowest]))
"""
VERIFY = """
import stage
from stage.verification import verify_set
report = verify_set(stage.synthesize(
    "llama3.1-405b", tp=8, cp=2, pp=16, gpus=131072, batch=8192, seq=8192, stage_layers=[7, *[8] * 14, 7]
))
assert report.ok and report.ranks == 131072 and not report.unchecked, report.defects
"""


def user(usage: Usage) -> float:
    """Seconds of processor in the program itself."""
    return usage.user


def start(folder: Path, quick: bool) -> Iterator[Row]:
    """Commands that compute nothing."""
    del folder, quick
    for command in ("--help", "models"):
        stage(command)  # compiles what is new
        taken = best_of(REPEATS, lambda command=command: stage(command), wall)  # type: ignore[misc]
        yield Row(f"stage {command}", "s", 0.35, taken.wall)


def zoo(folder: Path, quick: bool) -> Iterator[Row]:
    """The model of the catalog that takes longest, and what a node of a schedule takes."""
    del folder
    names = QUICK_MODELS if quick else [model.name for model in list_models()]
    python(ZOO, names[0])
    taken = {name: best_of(1 if quick else 2, lambda n=name: python(ZOO, n), user) for name in names}  # type: ignore[misc]
    slowest = max(names, key=lambda name: taken[name].user)
    yield Row(
        f"{slowest}, the slowest of {len(names)} models: symbols and images",
        "s user",
        1.5,
        taken[slowest].user,
    )
    steep = min(float(python(EXPANSION).output) for _ in range(REPEATS))
    yield Row("expansion of a schedule, a node", "µs user", 0.3, 1e6 * steep)


def small(folder: Path, quick: bool) -> Iterator[Row]:
    """An 80-layer model, written for 64 and for 1,024 ranks; the second takes no more memory."""
    del quick
    usages = {}
    for dp, bound in ((4, 1.0), (64, 1.5)):
        line = f"synth llama3-70b --dp {dp} --tp 4 --pp 4 --batch {4 * dp} --force --out {folder / 'small'}"
        usages[dp] = best_of(REPEATS, lambda line=line: stage(*line.split()), user)  # type: ignore[misc]
        yield Row(f"80 layers, {16 * dp:,} ranks, written", "s user", bound, usages[dp].user)
    extra = (usages[64].peak_bytes - usages[4].peak_bytes) / MIB
    yield Row("memory of 1,024 ranks beyond that of 64", "MiB", 8, max(0.0, extra))


def long(folder: Path, quick: bool) -> Iterator[Row]:
    """A step of many micro-batches."""
    line = f"synth llama3.1-70b --gpus 32 --tp 4 --pp 4 --batch 256 --force --out {folder / 'long'}"
    taken = best_of(1 if quick else REPEATS, lambda: stage(*line.split()), user)
    yield Row("Llama-3.1-70B, 32 ranks, 128 micro-batches, written", "s user", 5, taken.user)
    yield Row("its peak", "MiB", 400, taken.peak_bytes / MIB)


def copied(folder: Path, quick: bool) -> Iterator[Row]:
    """A dense model on many ranks beside a copy of the same files: in turns, medians."""
    dp = 8 if quick else 256
    out, copy = folder / "dense", folder / "copy"
    line = f"synth {DENSE} --dp {dp} --batch {dp} --out {out} --json"
    writing, copying = [], []
    for _ in range(REPEATS):
        writing.append(stage(*line.split()).wall)
        copying.append(run(["cp", "-r", str(out), str(copy)]).wall)
        run(["rm", "-rf", str(out), str(copy)])
    wrote, cp = statistics.median(writing), statistics.median(copying)
    yield Row(f"540B dense, {128 * dp:,} ranks, written", "s wall", 1.5 * cp + 2, wrote, wrote / cp)


def large(folder: Path, quick: bool) -> Iterator[Row]:
    """Single ranks of a job of 131,072."""
    del quick
    usages = [python(RANKS, str(time.time())) for _ in range(REPEATS)]
    found = [json.loads(usage.output) for usage in usages]
    yield Row(
        "Llama-3.1-405B, 131,072 ranks: the first rank's bytes", "s", 4, min(first for first, _ in found)
    )
    yield Row("the slowest of 49 further ranks", "ms", 20, 1e3 * min(slowest for _, slowest in found))
    line = f"synth {LARGE} --ranks 0 --force --out {folder / 'large'} --json"
    taken = best_of(REPEATS, lambda: stage(*line.split()), wall)
    yield Row("one rank and groups.json, written", "s", 4, taken.wall)
    yield Row("its peak", "MiB", 500, taken.peak_bytes / MIB)
    proof = python(VERIFY)
    yield Row("all 131,072 ranks verified by classes", "s", 60, proof.wall)
    yield Row("its peak", "MiB", 500, proof.peak_bytes / MIB)


PARTS: dict[Callable[[Path, bool], Iterator[Row]], tuple[int, int]] = {
    start: (0, 0),
    zoo: (0, 0),
    small: (2 << 30, 2 << 30),
    long: (2 << 30, 2 << 30),
    copied: (8 << 30, 1 << 30),
    large: (1 << 30, 1 << 30),
}
"""What is measured, and the bytes of disk that it needs, whole and quick."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write the results; the exit status says whether all bounds hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer models, fewer ranks beside cp -r")
    parser.add_argument(
        "--folder", type=Path, help="where to write traces; by default the system's temporary one"
    )
    chosen = parser.parse_args(arguments)
    rows: list[Row] = []
    skipped = []
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} processors, load {load:.1f}, Python {platform.python_version()}\n")
    print(f"{'work':<64} {'bound':>9} {'measured':>9}  unit     x cp -r  met")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        for part, need in PARTS.items():
            if free_bytes(folder) < need[chosen.quick]:
                skipped.append(
                    f"{part.__name__}: needs {need[chosen.quick] >> 30} GiB of disk in {folder.parent}"
                )
                continue
            for row in part(folder, chosen.quick):
                rows.append(row)
                ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
                met = "yes" if row.met else "NO"
                print(
                    f"{row.work:<64} {row.bound:>9.2f} {row.measured:>9.3f}  {row.unit:<8} {ratio:>7}  {met}"
                )
    for line in skipped:
        print(f"skipped: {line}")
    write(rows, skipped, load, quick=chosen.quick)
    return int(bool(skipped) or not all(row.met for row in rows))


def write(rows: list[Row], skipped: list[str], load: float, *, quick: bool) -> None:
    """Write the results as JSON."""
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {
        "processors": os.cpu_count(),
        "load": load,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    found = {
        "machine": machine,
        "quick": quick,
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "skipped": skipped,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
