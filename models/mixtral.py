"""Mixtral (Jiang et al. 2024): a Mistral with a mixture of `experts` for an MLP, `top_k` for each token."""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, Size, SizeValue, Tensor, blocks, decoder, size

MODEL_TYPES = ("mixtral",)


def published(layers: int, d_model: int, expert_d_ff: int, heads: int, seq: int) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": d_model, "heads": heads, "kv_heads": 8, "head_dim": 128}
    moe = {"experts": 8, "top_k": 2, "expert_d_ff": expert_d_ff}
    return {**sizes, **moe, "vocab": 32000, "seq": seq, "window": 0, "tied": False}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "mixtral-8x7b": published(32, 4096, 14336, 32, seq=32768),
    "mixtral-8x22b": published(56, 6144, 16384, 48, seq=65536),
}
ALIASES: dict[str, str] = {}

PARAMETERS = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
}
"""Parameters of the published checkpoints."""


def layer(b: Builder, x: Tensor, *, window: Size | None) -> Tensor:
    """One layer: x + attention(norm(x)), then x + experts(norm(x))."""
    with b.scope("attn"):
        x = blocks.residual(b, x, blocks.attention(b, blocks.rms_norm(b, x, "norm"), window=window))
    with b.scope("moe"):
        return blocks.residual(b, x, blocks.moe(b, blocks.rms_norm(b, x, "norm")))


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes; without a `window` all attention is full."""
    window = size("window") if decoder.flag(sizes, "window") else None
    one = Block("layer", partial(layer, window=window))
    return decoder.build(name, sizes, (one,) * decoder.count(sizes, "layers"), moe=True)


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `MixtralConfig`, whose `intermediate_size` is that of an expert."""
    sizes = decoder.read_sizes(config, seq=131072, kv_heads=8)
    sizes["expert_d_ff"] = sizes.pop("d_ff")
    sizes["experts"] = config.get("num_local_experts", 8, int)
    sizes["top_k"] = config.get("num_experts_per_tok", 2, int)
    return sizes | decoder.read_window(config, 0)
