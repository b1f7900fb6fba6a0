"""What decoder-only language models share: their outline, and the names of sizes in configuration files.

A family adds its layer. Defaults of keys that a configuration lacks are those of the family's configuration
class in Hugging Face Transformers, so they are arguments here.
"""

from collections.abc import Callable, Mapping
from functools import partial

from stage import blocks
from stage.errors import ModelError
from stage.hf import HFConfig
from stage.model import Block, Model, SizeValue
from stage.tensor import Tensor

__all__ = [
    "OPTIONAL",
    "build",
    "count",
    "flag",
    "numbers",
    "read_late_windows",
    "read_numbers",
    "read_optional",
    "read_pattern",
    "read_sizes",
    "read_window",
    "windowed",
]

OPTIONAL = frozenset({"window", "full_layers", "first_k_dense", "shared_d_ff", "q_lora_rank"})
"""Sizes that may be 0, which means that there is no such part."""

WINDOWED = {"sliding_attention": 1, "full_attention": 0}


def build(
    name: str,
    sizes: Mapping[str, SizeValue],
    layers: tuple[Block, ...],
    *,
    embedding: Callable[..., Tensor] = blocks.embedding,
    head: Callable[..., Tensor] | None = None,
    moe: bool = False,
) -> Model:
    """The model with these layers between embedding and head; the size `tied` says whether that is tied."""
    tied = flag(sizes, "tied")
    last = Block("head", head or partial(blocks.lm_head, tied=tied))
    return Model(name, sizes, Block("embedding", embedding), layers, last, tied or flag(sizes, "mtp"), moe)


def count(sizes: Mapping[str, SizeValue], name: str, default: int | None = None, minimum: int = 1) -> int:
    """The size called `name`, a number of at least `minimum`, or `default` where the model has none.

    >>> count({"layers": 5}, "layers"), count({"layers": 5}, "first_k_dense", 0, minimum=0)
    (5, 0)

    Raises ModelError for a size that is missing, no number or less than `minimum`.
    """
    value = sizes.get(name, default)
    if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
        return value
    raise ModelError(f"size {name} is {value}, where a number of at least {minimum} is needed; set {name}")


def flag(sizes: Mapping[str, SizeValue], name: str) -> bool:
    """Whether the size called `name` is there, and neither false nor zero."""
    return bool(sizes.get(name, False))


def numbers(sizes: Mapping[str, SizeValue], name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The size called `name`, which lists numbers; one number is a list of it."""
    value = sizes.get(name, default)
    return value if isinstance(value, tuple) else (int(value),)


def windowed(sizes: Mapping[str, SizeValue]) -> tuple[bool, ...]:
    """Whether each layer attends through the sliding window of `window` tokens.

    All do from layer `full_layers` on (default 0); where there is a `window_pattern` it repeats over the
    layers, and those where it is 0 have no window.

    >>> windowed({"layers": 5, "window": 128, "window_pattern": (1, 0)})
    (True, False, True, False, True)
    """
    layers, first = count(sizes, "layers"), count(sizes, "full_layers", 0, minimum=0)
    if not flag(sizes, "window"):
        return (False,) * layers
    pattern = numbers(sizes, "window_pattern", (1,)) or (1,)
    return tuple(i >= first and bool(pattern[i % len(pattern)]) for i in range(layers))


def read_sizes(
    config: HFConfig,
    *,
    seq: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
) -> dict[str, SizeValue]:
    """The sizes whose keys nearly every decoder shares, with the family's defaults.

    By default there are as many `kv_heads` as heads, and heads times `head_dim` is d_model.
    """
    d_model, heads = config.require("hidden_size", int), config.require("num_attention_heads", int)
    head_dim = config.get("head_dim", head_dim, int)
    if head_dim is None and d_model % heads:
        raise ModelError(
            f"{config.origin}: hidden_size = {d_model} does not divide by num_attention_heads = {heads}; "
            "give head_dim, or sizes that divide"
        )
    return {
        "layers": config.require("num_hidden_layers", int),
        "d_model": d_model,
        "d_ff": config.require("intermediate_size", int),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", kv_heads or heads, int),
        "head_dim": head_dim or d_model // heads,
        "vocab": config.require("vocab_size", int),
        "seq": config.get("max_position_embeddings", seq, int),
        "tied": config.get("tie_word_embeddings", tied, bool),
    }


def read_optional(config: HFConfig, key: str, default: int) -> int:
    """A number, 0 where it is null: both mean that there is no such part; a missing key is the default."""
    return config.get(key, 0 if key in config else default, int, minimum=0)


def read_window(config: HFConfig, default: int) -> dict[str, SizeValue]:
    """`window` from `sliding_window`, 0 where that is null."""
    return {"window": read_optional(config, "sliding_window", default)}


def read_pattern(config: HFConfig, default: tuple[int, ...]) -> dict[str, SizeValue]:
    """`window_pattern` from `layer_types`, read as its shortest repeating part, or the family's default."""
    names = config.get("layer_types", None, list)
    return {"window_pattern": default if names is None else _shortest(_windows(config, names))}


def read_late_windows(config: HFConfig) -> dict[str, SizeValue]:
    """Windows that need `use_sliding_window` and begin at layer `max_window_layers` (or as `layer_types`)."""
    if not config.get("use_sliding_window", False, bool):
        return {"window": 0, "full_layers": 0}
    if config.get("layer_types") is not None:
        return read_window(config, 4096) | read_pattern(config, ())
    return read_window(config, 4096) | {"full_layers": config.get("max_window_layers", 28, int, minimum=0)}


def read_numbers(config: HFConfig, key: str) -> tuple[int, ...]:
    """The whole numbers listed under `key`; none where the file has none."""
    listed = config.get(key, [], list)
    if all(isinstance(value, int) for value in listed):
        return tuple(listed)
    raise ModelError(f"{config.origin}: key '{key}' holds {listed}, where numbers of layers are expected")


def _windows(config: HFConfig, names: list[object]) -> tuple[int, ...]:
    """0 or 1 for each layer; a longer list than there are layers is read as far as they go."""
    layers = config.require("num_hidden_layers", int)
    unknown = [name for name in names if not isinstance(name, str) or name not in WINDOWED]
    if unknown:
        raise ModelError(
            f"{config.origin}: key 'layer_types' holds {unknown[0]!r}; known: {', '.join(sorted(WINDOWED))}"
        )
    if len(names) < layers:
        raise ModelError(
            f"{config.origin}: key 'layer_types' has {len(names)} entries, where {layers} layers are; "
            "give one for each layer"
        )
    return tuple(WINDOWED[str(name)] for name in names[:layers])


def _shortest(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest part that, repeated, begins like the whole."""
    for n in range(1, len(pattern)):
        if all(value == pattern[i % n] for i, value in enumerate(pattern)):
            return pattern[:n]
    return pattern
