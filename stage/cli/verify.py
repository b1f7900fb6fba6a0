"""`stage verify`: what is wrong with a trace set."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from stage.cli.options import Json, TraceFolder
from stage.cli.output import print_json, print_table

if TYPE_CHECKING:
    from stage.trace.report import Defect

__all__ = ["HELP", "verify"]

HELP = """Check a folder of Chakra traces, whoever wrote them, or a bundle.

Proves framing, ids, dependencies, attributes, groups, equal collective sequences, send and receive pairing,
and that all ranks together run to the end. Exit status: 0 sound, 1 defects, 2 misuse.

Ranks that run one program are proved together, by one of them and the formulas of groups and peers; every
file of a folder is read and compared with what these say.

\b
Examples:
  stage verify traces/
  stage verify job.stage --json
  stage verify traces/ --exhaustive"""
SHOWN = 50


Exhaustive = Annotated[
    bool, typer.Option("--exhaustive", help="Decode every rank, though many may be alike.")
]


def verify(traces: TraceFolder, exhaustive: Exhaustive = False, json: Json = False) -> None:
    """Verify the traces of a folder or a bundle and print every defect."""
    from stage.verification import verify_path

    report = verify_path(traces, exhaustive=exhaustive)
    defects, warnings = _records(report.defects), _records(report.warnings)
    if json:
        unchecked = list(report.unchecked)
        print_json({"ok": report.ok, "defects": defects, "warnings": warnings, "unchecked": unchecked})
    else:
        _print(traces.rstrip("/").rpartition("/")[2] or traces, defects, warnings, report.unchecked)
    if not report.ok:
        raise typer.Exit(1)


def _records(found: "Sequence[Defect]") -> list[dict[str, object]]:
    return [{"rank": d.rank, "node": d.node, "rule": d.rule, "message": d.message} for d in found]


def _print(
    name: str,
    defects: Sequence[Mapping[str, object]],
    warnings: Sequence[Mapping[str, object]],
    unchecked: Sequence[str],
) -> None:
    if defects:
        print_table(defects[:SHOWN])
    if len(defects) > SHOWN:
        print(f"... and {len(defects) - SHOWN:,} more; --json lists all")
    for warning in warnings[:SHOWN]:
        where = "" if warning["rank"] is None else f"rank {warning['rank']}: "
        print(f"warning: {where}{warning['message']}")
    for line in unchecked:
        print(f"not checked: {line}")
    found = f"{len(defects):,} defect{'' if len(defects) == 1 else 's'}" if defects else "no defect"
    print(f"{name}: {found}")
