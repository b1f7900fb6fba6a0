"""Quantising for products in 8 bits: scales and copies of tensors, as kernels that are bound by memory.

`quantize` reads its operands (stored side by side: q, k and v) and writes of each a copy with blocks along rows, for
the product that sums over columns, and one with blocks along columns, for the gradients. `requantize` makes the second
of the first: a transpose where both have the same scales. `amax` reads a tensor for the largest absolute value.
"""

from collections.abc import Sequence

from stage.ops.contract_group import side_by_side
from stage.ops.registry import Attrs, Op, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["AMAX", "QUANTIZE", "REQUANTIZE"]


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    raise AssertionError("quantisation is put in by the precision pass, which makes the results")


def _largest(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """One comparison an element."""
    return sum(t.elements for t in inputs if t.dims)


def _scaled(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """An element's comparison, and for each copy its product with the scale and its rounding."""
    return _largest(attrs, inputs, outputs) + 2 * sum(t.elements for t in outputs)


AMAX = register(Op("amax", _infer, None, _largest, factors=side_by_side, reduction="max"))
QUANTIZE = register(Op("quantize", _infer, None, _scaled, factors=side_by_side))
REQUANTIZE = register(Op("requantize", _infer, None, _scaled, factors=side_by_side))
