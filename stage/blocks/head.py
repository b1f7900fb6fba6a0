"""The last block: logits and loss."""

from typing import Protocol

from stage.blocks.embedding import TABLE
from stage.blocks.norm import rms_norm
from stage.graph import Builder
from stage.tensor import Tensor

__all__ = ["cross_entropy", "lm_head"]


class Norm(Protocol):
    """A normalization over `d_model`: `rms_norm` or `layer_norm`."""

    def __call__(self, b: Builder, x: Tensor, name: str, /) -> Tensor:
        """The normalized x."""


def lm_head(b: Builder, x: Tensor, labels: Tensor, *, norm: Norm = rms_norm, tied: bool = False) -> Tensor:
    """The loss of every position: x[batch, seq, d_model], labels[batch, seq] -> [batch, seq] in fp32.

    x is normalized first. A `tied` head multiplies by the token table; every head of a block has the same
    weight.
    """
    normed = norm(b, x, "norm")
    weight = b.parameter(TABLE if tied else "lm_head.weight", "vocab", "d_model", shared=True)
    logits = b.contract(normed, weight, "lm_head", ("batch", "seq", "vocab"))
    return cross_entropy(b, logits, labels)


def cross_entropy(b: Builder, logits: Tensor, labels: Tensor) -> Tensor:
    """Log sum exp(logits) - logit of the label, without ever gathering the vocabulary."""
    with b.scope("loss"):
        maximum = b.op("logits_max", [logits], "max")[0]
        target = b.op("target_logit", [logits, labels], "target")[0]
        total = b.op("sum_exp", [logits, maximum], "sum_exp")[0]
        return b.op("loss", [maximum, total, target], "nll")[0]
