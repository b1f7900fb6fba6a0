"""`stage verify`: what is wrong with a trace set."""

from collections.abc import Mapping, Sequence

import typer

from stage.cli.options import Json, TraceFolder
from stage.cli.output import print_json, print_table

__all__ = ["HELP", "verify"]

HELP = """Check a folder of Chakra traces, whoever wrote them, or a bundle.

Proves framing, ids, dependencies, attributes, groups, equal collective sequences, send and receive pairing,
and that all ranks together run to the end. Exit status: 0 sound, 1 defects, 2 misuse.

\b
Examples:
  stage verify traces/
  stage verify job.stage --json"""
SHOWN = 50


def verify(traces: TraceFolder, json: Json = False) -> None:
    """Verify the traces of a folder or a bundle and print every defect."""
    from stage.trace.verify import verify as verify_source
    from stage.traceset import TraceSet

    report = verify_source(TraceSet.open(traces))
    defects = [
        {"rank": defect.rank, "node": defect.node, "rule": defect.rule, "message": defect.message}
        for defect in report.defects
    ]
    if json:
        print_json({"ok": report.ok, "defects": defects, "unchecked": list(report.unchecked)})
    else:
        _print(traces.rstrip("/").rpartition("/")[2] or traces, defects, list(report.unchecked))
    if not report.ok:
        raise typer.Exit(1)


def _print(name: str, defects: Sequence[Mapping[str, object]], unchecked: list[str]) -> None:
    if defects:
        print_table(defects[:SHOWN])
    if len(defects) > SHOWN:
        print(f"... and {len(defects) - SHOWN:,} more; --json lists all")
    for line in unchecked:
        print(f"not checked: {line}")
    found = f"{len(defects):,} defect{'' if len(defects) == 1 else 's'}" if defects else "no defect"
    print(f"{name}: {found}")
