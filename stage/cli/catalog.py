"""`stage models` and `stage strategies`: what can be named."""

from dataclasses import asdict

from stage.cli.options import Json
from stage.cli.output import print_json, print_table

__all__ = ["MODELS_HELP", "STRATEGIES_HELP", "models", "strategies"]

MODELS_HELP = """List the models that can be named.

A Hugging Face config.json of one of the listed model types, and any .py file that describes a model, work in
place of a name."""
STRATEGIES_HELP = """List the parallelism strategies that can be named.

The path of a .toml file works in place of a name."""


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
