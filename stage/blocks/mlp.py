"""Feed-forward layers."""

from stage.graph import Builder
from stage.tensor import Tensor

__all__ = ["gated_mlp", "mlp"]


def gated_mlp(
    b: Builder, x: Tensor, *, hidden: str = "d_ff", function: str = "swiglu", bias: bool = False
) -> Tensor:
    """down(act(gate(x)) * up(x)) (Shazeer 2020): x[batch, seq, d_model] -> the same.

    Biases of gate and up are added by their epilogues, one of down by whoever adds the residual.
    """
    gate = b.linear(x, "gate_proj", ["d_model"], [hidden], bias=bias)
    up = b.linear(x, "up_proj", ["d_model"], [hidden], bias=bias)
    return b.linear(b.pointwise(function, "act", gate, up), "down_proj", [hidden], ["d_model"])


def mlp(b: Builder, x: Tensor, *, hidden: str = "d_ff", function: str = "gelu", bias: bool = False) -> Tensor:
    """down(act(up(x))); a bias of up is added by its epilogue, one of down by whoever adds the residual."""
    up = b.linear(x, "up_proj", ["d_model"], [hidden], bias=bias)
    return b.linear(b.pointwise(function, "act", up), "down_proj", [hidden], ["d_model"])
