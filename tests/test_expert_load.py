"""Loads of experts: whole tokens by largest remainder, drawn or read, and one line for each mistake."""

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.errors import StageError, StrategyError
from stage.expert_load import make_load, token_capacity, token_counts, zipf_load
from stage.io.expert_load import read_expert_load
from stage.request import resolve_request
from tests.small import request


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Popularities, tokens and top_k, of which as many experts at least have some popularity."""
    weights = draw(st.lists(st.integers(0, 50) | st.integers(0, 1 << 22), min_size=1, max_size=24))
    busy = sum(weight > 0 for weight in weights)
    weights, busy = (weights, busy) if busy else ([*weights, 1], 1)
    return weights, draw(st.integers(0, 400)), draw(st.integers(1, busy))


def quotas(weights: Sequence[int], tokens: int, top_k: int) -> list[Fraction]:
    """Exact shares: those above all tokens are cut there, and what is cut goes to the others, again and again."""
    full: set[int] = set()
    while True:
        left = tokens * (top_k - len(full))
        total = sum(weight for i, weight in enumerate(weights) if i not in full)
        shares = [
            Fraction(tokens) if i in full else Fraction(weight * left, total)
            for i, weight in enumerate(weights)
        ]
        above = {i for i, share in enumerate(shares) if share > tokens}
        if not above:
            return shares
        full |= above


@given(loads())
def test_counts_are_whole_conserved_possible_and_nearest(load: tuple[list[int], int, int]) -> None:
    weights, tokens, top_k = load
    counts = token_counts(weights, tokens, top_k).tolist()
    shares = quotas(weights, tokens, top_k)
    assert sum(counts) == tokens * top_k
    assert all(0 <= count <= tokens for count in counts)
    assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))
    assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if weight == 0)
    up = [share % 1 for count, share in zip(counts, shares, strict=True) if count > share]
    down = [share % 1 for count, share in zip(counts, shares, strict=True) if count < share]
    assert not up or not down or min(up) >= max(down), "the largest remainders are rounded up"


@given(loads())
def test_a_routing_with_these_counts_exists(load: tuple[list[int], int, int]) -> None:
    """Dealing out the experts in turn gives every token different ones: the same token comes again after all others."""
    weights, tokens, top_k = load
    counts = token_counts(weights, tokens, top_k)
    dealt = np.repeat(np.arange(len(counts)), counts)
    chosen = [dealt[token::tokens] for token in range(tokens)]
    assert all(len(set(experts.tolist())) == len(experts) == top_k for experts in chosen)


def test_equal_popularities_are_balanced() -> None:
    assert token_counts((7,) * 8, 4096, 2).tolist() == [1024] * 8
    assert sorted(token_counts((1,) * 8, 50, 2).tolist()) == [12] * 4 + [13] * 4


def test_popularity_follows_the_law_and_the_seed_deals_it_out() -> None:
    first, again, other = (zipf_load(1.1, 64, seed).rows[0] for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    ranked = sorted(first, reverse=True)
    for rank, weight in enumerate(ranked, 1):
        assert math.isclose(weight, ranked[0] * rank**-1.1, rel_tol=1e-6)


def test_a_steep_law_leaves_no_expert_without_popularity() -> None:
    row = zipf_load(100, 256, seed=3).rows[0]
    assert min(row) == 1
    assert token_counts(row, 1000, 8).max() == 1000


def test_capacity_is_rounded_up_from_the_decimal_that_was_written() -> None:
    assert math.ceil(1.1 * (400 * 2 / 8)) == 111, "which the floats are not"
    assert token_capacity(1.1, 400, 2, 8) == 110
    assert token_capacity(1.25, 10, 2, 8) == 4
    assert token_capacity(0.001, 10, 2, 8) == 1


def test_counts_of_a_file_are_kept_and_fractions_scaled() -> None:
    assert make_load([[3, 0, 5, 1]], 4, 2, 7, "f").row(6) == (3, 0, 5, 1)
    row = make_load([[0.5, 0.25, 0, 1e-12]], 4, 2, 1, "f").row(0)
    assert row[2:] == (0, 1)
    assert abs(row[0] - 2 * row[1]) <= 1
    two = make_load([[1, 2], [2, 1]], 2, 1, 2, "f")
    assert (two.row(0), two.row(1)) == ((1, 2), (2, 1))


def saved(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_files(tmp_path: Path) -> None:
    table = [[1.0, 2.5, 0.0], [3.0, 1.0, 1.0]]
    assert read_expert_load(saved(tmp_path / "a.json", json.dumps(table))) == table
    assert read_expert_load(saved(tmp_path / "b.json", "[1, 2.5, 0]")) == table[:1]
    assert read_expert_load(saved(tmp_path / "c.csv", "# tokens\n1, 2.5,0\n\n3,1,1\r\n")) == table
    assert read_expert_load(saved(tmp_path / "d.csv", b"\xef\xbb\xbf1,2.5,0\n")) == table[:1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "1,2\n1,x\n", "row 2 has 'x'; a load is a number of tokens, or a fraction of them"),
        ("a.csv", "1,,2\n", "row 1 has ''; a load is a number of tokens, or a fraction of them"),
        ("a.csv", "", "has no row; give a row of numbers for each MoE layer, or one for all"),
        ("a.json", "{}", "holds no list; give [numbers], or a list of such lists"),
        ("a.json", "[[1], 2]", "row 2 is no list; give a list of numbers for each MoE layer"),
        ("a.json", "[1, true]", "row 1 has True; a load is a number of tokens, or a fraction of them"),
        ("a.json", '["1"]', "row 1 has '1'; a load is a number of tokens, or a fraction of them"),
        (
            "a.json",
            f"[{10**400}]",
            f"row 1 has 1{'0' * 37}..; a load is a number of tokens, or a fraction of them",
        ),
        ("a.json", "[1", "not valid json: Expecting ',' delimiter: line 1 column 3 (char 2)"),
        ("a.json", "[" * 100_000, "not valid json: maximum recursion depth exceeded"),
        ("a.csv", b"\xff\xfe", "not valid csv: 'utf-8' codec can't decode byte 0xff"),
        (
            "a.csv",
            "1," * (1 << 20) + "1",
            "has more than 1,048,576 numbers; give a row of numbers for each MoE layer",
        ),
        (
            "a.csv",
            " " * (1 << 24) + "1",
            "is larger than 16,777,216 bytes; give a row of numbers for each MoE layer",
        ),
    ],
    ids=range(13),
)
def test_a_wrong_file_is_named_with_its_row(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    path = saved(tmp_path / name, text)
    with pytest.raises(StrategyError) as caught:
        read_expert_load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match=r"none\.csv: No such file or directory; give a \.csv or \.json file"
    ):
        read_expert_load(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2]], "f: row 1 has 2 numbers; give one for each of 3 experts"),
        ([[1, 2, 3], [1, -1, 3]], "f: row 2 has -1; a load is a number from 0 to 1e+18"),
        ([[1, math.nan, 3]], "f: row 1 has nan; a load is a number from 0 to 1e+18"),
        ([[1, math.inf, 3]], "f: row 1 has inf; a load is a number from 0 to 1e+18"),
        (
            [[1, 0, 0]],
            "f: row 1 has 1 experts with tokens; a token visits 2 different ones, so give tokens to as many",
        ),
        ([[1, 1, 1]] * 3, "f: has 3 rows; give one, or one for each of 2 MoE layers"),
    ],
)
def test_a_histogram_must_fit_the_model(rows: list[list[float]], message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        make_load(rows, 3, 2, 2, "f")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_load": "zipf"},
            "expert_load is 'zipf'; give balanced, zipf:EXPONENT as in zipf:1.1, or a .csv",
        ),
        ({"expert_load": "zipf:101"}, "expert_load is 'zipf:101'; give balanced, zipf:EXPONENT"),
        ({"capacity_factor": 0}, "capacity_factor is 0; a number above 0 and up to 1000000 is expected"),
        ({"capacity_factor": math.nan}, "capacity_factor is nan; a number above 0"),
        ({"alltoall": "ring"}, "alltoall is 'ring'; known: collective, p2p"),
        (
            {"pad_to_capacity": True},
            "pad_to_capacity is given without capacity_factor, which says what to pad to",
        ),
        (
            {"seed": 1},
            "seed = 1, but expert_load = balanced draws nothing; leave it out, or give zipf:EXPONENT",
        ),
        ({"expert_load": "none.csv"}, "none.csv: No such file or directory"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(StageError) as caught:
        request("mixtral-8x7b", "megatron_moe", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("option", [{"expert_load": "zipf:1"}, {"capacity_factor": 2.0}])
def test_a_model_without_experts_has_no_load(option: dict[str, object]) -> None:
    with pytest.raises(
        StrategyError, match=r"^(expert_load|capacity_factor) is of experts, but llama3-8b has none; "
    ):
        resolve_request("llama3-8b", **option)  # type: ignore[arg-type]


def test_a_balanced_load_within_its_capacity_is_the_default() -> None:
    assert request("mixtral-8x7b", "megatron_moe", capacity_factor=1.0).expert_load is None
    assert request("mixtral-8x7b", "megatron_moe", capacity_factor=0.9).expert_load is not None
    padded = request("mixtral-8x7b", "megatron_moe", capacity_factor=1.0, pad_to_capacity=True)
    assert padded.expert_load is not None


def test_the_layers_with_experts_are_counted() -> None:
    assert request("deepseek-v3", "megatron_moe").model.moe_layers == (1,)
    assert resolve_request("deepseek-v3", mtp=True).model.moe_layers == (*range(3, 61), -1)
    assert request("mixtral-8x7b", "megatron_moe").model.moe_layers == (0, 1)
    assert request("llama3-8b", "megatron_sp").model.moe_layers == ()
