"""Kernels as numpy columns, so that a model prices many at once: what bounds each one's arithmetic, and its sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from stage.cost.flash import work_of_pair
from stage.cost.system import DTYPES
from stage.cost.work import Kernel
from stage.errors import StageError

__all__ = ["BACKWARD", "BYTES", "FORWARD", "MATRIX", "PRODUCT", "VECTOR", "Columns", "columns_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

VECTOR, MATRIX, PRODUCT, FORWARD, BACKWARD = range(5)
"""What bounds the arithmetic: the vector units, the matrix units by FLOPs alone, by shape, or fused attention."""

BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "mxfp8": 1,
    "int8": 1,
    "fp6": 0.75,
    "fp4": 0.5,
}
"""Of an element, without scales."""


@dataclass(frozen=True)
class Columns:
    """Kernels as columns, one entry each: `family`, `dtype` (a place in DTYPES), `flops` and `bytes`, and sizes.

    Sizes are groups, m, n, k of a product; of attention heads of all the batch, queries, keys, and FLOPs of a pair.
    `share` is that of an attention's pairs that meet, `stored` the bytes of a product's result. What a family does not
    need is 1.
    """

    family: Ints
    dtype: Ints
    flops: Floats
    bytes: Floats
    groups: Floats
    m: Floats
    n: Floats
    k: Floats
    share: Floats
    stored: Floats

    def take(self, rows: Ints) -> "Columns":
        """Some of the kernels."""
        return Columns(*(getattr(self, field.name)[rows] for field in fields(self)))


def columns_of(kernels: Sequence[Kernel]) -> Columns:
    """Kernels as columns."""
    rows = [_row(kernel) for kernel in kernels]
    table = np.array(rows, np.float64).reshape(len(rows), len(fields(Columns)))
    return Columns(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), *table[:, 2:].T)


def _row(kernel: Kernel) -> tuple[float, ...]:
    """The entries of a kernel; one of unknown op is taken for matrix multiplication, as simulators with one peak do."""
    known, unknown = (kernel.flops, kernel.bytes), (1.0,) * 6
    if not kernel.matmul and kernel.op:
        return VECTOR, -1, *known, *unknown
    name = kernel.multiplies or "bf16"
    if name not in DTYPES:
        raise StageError(
            f"kernel {kernel.op or '(no op)'} multiplies {name!r}: give it one of {', '.join(DTYPES)}"
        )
    dtype = DTYPES.index(name)
    if kernel.attention is not None:
        one, backward = kernel.attention, kernel.op == "attention_backward"
        work = work_of_pair(one, backward=backward)
        sizes = (one.batch * one.heads, one.queries, one.keys, work, one.share, 1.0)
        return (BACKWARD if backward else FORWARD), dtype, *known, *sizes
    if kernel.product is not None:
        groups, m, n, k = kernel.product
        stored = kernel.bytes - BYTES[name] * groups * k * (m + n)
        return PRODUCT, dtype, *known, groups, m, n, k, 1.0, max(0.0, stored)
    return MATRIX, dtype, *known, *unknown
