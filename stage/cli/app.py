"""The commands of `stage`, registered on one typer application."""

from typing import Annotated

import typer

import stage
from stage.cli import accuracy, catalog, estimate, export, show, synth, unpack, verify

__all__ = ["app"]

app = typer.Typer(
    name="stage",
    help="Synthesize the workload traces of distributed AI jobs from a model and a parallelism strategy.",
    epilog="Start with: stage synth llama3-8b --gpus 8 --tp 2 --pp 2 --batch 8 --out traces/",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def stage_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Print the version, or the help when no command is given."""
    if version:
        print(f"stage {stage.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("synth", help=synth.HELP)(synth.synth)
app.command("estimate", help=estimate.HELP)(estimate.estimate)
app.command("unpack", help=unpack.HELP)(unpack.unpack)
app.command("verify", help=verify.HELP)(verify.verify)
app.command("show", help=show.HELP)(show.show)
app.command("bench-accuracy", help=accuracy.HELP)(accuracy.bench_accuracy)
app.command("models", help=catalog.MODELS_HELP)(catalog.models)
app.command("strategies", help=catalog.STRATEGIES_HELP)(catalog.strategies)
app.command("systems", help=catalog.SYSTEMS_HELP)(catalog.systems)
app.command("export", help=export.HELP)(export.export)
