"""Nemotron-4 (Parmar et al. 2024; Adler et al. 2024): layer norms, rotary, grouped-query, squared ReLU, no biases."""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, SizeValue, Tensor, blocks, decoder

MODEL_TYPES = ("nemotron",)


def published(layers: int, d_model: int, heads: int) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": d_model, "d_ff": 4 * d_model, "heads": heads, "kv_heads": 8}
    flags = {"tied": False, "attention_bias": False, "mlp_bias": False}
    return {**sizes, "head_dim": d_model // heads, "vocab": 256000, "seq": 4096, **flags}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "nemotron4-15b": published(32, 6144, 48),
    "nemotron4-340b": published(96, 18432, 96),
}
ALIASES: dict[str, str] = {}

PARAMETERS = {
    "nemotron4-15b": 15_628_775_424,
    "nemotron4-340b": 341_029_195_776,
}
"""L (d^2 (2 + 2 g / a) + 8 d^2 + 4 d) + 2 V d + 2 d for L layers of size d, a heads in g groups, V tokens."""


def layer(b: Builder, x: Tensor, *, attention_bias: bool, mlp_bias: bool) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    with b.scope("attn"):
        h = blocks.attention(b, blocks.layer_norm(b, x, "norm"), bias=attention_bias)
        x = blocks.residual(b, x, h, bias=attention_bias)
    with b.scope("mlp"):
        h = blocks.mlp(b, blocks.layer_norm(b, x, "norm"), function="relu2", bias=mlp_bias)
        return blocks.residual(b, x, h, bias=mlp_bias)


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes. Positions rotate half of each head, which moves what rotating all of it does."""
    attention_bias, mlp_bias = decoder.flag(sizes, "attention_bias"), decoder.flag(sizes, "mlp_bias")
    one = Block("layer", partial(layer, attention_bias=attention_bias, mlp_bias=mlp_bias))
    head = partial(blocks.lm_head, norm=blocks.layer_norm, tied=decoder.flag(sizes, "tied"))
    return decoder.build(name, sizes, (one,) * decoder.count(sizes, "layers"), head=head)


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `NemotronConfig`."""
    sizes = decoder.read_sizes(config, seq=4096)
    sizes["attention_bias"] = config.get("attention_bias", False, bool)
    sizes["mlp_bias"] = config.get("mlp_bias", False, bool)
    return sizes
