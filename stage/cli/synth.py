"""`stage synth`: a trace set from a model and a strategy."""

import time
from typing import Annotated, Literal

import typer

import stage
from stage.cli.job import JobOptions, takes_job
from stage.cli.options import Jobs, Json, ModelName, Resume
from stage.cli.output import interruptible, print_json, print_report, print_warning, progress_bar
from stage.cli.parse import parse_ranks
from stage.errors import StageError

__all__ = ["HELP", "synth"]

HELP = """Synthesize one Chakra trace a rank.

\b
Examples:
  stage synth llama3-8b --gpus 64 --tp 4 --pp 4 --batch 128 --out traces/
  stage synth config.json --strategy fsdp --gpus 32 --batch 64 --out t/
  stage synth my_model.py --strategy my_strategy.toml \\
      --set d_model=20480,layers=120 --gpus 8 --batch 8 --out t/
  stage synth mixtral-8x7b --gpus 16 --ep 4 --tp 2 --batch 16 --out t/
  stage synth llama3-8b --gpus 64 --batch 128 --format bundle --out j.stage"""

OUTPUT = "Output"

Ranks = Annotated[
    str | None,
    typer.Option("--ranks", metavar="0-7,64", help="Write only these ranks.", rich_help_panel=OUTPUT),
]
Out = Annotated[
    str,
    typer.Option("--out", metavar="PATH|URL", help="The folder or bundle to write.", rich_help_panel=OUTPUT),
]
Format = Annotated[
    Literal["directory", "bundle"],
    typer.Option("--format", help="A file a rank, or one for all of them.", rich_help_panel=OUTPUT),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.", rich_help_panel=OUTPUT)]
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask", metavar="ADDRESS", help="Write on a Dask cluster: tcp://host:8786.", rich_help_panel=OUTPUT
    ),
]


@takes_job
def synth(
    model: ModelName,
    *,
    out: Out,
    job: JobOptions,
    ranks: Ranks = None,
    form: Format = "directory",
    force: Force = False,
    resume: Resume = False,
    jobs: Jobs = 1,
    dask: Dask = None,
    json: Json = False,
) -> None:
    """Synthesize a trace set, write it, and print what was written."""
    started = time.perf_counter()
    wanted = None if ranks is None else parse_ranks(ranks)
    if wanted is not None and form == "bundle":
        raise StageError("--ranks: a bundle holds all ranks; leave it out, and choose them with stage unpack")
    if form == "bundle" and (resume or jobs > 1 or dask is not None):
        raise StageError("--format bundle writes one small file: leave out --resume, --jobs and --dask")
    _check_place(out, form, force=force)
    traces = stage.synthesize(model, **job.options())
    with interruptible(), progress_bar("writing traces", quiet=json) as progress:
        if form == "bundle":
            summary = traces.write_bundle(out, force=force, progress=progress)
        else:
            summary = traces.write(
                out, ranks=wanted, force=force, resume=resume, jobs=jobs, dask=dask, progress=progress
            )
    report = {"out": out, **summary, "seconds": round(time.perf_counter() - started, 3)}
    if json:
        print_json(report | {"warnings": traces.warnings})
        return
    print_report(report)
    if traces.warnings:
        print_warning("; ".join(traces.warnings))


def _check_place(out: str, form: str, *, force: bool) -> None:
    """Raise if what is asked for can not be written there, before any work is done for it."""
    from stage.io.container import check_target
    from stage.io.store import file_path
    from stage.io.target import open_target

    if not out:
        raise StageError("--out is empty; name the folder, file or URL to write")
    if form == "bundle":
        check_target(file_path(out), force=force)
    else:
        open_target(out).check(force=force)
