"""The residual stream."""

from stage.graph import Builder
from stage.tensor import Tensor

__all__ = ["residual"]


def residual(b: Builder, x: Tensor, h: Tensor, *, bias: bool = False) -> Tensor:
    """The sum x + h, with the bias of what made h (added after its reduction), and dropout if asked."""
    if bias and not b.options.dropout:
        return b.add("residual", x, h, b.parameter("bias", x.dims[-1]))
    if bias:
        h = b.add("add_bias", h, b.parameter("bias", x.dims[-1]))
    return b.add("residual", x, b.dropout("dropout", h))
