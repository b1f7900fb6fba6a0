"""Options that several commands share, each declared once."""

from typing import Annotated, Literal

import typer

__all__ = [
    "MESH",
    "STEP",
    "Attention",
    "Batch",
    "Json",
    "Mask",
    "ModelName",
    "Mtp",
    "Seq",
    "Sizes",
    "StrategyName",
    "TraceFolder",
    "complete_model",
    "complete_system",
]

MESH, STEP = "Mesh", "Step"
"""Panels of the help."""


def complete_model(incomplete: str) -> list[str]:
    """Names of the catalog that begin with what was typed, for the shell."""
    from stage.catalog import list_models

    names = [name for model in list_models() for name in (model.name, *model.aliases)]
    return [name for name in names if name.startswith(incomplete)]


def complete_strategy(incomplete: str) -> list[str]:
    """Strategies of the catalog that begin with what was typed, for the shell."""
    from stage.catalog import list_strategies

    return [strategy.name for strategy in list_strategies() if strategy.name.startswith(incomplete)]


def complete_system(incomplete: str) -> list[str]:
    """Shipped systems that begin with what was typed, for the shell."""
    from stage.cost.system_file import list_systems

    return [name for name in list_systems() if name.startswith(incomplete)]


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name of `stage models`, a Hugging Face config.json, or a .py file.",
        autocompletion=complete_model,
    ),
]
StrategyName = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME|FILE",
        help="A name of `stage strategies` or a .toml file. By default the one for the model's architecture.",
        autocompletion=complete_strategy,
    ),
]
TraceFolder = Annotated[
    str,
    typer.Argument(metavar="DIR|URL|BUNDLE", help="A folder of traces, here or in a store, or a bundle."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that was stopped.", rich_help_panel="Output")
]
Jobs = Annotated[
    int, typer.Option("--jobs", min=1, metavar="N", help="Processes that write.", rich_help_panel="Output")
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Sequences a step, over all ranks.")
]
Seq = Annotated[
    int | None,
    typer.Option("--seq", min=1, metavar="N", help="Tokens a sequence; by default the model's own."),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=N,...", help="Any sizes of the model, e.g. d_model=20480,layers=120."
    ),
]
Mask = Annotated[
    Literal["causal", "full"],
    typer.Option("--mask", help="Full counts all of attention, without causality and sliding windows."),
]
Attention = Annotated[
    Literal["fused", "unfused"],
    typer.Option("--attention", help="One fused kernel, or scores, softmax and values."),
]
Mtp = Annotated[bool, typer.Option("--mtp", help="Build the multi-token-prediction modules.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
