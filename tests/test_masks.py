"""Keys that queries meet, against a mask that is counted pair by pair."""

from fractions import Fraction

import numpy as np
import pytest

from stage.ops.masks import keys_per_query
from stage.symbols import evaluate, size
from tests.kernels import Floats
from tests.test_numerics import zigzag


def distances(seq: int, ranks: int, rank: int, step: int) -> Floats:
    """How far the keys of a step stand before the queries of a rank, whose sequence is laid in a zig-zag."""
    parts = np.split(zigzag(seq, ranks), ranks)
    found: Floats = parts[rank][:, None] - parts[(rank - step) % ranks][None, :]
    return found


def area(distance: Floats, window: int | None) -> Fraction:
    """The area of a mask in which token i is the interval from i to i + 1; on its edges a pair counts half."""
    inside = (distance > 0) & (distance < (distance.max() + 1 if window is None else window))
    edges = (distance == 0).sum() + (0 if window is None else (distance == window).sum())
    return Fraction(int(inside.sum())) + Fraction(int(edges), 2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_under_a_causal_mask_every_step_of_every_rank_is_the_same_work(ranks: int) -> None:
    seq = 6 * ranks
    found = {
        (step > 0, area(distances(seq, ranks, rank, step), None))
        for rank in range(ranks)
        for step in range(ranks)
    }
    own = seq // ranks
    assert found == {(False, Fraction(own * own, 2)), (True, Fraction(own * own, 2))}
    for step in range(ranks):
        assert keys_per_query(own, "causal", None, (step, ranks)) == Fraction(own, 2)
    pairs = {int((distances(seq, ranks, rank, 1) >= 0).sum()) for rank in range(ranks)}
    assert pairs == {own * own // 2}, "pairs themselves, which but for the own block have no edges"


def test_a_sequence_that_is_not_laid_so_is_not_balanced() -> None:
    parts = np.split(np.arange(12), 3)
    assert [int((parts[rank][:, None] >= parts[rank - 1][None, :]).sum()) for rank in range(3)] == [0, 16, 16]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 11, 40, 100])
def test_under_a_window_a_step_is_the_mean_of_the_ranks(ranks: int, window: int) -> None:
    seq = 6 * ranks
    own, total = seq // ranks, Fraction(0)
    for step in range(ranks):
        counted = sum((area(distances(seq, ranks, rank, step), window) for rank in range(ranks)), Fraction(0))
        assert keys_per_query(own, "causal", window, (step, ranks)) * own * ranks == counted
        total += counted
    assert total == keys_per_query(seq, "causal", window) * seq


def test_without_a_mask_a_step_meets_the_whole_block() -> None:
    assert keys_per_query(10, "full", 3, (1, 4)) == 10


@pytest.mark.parametrize("step", range(4))
def test_symbols_say_the_same_as_numbers(step: int) -> None:
    expression = 2 * 8 * 4 * keys_per_query(size("seq") / 4, "causal", size("window"), (step, 4))
    expected = 2 * 8 * 4 * keys_per_query(8, "causal", 6, (step, 4))
    assert evaluate(expression, {"seq": 32, "window": 6}) == expected
