"""Keys that queries meet, against a mask that is counted pair by pair."""

from fractions import Fraction

import numpy as np
import pytest

from stage.ops.masks import Block, keys_of_block, keys_per_query, met_keys
from stage.symbols import evaluate, size
from tests.kernels import Floats
from tests.test_numerics import zigzag


def distances(seq: int, block: Block, rank: int) -> Floats:
    """How far the keys of a step of a ring stand before the queries of a rank."""
    laid = np.arange(seq) if block.consecutive else zigzag(seq, block.ranks)
    parts = np.split(laid, block.ranks)
    found: Floats = parts[rank][:, None] - parts[(rank - block.step) % block.ranks][None, :]
    return found


def area(distance: Floats, window: int | None) -> Fraction:
    """The area of a mask in which token i is the interval from i to i + 1; on its edges a pair counts half."""
    inside = (distance > 0) & (distance < (distance.max() + 1 if window is None else window))
    edges = (distance == 0).sum() + (0 if window is None else (distance == window).sum())
    return Fraction(int(inside.sum())) + Fraction(int(edges), 2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_under_a_causal_mask_every_step_of_every_rank_is_the_same_work(ranks: int) -> None:
    seq = 6 * ranks
    own = seq // ranks
    for step in range(ranks):
        block = Block(step, ranks)
        assert {area(distances(seq, block, rank), None) for rank in range(ranks)} == {Fraction(own * own, 2)}
        assert keys_of_block(own, None, block) == Fraction(own, 2)
        if step:  # but for its own block a rank has no pairs on the edge
            assert {int((distances(seq, block, rank) >= 0).sum()) for rank in range(ranks)} == {
                own * own // 2
            }


def test_consecutive_parts_are_not_the_same_work() -> None:
    steps = [
        [area(distances(12, Block(step, 3, True), rank), None) for rank in range(3)] for step in range(3)
    ]
    assert steps == [[8, 8, 8], [0, 16, 16], [0, 0, 16]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 11, 40, 100])
@pytest.mark.parametrize("consecutive", [False, True])
def test_a_step_has_the_pairs_of_its_rank_or_their_mean(
    ranks: int, window: int | None, consecutive: bool
) -> None:
    seq = 6 * ranks
    own, total = seq // ranks, Fraction(0)
    for step in range(ranks):
        block = Block(step, ranks, consecutive)
        counted = [area(distances(seq, block, rank), window) for rank in range(ranks)]
        assert [keys_of_block(own, window, block, rank) * own for rank in range(ranks)] == counted
        assert keys_of_block(own, window, block) * own * ranks == sum(counted)
        total += sum(counted)
    assert total == keys_per_query(seq, "causal", window) * seq


def test_without_a_mask_a_step_meets_the_whole_block() -> None:
    assert met_keys(10, {"mask": "full", "window": 3, "block": Block(1, 4)}) == 10


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("consecutive", [False, True])
def test_symbols_say_the_same_as_numbers(step: int, window: int | None, consecutive: bool) -> None:
    block = Block(step, 4, consecutive)
    symbol = None if window is None else size("window")
    expression = 2 * 8 * 4 * keys_of_block(size("seq") / 4, symbol, block)
    assert evaluate(expression, {"seq": 32, "window": 6}) == 2 * 8 * 4 * keys_of_block(8, window, block)
