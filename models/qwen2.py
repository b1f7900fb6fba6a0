"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama with biases on queries, keys and values alone."""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, Size, SizeValue, Tensor, blocks, decoder, size

MODEL_TYPES = ("qwen2",)


def published(
    layers: int, d_model: int, d_ff: int, heads: int, kv_heads: int, **others: SizeValue
) -> dict[str, SizeValue]:
    """Sizes of one published model."""
    sizes = {"layers": layers, "d_model": d_model, "d_ff": d_ff, "heads": heads, "kv_heads": kv_heads}
    return {
        **sizes,
        "head_dim": 128,
        "vocab": 152064,
        "seq": 32768,
        "tied": False,
        "window": 0,
        "full_layers": 0,
        **others,
    }


VARIANTS: dict[str, dict[str, SizeValue]] = {
    "qwen2-0.5b": published(24, 896, 4864, 14, 2, head_dim=64, vocab=151936, tied=True),
    "qwen2-1.5b": published(28, 1536, 8960, 12, 2, vocab=151936, tied=True),
    "qwen2-7b": published(28, 3584, 18944, 28, 4),
    "qwen2-72b": published(80, 8192, 29568, 64, 8),
    "qwen2.5-3b": published(36, 2048, 11008, 16, 2, vocab=151936, tied=True),
    "qwen2.5-14b": published(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": published(64, 5120, 27648, 40, 8),
}
ALIASES = {
    "qwen2.5-0.5b": "qwen2-0.5b",
    "qwen2.5-1.5b": "qwen2-1.5b",
    "qwen2.5-7b": "qwen2-7b",
    "qwen2.5-72b": "qwen2-72b",
}

PARAMETERS = {
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
}
"""Parameters of the published checkpoints."""


def layer(b: Builder, x: Tensor, *, window: Size | None) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    with b.scope("attn"):
        x = blocks.residual(
            b, x, blocks.attention(b, blocks.rms_norm(b, x, "norm"), bias=True, window=window)
        )
    with b.scope("mlp"):
        return blocks.residual(b, x, blocks.gated_mlp(b, blocks.rms_norm(b, x, "norm")))


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes."""
    full = Block("layer", partial(layer, window=None))
    sliding = Block("sliding", partial(layer, window=size("window")))
    return decoder.build(
        name, sizes, tuple(sliding if slides else full for slides in decoder.windowed(sizes))
    )


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `Qwen2Config`: `max_window_layers` have no window, others if so switched."""
    return decoder.read_sizes(config, seq=32768, kv_heads=32) | decoder.read_late_windows(config)
