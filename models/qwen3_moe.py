"""Qwen3 mixtures of experts (Yang et al. 2025): an MLP is dense or a mixture of many small experts.

A layer is dense if `mlp_only_layers` lists it or `decoder_sparse_step` does not divide its number, counted
from 1.
"""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, Size, SizeValue, Tensor, blocks, decoder, size

MODEL_TYPES = ("qwen3_moe",)


def published(layers: int, d_model: int, d_ff: int, heads: int, **others: SizeValue) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": d_model, "d_ff": d_ff, "heads": heads, "head_dim": 128}
    moe: dict[str, SizeValue] = {"experts": 128, "top_k": 8, "decoder_sparse_step": 1, "mlp_only_layers": ()}
    switches = {"attention_bias": False, "window": 0, "tied": False}
    return {**sizes, **moe, "vocab": 151936, "seq": 40960, **switches, **others}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "qwen3-30b-a3b": published(48, 2048, 6144, 32, kv_heads=4, expert_d_ff=768),
    "qwen3-235b-a22b": published(94, 4096, 12288, 64, kv_heads=4, expert_d_ff=1536),
    "qwen3-coder-480b-a35b": published(
        62, 6144, 8192, 96, kv_heads=8, experts=160, expert_d_ff=2560, seq=262144
    ),
}
ALIASES: dict[str, str] = {}

PARAMETERS = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
}
"""Parameters of the published checkpoints."""


def layer(b: Builder, x: Tensor, *, sparse: bool, bias: bool, window: Size | None) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)), of experts if `sparse`."""
    with b.scope("attn"):
        h = blocks.attention(b, blocks.rms_norm(b, x, "norm"), bias=bias, qk_norm=True, window=window)
        x = blocks.residual(b, x, h, bias=bias)
    with b.scope("moe" if sparse else "mlp"):
        mlp = blocks.moe if sparse else blocks.gated_mlp
        return blocks.residual(b, x, mlp(b, blocks.rms_norm(b, x, "norm")))


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes; without a `window` all attention is full."""
    window = size("window") if decoder.flag(sizes, "window") else None
    make = partial(layer, bias=decoder.flag(sizes, "attention_bias"), window=window)
    dense, sparse = Block("dense", partial(make, sparse=False)), Block("moe", partial(make, sparse=True))
    step, listed = decoder.count(sizes, "decoder_sparse_step", 1), decoder.numbers(sizes, "mlp_only_layers")
    kinds = [
        dense if (i + 1) % step or i in listed else sparse for i in range(decoder.count(sizes, "layers"))
    ]
    return decoder.build(name, sizes, tuple(kinds), moe=sparse in kinds)


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `Qwen3MoeConfig`, which newer files let call its experts `num_local_experts`."""
    sizes = decoder.read_sizes(config, seq=32768, kv_heads=4)
    sizes["expert_d_ff"] = config.get("moe_intermediate_size", 768, int)
    sizes["experts"] = config.get("num_experts", config.get("num_local_experts", 128, int), int)
    sizes["top_k"] = config.get("num_experts_per_tok", 8, int)
    sizes["decoder_sparse_step"] = config.get("decoder_sparse_step", 1, int)
    sizes["mlp_only_layers"] = decoder.read_numbers(config, "mlp_only_layers")
    sizes["attention_bias"] = config.get("attention_bias", False, bool)
    windowed = config.get("use_sliding_window", False, bool)
    return sizes | (decoder.read_window(config, 4096) if windowed else {"window": 0})
