"""A hypothetical model: attention and MLP side by side, one norm for both."""

from collections.abc import Mapping

from stage import Block, Builder, Model, SizeValue, Tensor, blocks, decoder

VARIANTS: dict[str, dict[str, SizeValue]] = {
    "mine-70b": {
        "layers": 80,
        "d_model": 8192,
        "d_ff": 28672,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 128000,
        "seq": 8192,
        "tied": False,
    },
}


def layer(b: Builder, x: Tensor) -> Tensor:
    """x + attention(norm(x)) + mlp(norm(x))."""
    h = blocks.rms_norm(b, x, "norm")
    with b.scope("attn"):
        x = blocks.residual(b, x, blocks.attention(b, h))
    with b.scope("mlp"):
        return blocks.residual(b, x, blocks.gated_mlp(b, h))


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes."""
    return decoder.build(name, sizes, (Block("layer", layer),) * decoder.count(sizes, "layers"))
