"""Unbalanced causal attention: the work of every part of a sequence, counted pair by pair in a mask."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.cli import main
from stage.errors import StrategyError
from stage.ops.masks import keys_of_chunk, keys_per_query
from stage.strategy import parse_strategy
from stage.synthesis import synthesize
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from stage.traceset import TraceSet
from tests.small import MODELS

SEQ = 48
CORE = ("attention", "attention_backward")


def mask_weights(seq: int, window: int | None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How much of each (query, key) pair a causal mask leaves, where it goes through a pair half of it.

    That is the repository's count of pairs: S^2 / 2 in all.
    """
    distance = np.arange(seq)[:, None] - np.arange(seq)[None, :]
    weights = np.where(distance > 0, 1.0, np.where(distance == 0, 0.5, 0.0))
    if window is not None and window < seq:
        weights = np.where(distance > window, 0.0, np.where(distance == window, 0.5, weights))
    return weights


@given(parts=st.integers(1, 8), length=st.integers(1, 9), window=st.none() | st.integers(1, 80))
def test_keys_of_a_chunk_are_those_of_its_rows_in_the_mask(
    parts: int, length: int, window: int | None
) -> None:
    seq = parts * length
    rows = mask_weights(seq, window).sum(axis=1).reshape(parts, length)
    found = [keys_of_chunk(seq, window, (i, parts)) * length for i in range(parts)]
    assert found == rows.sum(axis=1).tolist()
    assert sum(found) == keys_per_query(seq, "causal", window) * seq


# ------------------------------------------------------------------------------------------- traces


def traces_of(model: str = "llama3-8b", *, balance: str | None = "none", **options: Any) -> TraceSet:
    sizes = {**MODELS[model], **options.pop("sizes", {})}
    return synthesize(
        model,
        options.pop("strategy", "megatron_sp"),
        sizes=sizes,
        seq=SEQ,
        vocab_multiple=8,
        context_balance=balance,
        **options,
    )


def work(traces: TraceSet, rank: int, names: tuple[str, ...] = CORE) -> dict[str, int]:
    """The work of the attention cores of a rank by layer, op and phase."""
    found: dict[str, int] = {}
    for node in traces.nodes(rank):
        if node.get("op") in names or ("core." in node.name and node.get("op") in ("contract", *CORE)):
            key = f"{int(str(node.get('layer')))} {node.name.partition('.')[2]}"
            found[key] = found.get(key, 0) + int(str(node.get("num_ops")))
    return found


def sharing(traces: TraceSet, rank: int) -> list[int]:
    """The ranks that differ from a rank along cp alone, in order."""
    mesh = traces.classes.mesh
    (row,) = [row for row in mesh.groups(["cp"]).tolist() if traces.classes.position(rank) in row]
    return [traces.classes.rank_at(position) for position in row]


CASES: dict[str, dict[str, Any]] = {
    "dense": {"cp": 4, "tp": 2, "pp": 2, "batch": 4},
    "window": {"model": "mistral-7b", "cp": 4, "sizes": {"window": 20}},
    "windows of some layers": {"model": "gpt-oss-20b", "cp": 3, "sizes": {"window": 6}},
    "wide window": {"model": "mistral-7b", "cp": 2, "sizes": {"window": 999}},
    "latent": {"model": "deepseek-v3", "cp": 2},
    "recompute": {"cp": 2, "recompute": "full"},
    "split backward": {"cp": 2, "pp": 2, "batch": 4, "schedule": "zb-h1"},
    "unfused": {"cp": 4, "attention": "unfused"},
    "unfused window": {"model": "mistral-7b", "cp": 4, "sizes": {"window": 20}, "attention": "unfused"},
    "experts": {"model": "mixtral-8x7b", "strategy": "megatron_moe", "dp": 2, "cp": 2, "ep": 4},
    "fsdp": {"strategy": "fsdp", "dp": 2, "cp": 2, "batch": 2},
}


def window_of(case: Mapping[str, Any], layer: int) -> int | None:
    model, window = case.get("model", ""), case.get("sizes", {}).get("window")
    return None if window is None or (model == "gpt-oss-20b" and layer % 2) else int(window)


@pytest.mark.parametrize("name", CASES)
def test_each_rank_does_the_work_of_its_rows_in_the_mask(name: str) -> None:
    """Of the same kernel of balanced ranks it is the share that these rows have of all pairs."""
    case = CASES[name]
    uneven, even = traces_of(**case), traces_of(**case, balance=None)
    parts = case["cp"]
    for first in range(0, uneven.world, uneven.world // case.get("pp", 1)):
        ranks = sharing(uneven, first)
        whole = work(even, first)
        assert whole
        found = [work(uneven, rank) for rank in ranks]
        for key, mean in whole.items():
            layer = int(key.partition(" ")[0])
            rows = mask_weights(SEQ, window_of(case, layer)).sum(axis=1).reshape(parts, -1).sum(axis=1)
            shares = [Fraction(row) / Fraction(rows.sum()) for row in rows]
            assert [one[key] for one in found] == [share * parts * mean for share in shares]
            assert sum(one[key] for one in found) == parts * mean


def test_the_forward_has_the_closed_form() -> None:
    """2 (d_qk + d_v) for each pair that a head sees, of S_local queries with i S_local + S_local / 2 keys each."""
    traces = traces_of(cp=4)
    sizes, local = MODELS["llama3-8b"], SEQ // 4
    for i in range(4):
        pairs = local * (i * local + Fraction(local, 2))
        expected = int(4 * sizes["head_dim"] * sizes["heads"] * pairs)
        forward = {value for key, value in work(traces, i).items() if "/forward" in key}
        backward = {value for key, value in work(traces, i).items() if "/backward" in key}
        assert (forward, backward) == ({expected}, {expected * 5 // 2})


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_the_core_differs_between_ranks(name: str) -> None:
    uneven, even = traces_of(**CASES[name]), traces_of(**CASES[name], balance=None)
    assert uneven.groups == even.groups
    for rank in (0, uneven.world - 1):
        for one, other in zip(uneven.nodes(rank), even.nodes(rank), strict=True):
            assert (one.id, one.name, one.data_deps) == (other.id, other.name, other.data_deps)
            differ = {key for key in one.attrs if one.attrs[key] != other.attrs[key]}
            assert differ <= ({"num_ops"} if "core" in one.name else set())


@pytest.mark.parametrize("name", CASES)
def test_the_set_is_sound(name: str) -> None:
    traces = traces_of(**CASES[name])
    by_class, by_rank = verify_classes(traces.classes), verify(traces)
    assert by_class.defects == by_rank.defects == ()
    assert by_class.nodes == by_rank.nodes
    assert traces.classes.partition.axes == (("pp", "cp") if "pp" in CASES[name] else ("cp",))


def test_model_work_over_all_ranks_is_that_of_balanced_ones() -> None:
    for name in ("dense", "windows of some layers", "unfused"):
        uneven, even = traces_of(**CASES[name]), traces_of(**CASES[name], balance=None)
        for key in ("num_ops", "matmul_ops", "model_flops"):
            sums = [sum(e[key] * e["ranks"] for e in t.manifest["classes"]) for t in (uneven, even)]
            assert sums[0] == sums[1]


def test_zigzag_is_the_default() -> None:
    one, other = traces_of(cp=2, balance="zigzag"), traces_of(cp=2, balance=None)
    assert [one.rank(rank) for rank in one.ranks] == [other.rank(rank) for rank in other.ranks]
    assert one.manifest == other.manifest
    assert "class_axes" not in one.manifest
    assert "context_balance" not in one.manifest
    assert traces_of(cp=2).manifest["context_balance"] == "none"


def test_any_axis_that_shards_the_queries_makes_classes() -> None:
    """With the sequence above the heads, tp shards it, and keys are gathered over tp."""
    text = '[shard]\nbatch = ["dp"]\nseq = ["tp"]\nheads = ["tp"]\nkv_heads = ["tp"]\n'
    traces = traces_of(strategy=parse_strategy(text, "order", "order.toml"), tp=4, dp=2)
    assert traces.classes.partition.axes == traces.classes.mesh.expand(["tp"]) == ("tp_kv", "tp_rep")
    found = [sum(work(traces, rank).values()) for rank in range(4)]
    assert [Fraction(one, found[0]) for one in found] == [1, 3, 5, 7]
    assert verify_classes(traces.classes).ok


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dp": 2}, "no axis shards the sequence of attention (cp = 1)"),
        ({"cp": 2, "mask": "full"}, "attention has no causal mask"),
    ],
)
def test_work_that_is_even_is_not_left_unbalanced(options: dict[str, Any], why: str) -> None:
    with pytest.raises(StrategyError) as found:
        traces_of(**options)
    assert str(found.value) == (
        f"context_balance = none leaves ranks unequal work under a causal mask, but {why}; leave it out, "
        "or take a causal mask and a cp above 1"
    )


def test_an_unknown_balance_is_refused() -> None:
    with pytest.raises(StrategyError, match="context_balance is 'even'; known: zigzag, none"):
        traces_of(cp=2, balance="even")


def test_the_command_line_takes_it(tmp_path: Path) -> None:
    sizes = [f"--set={name}={value}" for name, value in MODELS["llama3-8b"].items() if name != "seq"]
    job = ["synth", "llama3-8b", "--cp", "2", "--seq", str(SEQ), "--context-balance", "none", *sizes]
    assert main([*job, "--vocab-multiple", "8", "--out", str(tmp_path / "t")]) == 0
    assert main(["verify", str(tmp_path / "t")]) == 0
    traces = traces_of(cp=2, strategy=None)
    for rank in traces.ranks:
        assert (tmp_path / f"t/trace.{rank}.et").read_bytes() == traces.rank(rank)
