"""What ring attention does beside attention: pass blocks on, and merge what the blocks gave.

Each block's attention gives an output o and the log of the sum of its exponentials, lse. Those of two blocks together
are o + w (o' - o) with w = sigmoid(lse' - lse), and the log of the sum of both (Liu et al. 2023, arXiv:2310.01889,
section 3; Dao et al. 2022, algorithm 1).
"""

from collections.abc import Sequence

from stage.ops.registry import Attrs, Op, dim_factors, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["CAST", "EXCHANGE", "MERGE"]

EXCHANGE = "ring_exchange"
"""Hands tensors to the next rank along the attribute `axes`, and takes those of the one before: one message for all."""


def _same(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(t.dims, t.dtype) for t in inputs]


def _nothing(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return 0


def _merged(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(t.dims, t.dtype) for t in inputs[:2]]


def _merge_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """Three operations an element of the output; a sigmoid and a logarithm are about eight a row."""
    return 3 * outputs[0].elements + 8 * outputs[1].elements


def _elements(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return outputs[0].elements


register(Op(EXCHANGE, _same, None, _nothing))
MERGE = register(Op("attention_merge", _merged, None, _merge_flops, factors=dim_factors))
CAST = register(Op("cast", _same, None, _elements))
