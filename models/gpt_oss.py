"""gpt-oss (OpenAI 2025): mixtures of experts with biases; sinks and, in every other layer, a window.

`window_pattern` repeats over the layers: 1 is a layer with a window, 0 one without.
"""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, Size, SizeValue, Tensor, blocks, decoder, size

MODEL_TYPES = ("gpt_oss",)


def published(layers: int, experts: int) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": 2880, "experts": experts, "top_k": 4, "expert_d_ff": 2880}
    attention: dict[str, SizeValue] = {
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "window": 128,
        "window_pattern": (1, 0),
    }
    return {**sizes, **attention, "attention_bias": True, "vocab": 201088, "seq": 131072, "tied": False}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "gpt-oss-20b": published(24, 32),
    "gpt-oss-120b": published(36, 128),
}
ALIASES: dict[str, str] = {}

PARAMETERS = {
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
"""Parameters of the published checkpoints."""


def layer(b: Builder, x: Tensor, *, bias: bool, window: Size | None) -> Tensor:
    """One layer: x + attention(norm(x)), then x + experts(norm(x))."""
    with b.scope("attn"):
        h = blocks.attention(b, blocks.rms_norm(b, x, "norm"), bias=bias, sinks=True, window=window)
        x = blocks.residual(b, x, h, bias=bias)
    with b.scope("moe"):
        h = blocks.rms_norm(b, x, "norm")
        h = blocks.moe(b, h, function="clamped_swiglu", router_bias=True, expert_bias=True)
        return blocks.residual(b, x, h)


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes."""
    bias = decoder.flag(sizes, "attention_bias")
    full = Block("full", partial(layer, bias=bias, window=None))
    sliding = Block("sliding", partial(layer, bias=bias, window=size("window")))
    layers = tuple(sliding if slides else full for slides in decoder.windowed(sizes))
    return decoder.build(name, sizes, layers, moe=True)


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `GptOssConfig`, whose `intermediate_size` is that of an expert."""
    sizes = decoder.read_sizes(config, seq=131072, kv_heads=8, head_dim=64)
    sizes["expert_d_ff"] = sizes.pop("d_ff")
    sizes["experts"] = config.get("num_local_experts", config.get("num_experts", 128, int), int)
    sizes["top_k"] = config.get("num_experts_per_tok", 4, int)
    sizes["attention_bias"] = config.get("attention_bias", True, bool)
    return sizes | decoder.read_window(config, 128) | decoder.read_pattern(config, (1, 0))
