"""`stage unpack`: the traces of a bundle as files."""

import time
from pathlib import Path
from typing import Annotated

import typer

from stage.cli.options import Jobs, Json, Resume
from stage.cli.output import interruptible, print_json, print_report, progress_bar
from stage.cli.parse import parse_ranks
from stage.cli.source import open_source
from stage.errors import StageError

__all__ = ["HELP", "unpack"]

HELP = """Write the traces of a bundle into a folder.

The files are the ones that stage synth would have written, byte for byte.

\b
Examples:
  stage unpack job.stage --out traces/
  stage unpack job.stage --ranks 0-63 --out traces/"""

BundleFile = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file of stage synth --format bundle.")]
Ranks = Annotated[str | None, typer.Option("--ranks", metavar="0-7,64", help="Write only these ranks.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR|URL", help="The folder to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing folder.")]


def unpack(
    bundle: BundleFile,
    *,
    out: Out,
    ranks: Ranks = None,
    force: Force = False,
    resume: Resume = False,
    jobs: Jobs = 1,
    json: Json = False,
) -> None:
    """Write the ranks of a bundle into a folder, and print what was written."""
    started = time.perf_counter()
    wanted = None if ranks is None else parse_ranks(ranks)
    if not bundle.exists():
        raise StageError(f"{bundle}: there is no such file; give a bundle")
    if bundle.is_dir():
        raise StageError(f"{bundle}: is a folder, and its traces are files already; give a bundle")
    traces = open_source(str(bundle))
    assert not isinstance(traces, str)
    with interruptible(), progress_bar("writing traces", quiet=json) as progress:
        summary = traces.write(out, ranks=wanted, force=force, resume=resume, jobs=jobs, progress=progress)
    report = {"out": out, **summary, "seconds": round(time.perf_counter() - started, 3)}
    (print_json if json else print_report)(report)
