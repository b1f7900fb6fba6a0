"""Verification of a trace set by the shortest way that proves it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stage.io.chakra import DirectorySource
from stage.io.recognise import recognise_classes
from stage.trace.classes import RankClasses
from stage.trace.report import Report
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from stage.trace.verify_manifest import manifest_defects
from stage.traceset import TraceSet

__all__ = ["verify_path", "verify_set"]


def verify_path(path: str | Path, *, exhaustive: bool = False) -> Report:
    """Return everything that is wrong with the traces at a path."""
    return verify_set(TraceSet.open(path), exhaustive=exhaustive)


def verify_set(source: TraceSet | DirectorySource, *, exhaustive: bool = False) -> Report:
    """Return everything that is wrong with a set of traces, and what could not be checked.

    A set that is made of rank classes is proved by them. A folder is always read to the end, and is proved by classes
    if every byte of its files and groups is what classes say; else, and with `exhaustive`, rank by rank.

    >>> from stage.synthesis import synthesize
    >>> traces = synthesize("llama3-8b", gpus=1024, tp=8, pp=4, batch=64, sizes={"layers": 4})
    >>> verify_set(traces).ok
    True
    """
    if isinstance(source, TraceSet):  # its manifest is of this project, which a folder's says by its world
        said: Mapping[str, Any] = {"world": source.world, **source.manifest}
        classes: RankClasses | None = source.classes
    else:
        said, classes = source.manifest or {}, recognise_classes(source)
    groups = len(source.groups) if classes is None else classes.groups.count
    report = verify(source) if exhaustive or classes is None else verify_classes(classes)
    wrong = manifest_defects(said, source.world, groups, classes)
    return replace(report, defects=(*report.defects, *wrong))
