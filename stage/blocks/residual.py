"""The residual stream."""

from stage.graph import Builder
from stage.tensor import Tensor

__all__ = ["residual"]


def residual(b: Builder, x: Tensor, h: Tensor, *, bias: bool = False) -> Tensor:
    """x + h, with the bias of the projection that made h, which is added after its reduction; dropout if asked for."""
    if bias and not b.options.dropout:
        return b.add("residual", x, h, b.parameter("bias", x.dims[-1]))
    if bias:
        h = b.add("add_bias", h, b.parameter("bias", x.dims[-1]))
    return b.add("residual", x, b.dropout("dropout", h))
