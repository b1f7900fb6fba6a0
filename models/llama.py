"""Llama 2, 3 and 3.1 (Touvron et al. 2023; Llama team 2024): pre-norm, rotary, grouped-query, SwiGLU, no biases."""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, SizeValue, Tensor, blocks

MODEL_TYPES = ("llama",)


def _sizes(layers: int, d_model: int, d_ff: int, heads: int, kv_heads: int, vocab: int, seq: int) -> dict[str, SizeValue]:
    shape = {"layers": layers, "d_model": d_model, "d_ff": d_ff, "heads": heads, "kv_heads": kv_heads, "head_dim": 128}
    return {**shape, "vocab": vocab, "seq": seq, "tied": False}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "llama2-7b": _sizes(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama2-13b": _sizes(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama2-70b": _sizes(80, 8192, 28672, 64, 8, 32000, 4096),
    "llama3-8b": _sizes(32, 4096, 14336, 32, 8, 128256, 8192),
    "llama3-70b": _sizes(80, 8192, 28672, 64, 8, 128256, 8192),
    "llama3.1-8b": _sizes(32, 4096, 14336, 32, 8, 128256, 131072),
    "llama3.1-70b": _sizes(80, 8192, 28672, 64, 8, 128256, 131072),
    "llama3.1-405b": _sizes(126, 16384, 53248, 128, 8, 128256, 131072),
}
ALIASES = {"llama3-405b": "llama3.1-405b"}

PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}
"""Parameters of the published checkpoints."""


def embedding(b: Builder, tokens: Tensor) -> Tensor:
    return b.dropout("embedding_dropout", blocks.token_embedding(b, tokens))


def layer(b: Builder, x: Tensor, qkv_bias: bool, output_bias: bool, mlp_bias: bool) -> Tensor:
    with b.scope("attn"):
        h = blocks.attention(b, blocks.rms_norm(b, x, "norm"), bias=qkv_bias)
        x = blocks.residual(b, x, h, bias=output_bias)
    with b.scope("mlp"):
        h = blocks.gated_mlp(b, blocks.rms_norm(b, x, "norm"), bias=mlp_bias)
        return blocks.residual(b, x, h, bias=mlp_bias)


def head(b: Builder, x: Tensor, labels: Tensor, tied: bool) -> Tensor:
    return blocks.lm_head(b, blocks.rms_norm(b, x, "norm"), labels, tied=tied)


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    bias = bool(sizes.get("qkv_bias", False))
    one = Block("layer", partial(layer, qkv_bias=bias, output_bias=bias, mlp_bias=bool(sizes.get("mlp_bias", False))))
    tied = bool(sizes["tied"])
    return Model(
        name, sizes, Block("embedding", embedding), (one,) * int(sizes["layers"]), Block("head", partial(head, tied=tied)), tied
    )


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    heads = config.require("num_attention_heads", int)
    d_model = config.require("hidden_size", int)
    return {
        "layers": config.require("num_hidden_layers", int),
        "d_model": d_model,
        "d_ff": config.require("intermediate_size", int),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads, int),
        "head_dim": config.get("head_dim", d_model // heads, int),
        "vocab": config.require("vocab_size", int),
        "seq": config.get("max_position_embeddings", 2048, int),
        "tied": config.get("tie_word_embeddings", False, bool),
        "qkv_bias": config.get("attention_bias", False, bool),
        "mlp_bias": config.get("mlp_bias", False, bool),
    }
