"""Seconds of fused attention on a device's units: FlashAttention forward and backward, by shape.

A block of queries of one head is the work of one unit, which goes through blocks of keys (Dao 2023, FlashAttention-2,
section 3.3). A pair of a query and a key costs its share of products on the matrix units, and beside them a softmax on
the others: an exponential, of which a unit has a few a clock, the running maximum and sum, conversions, and backward
the exponential again and the sums of dq. Overlap of the two is in the clocks measured (FlashAttention-3, section 3.1).

* Under a mask the blocks on its edge are computed whole: half a block of keys more for each query.
* Blocks differ in length, and the longest may start late: the last to end is a quarter of the longest behind the mean,
  and no earlier than the longest alone.
* Backward goes through blocks of keys, and pads heads to a power of two.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage.cost.shapes import Attention

__all__ = ["Blocks", "flash_seconds", "work_of_pair"]

Floats = NDArray[np.float64]

STEP = 128
"""Keys of one step of a block."""

LATE = 0.25
"""Of the longest block, by which the last one to end is behind the mean of the units."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What runs blocks: `units` at `clock` Hz, with `fill` seconds of each block outside its loop.

    A block is `rows` queries forward, and as many keys as a step backward.
    """

    units: int
    clock: float
    fill: float
    rows: int


def work_of_pair(attention: Attention, *, backward: bool) -> float:
    """FLOPs that a pair costs on matrix units: two products forward, five of a padded head backward.

    >>> work_of_pair(Attention(1, 1, 1, 8, 8, 192, 128, 1.0), backward=True)
    2560.0
    """
    if backward:
        return 10.0 * 2.0 ** math.ceil(math.log2(max(attention.qk_dim, attention.v_dim)))
    return 2 * (attention.qk_dim + attention.v_dim)


def flash_seconds(
    blocks: Blocks,
    sizes: tuple[Floats, Floats, Floats, Floats],
    share: Floats,
    rate: Floats,
    clocks: Floats,
    *,
    backward: bool,
) -> Floats:
    """Seconds of attentions, each of `heads` of a batch, queries, keys and FLOPs of a pair, which are `sizes`.

    `share` is that of pairs that meet, `rate` the FLOP/s of the whole device, `clocks` those of a unit's softmax of a
    pair.
    """
    heads, queries, keys, work = sizes
    pair = work * blocks.units / rate + clocks / blocks.clock
    rows = STEP if backward else blocks.rows
    count = heads * np.ceil(queries / rows)
    whole = np.ceil(keys / STEP) * STEP
    edge = np.where(share < 1, STEP / 2, 0.0)
    mean = rows * np.minimum(whole, share * keys + edge) * pair + blocks.fill
    longest: Floats = rows * np.minimum(whole, 2 * share * keys + edge) * pair + blocks.fill
    seconds: Floats = np.maximum(count * mean / blocks.units + LATE * longest, longest)
    return seconds
