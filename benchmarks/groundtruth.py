"""Compare what Stage synthesizes with records of what real training code issues.

    python -m benchmarks.groundtruth RECORD.json...

A record is a file written by logging every collective and message of Megatron-core, DTensor, FSDP2, activation
checkpointing or torch's pipelining (one configuration a file, or several runs); gzip is understood. Each configuration
is synthesized with the same sizes and compared event by event and in order. Exit status: 0 if all are identical or
their differences explained, 1 if any difference is unexplained, 2 for a file that is no such record.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records.event import RecordError
from benchmarks.records.formats import compare_file

__all__ = ["main"]

STATUSES = ("identical", "explained", "unexplained", "skipped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the files named on the command line, print a verdict for each configuration; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.groundtruth",
        description="Compare records of training code with Stage's traces.",
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD.json", help="files to compare")
    counts: Counter[str] = Counter()
    try:
        for path in parser.parse_args(arguments).records:
            for verdict in compare_file(path):
                print(f"{path.name}: " + "\n".join(verdict.lines()))
                counts[verdict.status] += 1
    except RecordError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print(
        f"{counts.total()} configurations: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    )
    return 1 if counts["unexplained"] else 0


if __name__ == "__main__":
    sys.exit(main())
