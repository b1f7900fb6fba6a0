"""`stage estimate`: how long a step of a job takes on a system, where its time goes, and whether it fits."""

from typing import Annotated

import typer

from stage.cli.job import JobOptions, takes_job
from stage.cli.options import Json, ModelName
from stage.cli.output import print_json, print_report, print_warning

__all__ = ["HELP", "estimate"]

HELP = """Estimate the time and the memory of a job on a system.

\b
Examples:
  stage estimate llama3-70b --gpus 64 --tp 4 --pp 4 --batch 128 --seq 8192 \\
      --system h100
  stage estimate mixtral-8x7b --gpus 16 --ep 8 --batch 32 --system b200 --json
  stage estimate llama3-8b --gpus 8 --batch 8 --system my_system.toml"""

System = Annotated[
    str,
    typer.Option("--system", metavar="NAME|FILE", help="A name of `stage systems` or a .toml file."),
]
Cost = Annotated[
    str,
    typer.Option("--cost", metavar="NAME|FILE", help="The cost model: roofline, or one that is installed."),
]


@takes_job
def estimate(
    model: ModelName, *, system: System, cost: Cost = "roofline", job: JobOptions, json: Json = False
) -> None:
    """Estimate a job and print what it takes."""
    import stage.estimate

    report = stage.estimate.estimate(model, system=system, cost=cost, **job.options())
    if json:
        print_json(report)
        return
    print_report(report)
    if not report["fits"]:
        print_warning("the job does not fit: it needs more memory than a device of the system has")
