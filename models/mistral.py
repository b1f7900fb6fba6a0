"""Mistral (Jiang et al. 2023): a Llama whose attention may see no further back than a `window`."""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, Size, SizeValue, Tensor, blocks, decoder, size

MODEL_TYPES = ("mistral",)


def published(layers: int, d_model: int, d_ff: int, heads: int, **others: SizeValue) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": d_model, "d_ff": d_ff, "heads": heads}
    return {**sizes, "kv_heads": 8, "head_dim": 128, "tied": False, "window": 0, **others}


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "mistral-7b": published(32, 4096, 14336, 32, vocab=32000, seq=32768, window=4096),
    "mistral-7b-v0.3": published(32, 4096, 14336, 32, vocab=32768, seq=32768),
    "mistral-nemo-12b": published(40, 5120, 14336, 32, vocab=131072, seq=131072),
    "mistral-small-24b": published(40, 5120, 32768, 32, vocab=131072, seq=32768),
    "mistral-large-123b": published(88, 12288, 28672, 96, vocab=32768, seq=131072),
}
ALIASES = {"mistral-7b-v0.1": "mistral-7b", "mistral-large-2": "mistral-large-123b"}

PARAMETERS = {
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
}
"""Parameters of the published checkpoints."""


def layer(b: Builder, x: Tensor, *, window: Size | None) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    with b.scope("attn"):
        x = blocks.residual(b, x, blocks.attention(b, blocks.rms_norm(b, x, "norm"), window=window))
    with b.scope("mlp"):
        return blocks.residual(b, x, blocks.gated_mlp(b, blocks.rms_norm(b, x, "norm")))


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes; without a `window` all attention is full."""
    window = size("window") if decoder.flag(sizes, "window") else None
    one = Block("layer", partial(layer, window=window))
    return decoder.build(name, sizes, (one,) * decoder.count(sizes, "layers"))


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `MistralConfig`, where a `sliding_window` of null means none."""
    return decoder.read_sizes(config, seq=131072, kv_heads=8) | decoder.read_window(config, 4096)
