"""Llama 2 to 3.3 (Touvron et al. 2023; Llama team 2024): pre-norm, rotary, grouped-query, SwiGLU.

`attention_bias` and `mlp_bias` add biases to the projections, which no published size has.
"""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, SizeValue, Tensor, blocks, decoder

MODEL_TYPES = ("llama",)


def published(layers: int, d_model: int, d_ff: int, heads: int, **others: SizeValue) -> dict[str, SizeValue]:
    """Sizes of one published model; those not given are the ones of Llama 3."""
    sizes = {"layers": layers, "d_model": d_model, "d_ff": d_ff, "heads": heads}
    llama3 = {"kv_heads": 8, "head_dim": 128, "vocab": 128256, "seq": 131072}
    return {**sizes, **llama3, "tied": False, "attention_bias": False, "mlp_bias": False, **others}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "llama2-7b": published(32, 4096, 11008, 32, kv_heads=32, vocab=32000, seq=4096),
    "llama2-13b": published(40, 5120, 13824, 40, kv_heads=40, vocab=32000, seq=4096),
    "llama2-70b": published(80, 8192, 28672, 64, vocab=32000, seq=4096),
    "llama3-8b": published(32, 4096, 14336, 32, seq=8192),
    "llama3-70b": published(80, 8192, 28672, 64, seq=8192),
    "llama3.1-8b": published(32, 4096, 14336, 32),
    "llama3.1-70b": published(80, 8192, 28672, 64),
    "llama3.1-405b": published(126, 16384, 53248, 128),
    "llama3.2-1b": published(16, 2048, 8192, 32, head_dim=64, tied=True),
    "llama3.2-3b": published(28, 3072, 8192, 24, tied=True),
}
ALIASES = {"llama3-405b": "llama3.1-405b", "llama3.3-70b": "llama3.1-70b"}

PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}
"""Parameters of the published checkpoints."""


def layer(b: Builder, x: Tensor, *, attention_bias: bool, mlp_bias: bool) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    with b.scope("attn"):
        h = blocks.attention(b, blocks.rms_norm(b, x, "norm"), bias=attention_bias)
        x = blocks.residual(b, x, h, bias=attention_bias)
    with b.scope("mlp"):
        h = blocks.gated_mlp(b, blocks.rms_norm(b, x, "norm"), bias=mlp_bias)
        return blocks.residual(b, x, h, bias=mlp_bias)


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes."""
    attention_bias, mlp_bias = decoder.flag(sizes, "attention_bias"), decoder.flag(sizes, "mlp_bias")
    one = Block("layer", partial(layer, attention_bias=attention_bias, mlp_bias=mlp_bias))
    return decoder.build(name, sizes, (one,) * decoder.count(sizes, "layers"))


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `LlamaConfig`."""
    sizes = decoder.read_sizes(config, seq=2048)
    sizes["attention_bias"] = config.get("attention_bias", False, bool)
    sizes["mlp_bias"] = config.get("mlp_bias", False, bool)
    return sizes
