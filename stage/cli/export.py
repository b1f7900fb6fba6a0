"""`stage export`: a trace set with all that a simulator needs beside it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from stage.cli.options import Json, TraceFolder
from stage.cli.output import print_json, print_warning, progress_bar
from stage.cli.source import open_source

__all__ = ["HELP", "export"]

HELP = """Write what a simulator needs to run a trace set.

For astra-sim: network, system and memory files and a run script, for the traces where they are. Those of a bundle
are unpacked into the kit.

\b
Examples:
  stage export traces/ --to astra-sim --system h100 --out kit/
  stage export job.stage --to astra-sim --system h100 --out kit/"""

Target = Annotated[Literal["astra-sim"], typer.Option("--to", help="The simulator.")]
System = Annotated[str, typer.Option("--system", metavar="NAME|FILE", help="The machine to simulate.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a kit that is there.")]


def export(
    traces: TraceFolder, to: Target, system: System, out: Out, force: Force = False, json: Json = False
) -> None:
    """Export a trace set for a simulator and list the files."""
    from stage.io.astra_sim import export_astra_sim

    assert to == "astra-sim"  # the only target that typer lets through
    with progress_bar("writing traces", quiet=json) as progress:
        risks = export_astra_sim(open_source(traces), out, system, force=force, progress=progress)
    for risk in risks:
        print_warning(risk)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    if json:
        print_json({"out": str(out), "files": files})
        return
    for file in files:
        print(out / file)
