"""`stage models`, `stage strategies` and `stage systems`: what can be named."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stage.cli.options import Json, complete_system
from stage.cli.output import print_json, print_table

if TYPE_CHECKING:
    from stage.cost.system import System

__all__ = ["MODELS_HELP", "STRATEGIES_HELP", "SYSTEMS_HELP", "models", "strategies", "systems"]

MODELS_HELP = """List the models that can be named.

A Hugging Face config.json of one of the listed model types, and any .py file that describes a model, work in
place of a name."""
STRATEGIES_HELP = """List the parallelism strategies that can be named.

The path of a .toml file works in place of a name."""
SYSTEMS_HELP = """List the systems that can be named, or print the file of one, with its sources.

The path of a .toml file works in place of a name. Peaks are dense, bandwidths are those of one direction; of the
network what one device sends, from the innermost links outwards, and how many ranks they connect.

\b
Examples:
  stage systems
  stage systems h100 > mine.toml"""

SystemName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME|FILE]", help="The one to print.", show_default=False, autocompletion=complete_system
    ),
]


def models(json: Json = False) -> None:
    """Print the catalog's models."""
    from stage.catalog import list_models

    found = list_models()
    if json:
        keys = ("name", "aliases", "model_types", "title")
        listed = [asdict(model) for model in found]
        print_json({"models": [{key: model[key] for key in keys} for model in listed]})
        return
    print_table(
        [
            {
                "model": model.name,
                "other names": model.aliases,
                "model_types read": model.model_types,
                "family": model.file.stem,
            }
            for model in found
        ]
    )


def strategies(json: Json = False) -> None:
    """Print the catalog's strategies."""
    from stage.catalog import list_strategies

    found = list_strategies()
    if json:
        texts = [{"shard": dict(one.shard), "recompute": str(one.recompute)} for one in found]
        print_json({"strategies": [asdict(one) | text for one, text in zip(found, texts, strict=True)]})
        return
    print_table(
        [
            {
                "strategy": strategy.name,
                "mesh": strategy.mesh,
                "zero": strategy.zero,
                "what it does": strategy.title,
            }
            for strategy in found
        ]
    )


def systems(name: SystemName = None, json: Json = False) -> None:
    """Print the shipped systems, or the file of one."""
    from stage.cost.system_file import list_systems, load_system, read_system

    if name is not None:
        system, text, table = read_system(name)
        if json:
            print_json({"name": system.name, **table})
        else:
            print(text, end="")
    elif json:
        files = ((each, read_system(each)[2]) for each in list_systems())
        print_json({"systems": [{"name": each, **table} for each, table in files]})
    else:
        print_table([_system_row(load_system(each)) for each in list_systems()])


def _system_row(system: "System") -> dict[str, object]:
    links = [(math.prod(tier.ranks or 0 for tier in group), group[-1]) for group in system.links()]
    return {
        "system": system.name,
        "bf16 TFLOP/s": system.matrix_flops.get("bf16", 0) / 1e12 or None,
        "fp8": system.matrix_flops.get("fp8", 0) / 1e12 or None,
        "GiB": round(system.memory_bytes / (1 << 30), 1),
        "GB/s": system.memory_bandwidth / 1e9,
        "W": system.tdp_watts,
        "ranks: GB/s": ", ".join(f"{ranks or 'any'}: {tier.bandwidth / 1e9:g}" for ranks, tier in links),
    }
