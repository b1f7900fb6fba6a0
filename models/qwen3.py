"""Qwen3 (Yang et al. 2025): a Llama with normalized queries and keys and a head size of its own."""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, Size, SizeValue, Tensor, blocks, decoder, size

MODEL_TYPES = ("qwen3",)


def published(layers: int, d_model: int, d_ff: int, heads: int, tied: bool) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": d_model, "d_ff": d_ff, "heads": heads, "tied": tied}
    sizes |= {"kv_heads": 8, "head_dim": 128, "vocab": 151936, "seq": 40960}
    return {**sizes, "attention_bias": False, "window": 0, "full_layers": 0}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "qwen3-0.6b": published(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": published(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": published(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": published(36, 4096, 12288, 32, tied=False),
    "qwen3-14b": published(40, 5120, 17408, 40, tied=False),
    "qwen3-32b": published(64, 5120, 25600, 64, tied=False),
}
ALIASES: dict[str, str] = {}

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
"""Parameters of the published checkpoints, a tied head counted once."""


def layer(b: Builder, x: Tensor, *, bias: bool, window: Size | None) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    with b.scope("attn"):
        h = blocks.attention(b, blocks.rms_norm(b, x, "norm"), bias=bias, qk_norm=True, window=window)
        x = blocks.residual(b, x, h, bias=bias)
    with b.scope("mlp"):
        return blocks.residual(b, x, blocks.gated_mlp(b, blocks.rms_norm(b, x, "norm")))


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes."""
    bias = decoder.flag(sizes, "attention_bias")
    full = Block("layer", partial(layer, bias=bias, window=None))
    sliding = Block("sliding", partial(layer, bias=bias, window=size("window")))
    return decoder.build(
        name, sizes, tuple(sliding if slides else full for slides in decoder.windowed(sizes))
    )


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `Qwen3Config`."""
    sizes = decoder.read_sizes(config, seq=32768, kv_heads=32, head_dim=128) | decoder.read_late_windows(
        config
    )
    return {**sizes, "attention_bias": config.get("attention_bias", False, bool)}
