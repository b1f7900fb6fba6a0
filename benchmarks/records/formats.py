"""The formats of record files: telling them apart, and what each needs to be compared."""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import megatron, schedules, torch_llama
from benchmarks.records.case import Case, Verdict
from benchmarks.records.compare import Context, Explanation, compare
from benchmarks.records.event import Event, RecordError, synthesized
from benchmarks.records.megatron_rules import OPTIMIZER_RULES
from benchmarks.records.moe_rules import MOE_RULES
from benchmarks.records.schedules import SCHEDULE_RULES
from benchmarks.records.torch_rules import TORCH_RULES
from stage.errors import StageError
from stage.traceset import TraceSet

__all__ = ["Format", "compare_case", "compare_file", "load", "recognise"]


@dataclass(frozen=True, slots=True)
class Format:
    """What a kind of record needs: its cases, why one can not be compared, its job, its rules.

    `marks` says whether it has compute marks; `seen` reduces synthesized events to what the record can hold.
    """

    name: str
    read: Callable[[Mapping[str, Any], str], list[Case]]
    synthesize: Callable[[Mapping[str, Any]], TraceSet]
    rules: Sequence[Explanation]
    skip: Callable[[Mapping[str, Any]], str] = lambda _: ""
    marks: bool = False
    seen: Callable[[Sequence[Event], str], list[Event]] = lambda events, _: list(events)


def _torch(kind: str) -> Format:
    return Format(
        kind, lambda data, _: torch_llama.read(data, kind), torch_llama.synthesize_case, TORCH_RULES
    )


def _pipeline(name: str, read: Callable[[Mapping[str, Any]], list[Case]]) -> Format:
    return Format(
        name, lambda data, _: read(data), schedules.synthesize_case, SCHEDULE_RULES, schedules.skip_reason, True,
        schedules.seen,
    )  # fmt: skip


MEGATRON = Format(
    "megatron",
    megatron.read,
    megatron.synthesize_case,
    (*MOE_RULES, *OPTIMIZER_RULES),
    megatron.skip_reason,
    True,
)
RUNTIME = _pipeline("pipeline runtime", schedules.read_runtime)
TABLES = _pipeline("pipeline tables", schedules.read_tables)
TORCH = {kind: _torch(kind) for kind in ("dtensor", "fsdp2", "checkpoint")}


def load(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file, which may be compressed with gzip; a `RecordError` in one line if it is none."""
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except OSError as err:
        raise RecordError(f"{path}: can not be read: {err.strerror or err}") from err
    except (ValueError, EOFError, RecursionError) as err:
        raise RecordError(f"{path}: not valid JSON: {err}") from err
    if not isinstance(data, dict):
        raise RecordError(f"{path}: holds a {type(data).__name__}, where a record is an object")
    return data


def recognise(data: Mapping[str, Any]) -> Format:
    """The format of a record, by the keys that it has; a `RecordError` for any other."""
    if "ranks" in data and "config" in data:
        return MEGATRON
    if "schedules" in data:
        return TABLES
    runs = data.get("runs")
    if isinstance(runs, list) and runs and isinstance(runs[0], dict):
        if "schedule" in runs[0]:
            return RUNTIME
        config = runs[0].get("config", {})
        keys = {"ac": "checkpoint", "reshard_after_forward": "fsdp2", "loss_parallel": "dtensor"}
        for key, kind in keys.items():
            if key in config:
                return TORCH[kind]
    raise RecordError(
        "not a record of a known format (megatron_core, dtensor, fsdp2, activation checkpointing, "
        "pipeline runtime or schedules)"
    )


def compare_file(path: Path) -> Iterator[Verdict]:
    """The verdicts on a file's cases; a `RecordError` with the file's name if it can not be read."""
    data = load(path)
    try:
        kind = recognise(data)
        cases = kind.read(data, path.stem)
    except RecordError as err:
        raise RecordError(f"{path}: {err}") from err
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
        raise RecordError(f"{path}: not a well-formed record: {type(err).__name__}: {err}") from err
    for case in cases:
        yield compare_case(case, kind)


def compare_case(case: Case, kind: Format) -> Verdict:
    """The verdict on one case: every recorded rank compared with the synthesized one."""
    reason = kind.skip(case.config)
    if reason:
        return Verdict(case.name, skipped=reason)
    events = sum(len(theirs) for theirs in case.ranks.values())
    try:
        traces = kind.synthesize(case.config)
    except StageError as err:
        return Verdict(case.name, len(case.ranks), events, unexplained=[f"Stage refuses this job: {err}"])
    explained: dict[str, tuple[str, int]] = {}
    unexplained: list[str] = []
    for rank, theirs in case.ranks.items():
        ours = kind.seen(
            synthesized(traces.nodes(rank), traces.groups, marks=kind.marks), str(case.config.get("kind", ""))
        )
        result = compare(ours, kind.rules, Context(case.config, rank, traces.classes.mesh, theirs))
        for slug, count in result.explained.items():
            reason = next(rule.reason for rule in kind.rules if rule.slug == slug)
            explained[slug] = (reason, explained.get(slug, ("", 0))[1] + count)
        unexplained += [f"rank {rank}:", *result.unexplained] if result.unexplained else []
    return Verdict(case.name, len(case.ranks), events, "", explained, unexplained)
