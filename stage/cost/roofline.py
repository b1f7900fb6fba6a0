"""The model `roofline`: kernels are as long as their arithmetic or their traffic, whichever is longer.

Arithmetic is at the peak of the units that do it, with what shapes lose: `stage.cost.gemm` for products,
`stage.cost.flash` for fused attention, and the plain peak where nothing but FLOPs and bytes is known. Traffic is at the
bandwidth of memory, less what the last cache still holds. To the longer one come the start and end of the kernel and
the gap after it, which are what a small kernel takes: it has too few bytes in flight to fill the memory's latency
(Little's law). The host, which issues kernels one after another, is apart (`Roofline.host_seconds`). Exchanges are
those of `stage.cost.network`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stage.cost.columns import BACKWARD, BYTES, FORWARD, PRODUCT, VECTOR, Columns, columns_of
from stage.cost.flash import Blocks, flash_seconds
from stage.cost.gemm import Units, matmul_seconds, tiles_of
from stage.cost.network import Network
from stage.cost.system import DTYPES, System
from stage.cost.work import Exchange, Kernel
from stage.errors import StageError

__all__ = ["ISSUES", "Roofline", "make"]

Floats = NDArray[np.float64]

ISSUES = ("eager", "compiled", "graph")
"""How the host issues: op by op of a framework, one launch a kernel, or one launch of all (CUDA graphs)."""

EXPOSED = 0.5
"""Of the time to store a product's result, or to add it to what is there: the loops of other tiles hide the rest."""

TILE, STEP, CLOCK = (256, 256), 16, 1.8e9
"""Where a system does not say the largest tile, the depth of an instruction, or its clock."""


class Roofline:
    """Prices kernels on a system; `issue` says how its host issues them (`ISSUES`).

    >>> from stage.cost.system_file import load_system
    >>> model = Roofline(load_system("h100"))
    >>> square = Kernel("contract", "bf16", 2 * 8192**3, 6 * 8192**2, "8192x8192,8192x8192->8192x8192", True)
    >>> add = Kernel("add", "bf16", 2**30, 6 * 2**30, "1073741824,1073741824->1073741824")
    >>> [float(seconds.round(4)) for seconds in model.kernels([square, add])]
    [0.0014, 0.0022]
    """

    def __init__(self, system: System, issue: str = "eager") -> None:
        if issue not in ISSUES:
            raise StageError(f"the host issues {issue!r}: choose one of {', '.join(ISSUES)}")
        self.system, self.issue, self.network = system, issue, Network(system)
        tile = system.tile or TILE
        efficiency = system.efficiency
        fastest = max(system.matrix_flops.get(dtype, 0.0) * BYTES[dtype] for dtype in DTYPES)
        feed = efficiency.operand_bandwidth or 1.25 * fastest * sum(tile) / (2 * tile[0] * tile[1])
        step = system.instruction[2] if system.instruction else STEP
        self.units = Units(system.units, tiles_of(tile), step, feed, efficiency.tile)
        clock = system.clock.get("matrix") or system.clock.get("vector") or CLOCK
        self.blocks = Blocks(system.units, clock, efficiency.block, efficiency.rows)
        self.peaks = np.array([_matrix_peak(system, dtype) for dtype in DTYPES])
        self.shares = np.array([efficiency.matrix_share(dtype) for dtype in DTYPES])
        self.widths = np.array([BYTES[dtype] for dtype in DTYPES])
        self.vector = system.vector_flops.get("fp32") or max(system.vector_flops.values())

    def kernels(self, kernels: Sequence[Kernel]) -> Floats:
        """Seconds of each kernel on the device, the gap after it included."""
        return self.price(columns_of(kernels))

    def exchanges(self, exchanges: Sequence[Exchange]) -> Floats:
        """Seconds of each exchange, from when all members are ready until the last is done."""
        return self.network.exchanges(exchanges)

    def host_seconds(self, kernels: Sequence[Kernel]) -> Floats:
        """Seconds that the host takes to issue each kernel: a device runs no faster than its host issues.

        A grouped product of experts is one call for each (Transformer Engine's GroupedLinear).
        """
        framework = self.system.framework_op
        if framework is None or self.issue == "graph":
            return np.zeros(len(kernels))
        each = framework if self.issue == "eager" else self.system.kernel_launch
        return each * np.array([_calls(kernel) for kernel in kernels], np.float64)

    def price(self, columns: Columns) -> Floats:
        """Seconds of each kernel of some columns: nothing here is done kernel by kernel."""
        peaks = self._peaks(columns)
        arithmetic = columns.flops / np.where(
            columns.family == VECTOR, self.vector, peaks * self.shares[columns.dtype]
        )
        for family, seconds in (
            (PRODUCT, self._products),
            (FORWARD, self._forward),
            (BACKWARD, self._backward),
        ):
            rows = np.flatnonzero(columns.family == family)
            if rows.size:
                arithmetic[rows] = seconds(columns.take(rows), peaks[rows])
        each = self.system.efficiency.kernel + self.system.kernel_gap
        return np.maximum(arithmetic, self.traffic(columns.bytes)) + each

    def traffic(self, moved: Floats) -> Floats:
        """Seconds of reads and writes: all from memory, but for what the last cache still has of a small kernel's.

        Of the bytes b of a kernel a share `reuse` was used just before, and a cache of C bytes holds 1 - b/C of it.
        """
        system, efficiency = self.system, self.system.efficiency
        held = 0.0 if system.l2_bytes is None else np.maximum(0.0, 1 - moved / system.l2_bytes)
        found = efficiency.reuse * moved * held
        bandwidth = system.memory_bandwidth * efficiency.memory
        return (moved - found) / bandwidth + found / max(bandwidth, self.units.feed)

    def _peaks(self, columns: Columns) -> Floats:
        """The matrix peak of each kernel, at the boost clock; 1 where none is needed."""
        multiplies = columns.family != VECTOR
        peaks = np.where(multiplies, self.peaks[columns.dtype], 1.0)
        if not peaks.all():
            dtype = DTYPES[columns.dtype[np.flatnonzero(peaks == 0)[0]]]
            self.system.peak(dtype)  # raises what names the dtypes that the system has
        return peaks

    def _products(self, columns: Columns, peaks: Floats) -> Floats:
        sizes = columns.groups, columns.m, columns.n, columns.k
        boost, sustained = peaks * self.system.efficiency.boost, peaks * self.shares[columns.dtype]
        loops = matmul_seconds(self.units, sizes, boost, sustained, self.widths[columns.dtype])
        return loops + EXPOSED * columns.stored / (
            self.system.memory_bandwidth * self.system.efficiency.memory
        )

    def _forward(self, columns: Columns, peaks: Floats) -> Floats:
        return self._attention(columns, peaks, backward=False)

    def _backward(self, columns: Columns, peaks: Floats) -> Floats:
        return self._attention(columns, peaks, backward=True)

    def _attention(self, columns: Columns, peaks: Floats, *, backward: bool) -> Floats:
        sizes, efficiency = (columns.groups, columns.m, columns.n, columns.k), self.system.efficiency
        clocks = np.full(peaks.shape, efficiency.softmax[backward])
        rate = peaks * efficiency.attention
        return flash_seconds(self.blocks, sizes, columns.share, rate, clocks, backward=backward)


def make(system: System, argument: Path | None) -> Roofline:
    """The model of a system, for the entry point; it reads no file."""
    assert argument is None, "roofline is named, never given by a path"
    return Roofline(system)


def _calls(kernel: Kernel) -> float:
    """How many products of a library a kernel is: one for each expert, of tensors[experts, tokens or features, ...]."""
    experts = kernel.product is not None and all(len(shape) == 3 for shape in kernel.operands)
    return max(1.0, kernel.product.groups) if experts and kernel.product is not None else 1.0


def _matrix_peak(system: System, dtype: str) -> float:
    """The peak of a product in a dtype, 0 where the system has none; fp32 operands are multiplied as tf32 if it can."""
    if dtype == "fp32":
        peaks = [system.matrix_flops.get("fp32"), system.vector_flops.get("fp32")]
        return max(peak or 0.0 for peak in peaks)
    return max(peaks.get(dtype, 0.0) for peaks in (system.matrix_flops, system.vector_flops))
