"""Expert loads: how many tokens each expert of a mixture gets.

A load is a histogram over the experts, one for all MoE layers or one for each: drawn from Zipf's law, or given. It
becomes whole tokens a source, one of the equal parts that the tokens of a micro-batch come from, by the method of
largest remainder. Every source has the same histogram, so its tokens are known from the histogram alone.

Invariants of `token_counts`:

* they sum to tokens x top_k, for every token visits `top_k` experts;
* no expert has more than all tokens, for these experts are different ones, so a routing with these counts exists;
* an expert without popularity has none, and every other is less than one token away from its share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stage.errors import StrategyError

__all__ = [
    "ExpertLoad",
    "make_load",
    "token_capacity",
    "token_counts",
    "zipf_load",
]

Ints = NDArray[np.int64]

RESOLUTION: Final = 1 << 31
"""The most that the popularities of a row sum to; products with as many tokens then fit 63 bits."""

MOST: Final = 1e18


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Popularities of the experts as whole numbers: a row for each MoE layer, or one for all of them."""

    rows: tuple[tuple[int, ...], ...]

    def row(self, layer: int) -> tuple[int, ...]:
        """The popularities in the MoE layer of this number, counted from 0 over the MoE layers."""
        return self.rows[layer if len(self.rows) > 1 else 0]


def zipf_load(exponent: float, experts: int, seed: int) -> ExpertLoad:
    """Popularities proportional to rank^-exponent, the ranks dealt out to the experts by the seed (Zipf 1949).

    >>> zipf_load(0, 4, seed=1).rows
    ((1, 1, 1, 1),)
    """
    ranks = 1.0 + np.random.default_rng(seed).permutation(experts)
    return ExpertLoad((_whole(np.power(ranks, -exponent)),))


def make_load(
    rows: Sequence[Sequence[float]], experts: int, top_k: int, layers: int, origin: str
) -> ExpertLoad:
    """The load of these histograms, counts or fractions; `layers` is how many MoE layers there are.

    A `StrategyError` names the row that does not fit.
    """
    if len(rows) not in (1, layers):
        raise StrategyError(
            f"{origin}: has {len(rows)} rows; give one, or one for each of {layers} MoE layers"
        )
    for number, row in enumerate(rows, 1):
        problem = _problem(row, experts, top_k)
        if problem:
            raise StrategyError(f"{origin}: row {number} {problem}")
    return ExpertLoad(tuple(_whole(np.array(row, np.float64)) for row in rows))


def _problem(row: Sequence[float], experts: int, top_k: int) -> str:
    """What is wrong with a histogram, empty if nothing is."""
    if len(row) != experts:
        return f"has {len(row)} numbers; give one for each of {experts} experts"
    wrong = next((value for value in row if not 0 <= value <= MOST), None)
    if wrong is not None:
        return f"has {wrong}; a load is a number from 0 to {MOST:g}"
    busy = sum(value > 0 for value in row)
    if busy < top_k:
        return f"has {busy} experts with tokens; a token visits {top_k} different ones, so give tokens to as many"
    return ""


def _whole(weights: NDArray[Any]) -> tuple[int, ...]:
    """Positive numbers as integers: themselves where they are some, else rounded; none of them becomes 0."""
    total = weights.sum()
    if total < RESOLUTION and np.all(weights == np.floor(weights)):
        return tuple(map(int, weights))
    scaled = np.maximum(1, np.floor(weights / total * RESOLUTION))
    return tuple(np.where(weights > 0, scaled, 0).astype(np.int64).tolist())


def token_counts(popularity: Sequence[int], tokens: int, top_k: int) -> Ints:
    """Tokens of each expert, int64[experts], of `tokens` that visit `top_k` different experts each.

    >>> token_counts((6, 1, 1, 0), 4, 2).tolist()
    [4, 2, 2, 0]
    """
    weights = np.array(popularity, np.int64)
    if tokens * top_k > RESOLUTION:
        raise StrategyError(
            f"{tokens} tokens a source x top_k = {top_k} are more than {RESOLUTION}, too many to share out; "
            "choose a smaller seq or micro_batch"
        )
    full = np.zeros(len(weights), np.bool_)
    while True:  # an expert that all tokens visit leaves its share to the others; fewer than top_k are such
        left, shared = tokens * (top_k - int(full.sum())), np.where(full, 0, weights)
        total = int(shared.sum())
        over = shared * left > tokens * total
        if not over.any():
            break
        full |= over
    counts = np.where(full, tokens, shared * left // total)
    missing = tokens * top_k - int(counts.sum())
    counts[np.argsort(-(shared * left % total), kind="stable")[:missing]] += 1
    return counts


def token_capacity(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """The most tokens of a source that an expert takes: factor x tokens x top_k / experts, rounded up.

    It is `get_capacity` of Megatron-LM's router, but for the factor, which is the decimal that was written.

    >>> token_capacity(1.1, 400, 2, 8), token_capacity(1.0, 3, 1, 2)
    (110, 2)
    """
    return math.ceil(Fraction(repr(factor)) * tokens * top_k / experts)
