"""A model with the sizes that were asked for: sizes that can not be are refused before anything is built."""

from collections.abc import Mapping
from pathlib import Path

from stage.catalog import LoadedModel, content, load_model
from stage.decoder import OPTIONAL
from stage.errors import ModelError, StageError
from stage.graph import Options
from stage.model import Model, SizeValue
from stage.trace.image import LAYER_WIDTH

__all__ = ["DEFAULT_OPTIONS", "build_model"]

DEFAULT_OPTIONS = Options()
MOST = 10**12
"""No size is larger: a product of a few still fits a trace's 64 bits, or is refused by name where it does not."""

MOST_LAYERS = 1 << 7 * LAYER_WIDTH


def build_model(
    model: str | Path | LoadedModel | Model,
    sizes: Mapping[str, SizeValue] | None = None,
    *,
    options: Options = DEFAULT_OPTIONS,
    mtp: bool = False,
) -> tuple[Model, str]:
    """A model by name, path or value with some sizes changed, and where it was found.

    A `ModelError` for a size that the model does not have, or that can not be.
    """
    if isinstance(model, Model):
        if sizes:
            raise ModelError(
                f"sizes {', '.join(sizes)} can not be set on a built model; change its sizes where it is built"
            )
        return model.with_options(options), model.name
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    known = dict(loaded.sizes)
    for name, value in (sizes or {}).items():
        known[name] = _sized(name, value, known, loaded.name)
    if "kv_heads" not in (sizes or {}) and loaded.sizes.get("kv_heads") == loaded.sizes.get("heads"):
        known |= {"kv_heads": known["heads"]} if "kv_heads" in known else {}  # every head has its own, still
    if mtp:
        if not known.get("mtp_modules"):
            raise ModelError(f"{loaded.name} has no multi-token-prediction modules; leave --mtp out")
        known["mtp"] = known["mtp_modules"]
    _check_sizes(known, loaded.name)
    return _built(loaded, known, options), loaded.origin


def _sized(name: str, value: SizeValue, known: Mapping[str, object], model: str) -> SizeValue:
    if name not in known:
        raise ModelError(f"size '{name}' is not one of {model}; its sizes are {', '.join(sorted(known))}")
    if isinstance(known[name], bool):
        if value not in (0, 1):
            raise ModelError(f"size '{name}' of {model} is a switch, not {value}; set it to 0 or 1")
        return bool(value)
    if isinstance(known[name], tuple):
        return value if isinstance(value, tuple) else (int(value),)
    least = 0 if name in OPTIONAL else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"size '{name}' of {model} is {value}; set it to a whole number of at least {least}")
    return value


def _check_sizes(sizes: Mapping[str, object], model: str) -> None:
    """Sizes that no model can have, by themselves or together."""
    numbers = {name: value for name, value in sizes.items() if isinstance(value, int)}
    for name, value in numbers.items():
        most = MOST_LAYERS if name == "layers" else MOST
        if value > most:
            raise ModelError(f"size '{name}' of {model} is more than {most}; set it to less")
    heads, kv_heads = numbers.get("heads"), numbers.get("kv_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ModelError(
            f"heads = {heads} of {model} does not divide by kv_heads = {kv_heads}; "
            "each KV head serves as many heads, so choose a kv_heads that divides heads"
        )
    experts, top_k = numbers.get("experts"), numbers.get("top_k")
    if experts and top_k and top_k > experts:
        raise ModelError(
            f"top_k = {top_k} of {model} is more than its {experts} experts; choose a smaller top_k"
        )


def _built(loaded: LoadedModel, sizes: dict[str, object], options: Options) -> Model:
    """The model that a file makes of its sizes; what goes wrong in a file that is not ours is its author's mistake."""
    if loaded.file.parent == content("models"):
        model: Model = loaded.module.model(loaded.name, sizes)
        return model.with_options(options)
    try:
        built = _checked(loaded, loaded.module.model(loaded.name, sizes)).with_options(options)
        for block in dict.fromkeys(built.blocks):
            built.graph(block)
    except StageError:
        raise
    except (Exception, SystemExit) as err:
        what = " ".join(f"{type(err).__name__}: {err}".split())
        raise ModelError(f"{loaded.file}: the model can not be built: {what}; correct the file") from err
    return built


def _checked(loaded: LoadedModel, built: object) -> Model:
    if not isinstance(built, Model):
        raise ModelError(f"{loaded.file}: model() returns {type(built).__name__}; return a stage.Model")
    return built
