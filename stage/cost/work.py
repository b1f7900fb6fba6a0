"""What a cost model is asked to price: kernels and exchanges between devices, each different one once.

A kernel is what a trace says of it, so a model's job and a folder of traces are priced alike. Its matrix sizes are not
written down, but follow from the numbers of elements of its operands and of its operations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stage.cost.shapes import Attention, Product, attention_of, elements_of, product_of

__all__ = ["CostModel", "Exchange", "HostModel", "Kernel"]

Floats = NDArray[np.float64]

NEAR = 0.1
"""How far traffic may be from a whole number of bytes an element: a bias is read too."""


@dataclass(frozen=True)
class Kernel:
    """One kind of kernel: its op, the dtype it computes in, FLOPs (2 a multiply-add) and bytes moved.

    `shapes` are those of operands and results as in a trace, and so is `phase`. `matmul` says that matrix units run it.

    >>> Kernel("contract", "bf16", 2 * 4 * 5 * 6, 0, "2x2x6,6x5->2x2x5", True).product
    Product(groups=1.0, m=4.0, n=5.0, k=6.0)
    """

    op: str
    dtype: str
    flops: int
    bytes: int
    shapes: str = ""
    matmul: bool = False
    phase: str = "forward"

    @cached_property
    def operands(self) -> tuple[tuple[float, ...], ...]:
        """Shapes of what it reads."""
        return _shapes(self.shapes.partition("->")[0])

    @cached_property
    def results(self) -> tuple[tuple[float, ...], ...]:
        """Shapes of what it writes."""
        return _shapes(self.shapes.partition("->")[2])

    @cached_property
    def product(self) -> Product | None:
        """The sizes of a product of two operands, None where shapes are not known or it is another kernel."""
        if not self.matmul or self.attention is not None:
            return None
        return product_of(self.op, self.flops, self.operands, self.results)

    @cached_property
    def attention(self) -> Attention | None:
        """The sizes of a fused attention, None where shapes are not known or it is another kernel."""
        return attention_of(self.op, self.flops, self.operands)

    @cached_property
    def multiplies(self) -> str:
        """The dtype of what is multiplied, where `dtype` is that of the result: fp32 gradients of 16 bit operands.

        The traffic says it: operands are read once, and a result is written once, or added into. A fused attention
        whose gradients go round a ring in fp32 moves less than if all it touches were as wide.
        """
        if self.dtype != "fp32" or (self.product is None and self.attention is None):
            return self.dtype
        if self.product is None:
            touched = sum(elements_of(shape) for shape in (*self.operands, *self.results))
            return "bf16" if self.bytes < 4 * touched else self.dtype
        groups, m, n, k = self.product
        passes = (2, 1) if self.phase == "backward" else (1,)
        widths = ((self.bytes - 4 * times * groups * m * n) / (groups * k * (m + n)) for times in passes)
        return "bf16" if any(abs(width - 2) < NEAR for width in widths) else self.dtype


@dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of communication: a collective, or a message (`send`), of so many bytes (`comm_size`).

    `spread` says where the members are: so many within each unit of a tier of the network, innermost first, and so many
    such units in each of the next; a message goes between two members. (8, 4) are 8 devices on each of 4 nodes.
    """

    kind: str
    bytes: int
    spread: tuple[int, ...]
    dtype: str = ""

    @property
    def members(self) -> int:
        """How many devices take part."""
        return math.prod(self.spread)


class CostModel(Protocol):
    """What turns work into seconds. Models are found by the entry points `stage.cost_models`."""

    def kernels(self, kernels: Sequence[Kernel]) -> Floats:
        """Seconds of each kernel, alone on its device."""

    def exchanges(self, exchanges: Sequence[Exchange]) -> Floats:
        """Seconds of each exchange, from when all members are ready until the last is done."""


def _shapes(text: str) -> tuple[tuple[float, ...], ...]:
    """Shapes as a trace writes them, whose sizes are fractions under a share of tokens that is none: `6144/5x4096`."""
    parts = text.split(",") if text else []
    return tuple(tuple(float(Fraction(size)) for size in part.split("x")) for part in parts)


@runtime_checkable
class HostModel(Protocol):
    """What a cost model may say besides: how long the host takes to issue a kernel."""

    def host_seconds(self, kernels: Sequence[Kernel]) -> Floats:
        """Seconds of the host for each kernel."""
