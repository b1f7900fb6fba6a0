"""GPT-3 (Brown et al. 2020) and its larger kin: learned positions, layer norms, biases, GELU, a tied head.

Published sizes are those of table 2.1 of the paper, except where that contradicts its own count of
parameters: gpt3-1.3b has 16 heads of 128 (not 24) and gpt3-13b a d_model of 5120 (not 5140). gpt3-22b and
gpt3-1t are of Korthikanti et al. 2022 (table 3), gpt3-530b is Megatron-Turing NLG (Smith et al. 2022); all
three have a vocabulary padded to 51200.
"""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, ModelError, SizeValue, Tensor, blocks, decoder

MODEL_TYPES = ("gpt2",)


def published(layers: int, d_model: int, heads: int, vocab: int = 50257) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": d_model, "d_ff": 4 * d_model, "heads": heads, "kv_heads": heads}
    return {
        **sizes,
        "head_dim": d_model // heads,
        "vocab": vocab,
        "positions": 2048,
        "seq": 2048,
        "tied": True,
    }


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "gpt3-125m": published(12, 768, 12),
    "gpt3-350m": published(24, 1024, 16),
    "gpt3-760m": published(24, 1536, 16),
    "gpt3-1.3b": published(24, 2048, 16),
    "gpt3-2.7b": published(32, 2560, 32),
    "gpt3-6.7b": published(32, 4096, 32),
    "gpt3-13b": published(40, 5120, 40),
    "gpt3-22b": published(48, 6144, 64, vocab=51200),
    "gpt3-175b": published(96, 12288, 96),
    "gpt3-530b": published(105, 20480, 128, vocab=51200),
    "gpt3-1t": published(128, 25600, 160, vocab=51200),
}
ALIASES = {"mt-nlg-530b": "gpt3-530b"}

PARAMETERS = {
    "gpt3-125m": 125_226_240,
    "gpt3-350m": 355_871_744,
    "gpt3-760m": 760_300_032,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-22b": 22_074_273_792,
    "gpt3-175b": 174_604_259_328,
    "gpt3-530b": 529_600_819_200,
    "gpt3-1t": 1_008_038_758_400,
}
"""12 L d^2 + 13 L d + (V + S + 2) d for L layers of size d, V tokens, S positions (Narayanan et al. 2021)."""


def layer(b: Builder, x: Tensor) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)), with biases everywhere."""
    with b.scope("attn"):
        h = blocks.attention(b, blocks.layer_norm(b, x, "norm"), rope=False, bias=True)
        x = blocks.residual(b, x, h, bias=True)
    with b.scope("mlp"):
        return blocks.residual(b, x, blocks.mlp(b, blocks.layer_norm(b, x, "norm"), bias=True), bias=True)


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes; a sequence longer than its table of `positions` can be counted as well."""
    head = partial(blocks.lm_head, norm=blocks.layer_norm, tied=decoder.flag(sizes, "tied"))
    layers = (Block("layer", layer),) * decoder.count(sizes, "layers")
    return decoder.build(name, sizes, layers, embedding=partial(blocks.embedding, positions=True), head=head)


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `GPT2Config`: heads share d_model, an absent or null `n_inner` is four times that."""
    d_model, heads = config.require("n_embd", int), config.require("n_head", int)
    if d_model % heads:
        raise ModelError(
            f"{config.origin}: n_embd = {d_model} does not divide by n_head = {heads}; choose ones that do"
        )
    positions = config.get("n_positions", config.get("n_ctx", 1024, int), int)
    return {
        "layers": config.require("n_layer", int),
        "d_model": d_model,
        "d_ff": config.get("n_inner", 4 * d_model, int),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": d_model // heads,
        "vocab": config.require("vocab_size", int),
        "positions": positions,
        "seq": positions,
        "tied": config.get("tie_word_embeddings", True, bool),
    }
