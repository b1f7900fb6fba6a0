"""The decoder that the records were made with: RMSNorm, rotary grouped-query attention, SwiGLU, no biases.

With `experts` every MLP is a mixture of experts, with `shared_d_ff` one with a shared expert. Parameters are declared
in the order of Megatron-core's modules (the output projection before query, key and value), which decides what shares
a gradient bucket.
"""

from collections.abc import Mapping
from functools import partial

from stage import Block, Builder, Dim, Model, SizeValue, Tensor, blocks, decoder, size

__all__ = ["model"]


def layer(b: Builder, x: Tensor, *, experts: bool, shared: bool) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x)) or x + experts(norm(x))."""
    with b.scope("attn"):
        normed = blocks.rms_norm(b, x, "norm")
        b.parameter("o_proj.weight", "d_model", "heads", "head_dim")
        x = blocks.residual(b, x, blocks.attention(b, normed))
    with b.scope("moe" if experts else "mlp"):
        normed = blocks.rms_norm(b, x, "norm")
        if shared:
            b.parameter("router.weight", Dim("router", size("experts")), "d_model")
        h = blocks.moe(b, normed, shared=shared) if experts else blocks.gated_mlp(b, normed)
        return blocks.residual(b, x, h)


def model(sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes; `experts` and `shared_d_ff` say whether it has these parts."""
    experts = decoder.flag(sizes, "experts")
    one = Block("layer", partial(layer, experts=experts, shared=decoder.flag(sizes, "shared_d_ff")))
    return decoder.build("reference", sizes, (one,) * decoder.count(sizes, "layers"), moe=experts)
