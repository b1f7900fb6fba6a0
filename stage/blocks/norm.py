"""Normalization."""

from stage.graph import Builder
from stage.tensor import Dim, Tensor

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(b: Builder, x: Tensor, name: str, over: str = "d_model") -> Tensor:
    """RMS norm: x / rms(x) * weight, over one dimension (Zhang and Sennrich 2019)."""
    weight = b.parameter(f"{name}.weight", Dim(over, x.size(over)))
    return b.op("norm", [x, weight], name, kind="rms", over=over)[0]


def layer_norm(b: Builder, x: Tensor, name: str, over: str = "d_model") -> Tensor:
    """Layer norm: (x - mean) / std * weight + bias, over one dimension (Ba et al. 2016)."""
    dim = Dim(over, x.size(over))
    weight, bias = b.parameter(f"{name}.weight", dim), b.parameter(f"{name}.bias", dim)
    return b.op("norm", [x, weight, bias], name, kind="layer", over=over)[0]
