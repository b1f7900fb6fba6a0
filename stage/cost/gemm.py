"""Seconds of products of matrices on a device's units, by shape.

A kernel cuts the result into tiles and deals them to the units (SMs, CUs) in waves; each tile is a loop over k. Several
shapes of tile and numbers of parts of k are tried, as a library's heuristic does, and the fastest is taken. Each is
bound by one of three things:

* a unit's loop: whole tiles of whole steps of k at the boost clock, in whole waves (NVIDIA, Matrix Multiplication
  Background User's Guide, sections 3.1 and 3.2: tile and wave quantization), or what feeds it with operands from the
  last cache: (m + n) k elements for a tile of m x n;
* the power limit: all tiles together at the clock that it leaves. A wave that leaves units idle leaves their power to
  the others, so quantisation into waves costs less where the limit is tight;
* beside them the traffic of the parts of k, whose sums are written and read in fp32.

Each bound grows with m, n and k, so a larger product is never faster.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PARTS", "Units", "matmul_seconds", "tiles_of"]

Floats = NDArray[np.float64]

PARTS = (1, 2, 4, 8, 16)
"""Into how many parts k may be cut (split-k)."""

SMALLEST = 64
"""No tile is smaller in m or n; half as many rows would leave matrix units half empty all the same."""

PARTIAL_BYTES = 4 + 4
"""Of an element of a part's sum, written and read in fp32."""


@dataclass(frozen=True, slots=True)
class Units:
    """What multiplies matrices: `units` of them with operands from a cache at `feed` bytes a second in all.

    `tiles` are shapes (m, n) of a tile, `step` what k is cut into, `fill` seconds of a tile outside its loop.
    """

    units: int
    tiles: tuple[tuple[int, int], ...]
    step: int
    feed: float
    fill: float


def tiles_of(tile: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Shapes of tiles that a library has beside its largest one: sides halved, either way round.

    >>> tiles_of((64, 32))
    ((64, 32), (32, 64), (32, 32))
    >>> tiles_of((128, 256))
    ((256, 128), (128, 256), (256, 64), (128, 128), (64, 256), (128, 64), (64, 128), (64, 64))
    """
    long, short = max(tile), min(tile)
    least = min(SMALLEST, short)
    sides = sorted({max(least, side // half) for side in (long, short) for half in (1, 2)}, reverse=True)
    found = [(a, b) for a in sides for b in sides if a * b <= long * short]
    return tuple(sorted(found, key=lambda shape: (-shape[0] * shape[1], -shape[0])))


def matmul_seconds(
    units: Units,
    sizes: tuple[Floats, Floats, Floats, Floats],
    boost: Floats,
    sustained: Floats,
    width: Floats,
) -> Floats:
    """Seconds of products of groups x (m x k by k x n), each the fastest over tiles and parts of k.

    `boost` and `sustained` are FLOP/s of the whole device by product, `width` bytes of an element of an operand.
    """
    groups, m, n, k = sizes
    best = np.full(m.shape, np.inf)
    for rows, columns in units.tiles:
        tiles = groups * np.ceil(m / rows) * np.ceil(n / columns)
        for parts in PARTS:
            depth = np.ceil(k / (parts * units.step)) * units.step
            flops = 2.0 * rows * columns * depth
            feed = (rows + columns) * depth * width
            one = np.maximum(flops * units.units / boost, feed * units.units / units.feed) + units.fill
            loop = np.ceil(tiles * parts / units.units) * one
            sums = groups * m * n * parts * PARTIAL_BYTES / units.feed if parts > 1 else 0.0
            best = np.minimum(best, np.maximum(loop, tiles * parts * flops / sustained) + sums)
    return best
