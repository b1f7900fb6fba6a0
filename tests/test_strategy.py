"""Strategies: strict reading, options on top, and the text of every complaint."""

import os
from pathlib import Path

import pytest

from stage.catalog import default_strategy, list_strategies, load_strategy
from stage.errors import StrategyError
from stage.strategy import Strategy, parse_strategy
from tests.small import PRESETS, STRATEGIES

SHARD = '\n[shard]\nheads = ["tp"]\n'


def parse(text: str) -> Strategy:
    return parse_strategy(text, "mine", "mine.toml")


def complaint(text: str) -> str:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    return str(caught.value)


def test_catalog_has_the_published_strategies() -> None:
    names = [strategy.name for strategy in list_strategies()]
    assert names == sorted([*STRATEGIES, *PRESETS])
    assert all(strategy.title and strategy.source for strategy in list_strategies())
    assert default_strategy("dense").name == "megatron_sp"
    assert default_strategy("moe").name == "megatron_moe"


def test_rows_keep_their_order_and_axes_are_major_first() -> None:
    strategy = load_strategy("megatron_sp")
    dims = [dim for dim, _ in strategy.shard]
    assert dims.index("heads") < dims.index("batch") < dims.index("seq")
    assert strategy.axes("seq") == ("cp", "tp")
    assert (strategy.zero, strategy.regather) == (1, ("tp",))
    assert load_strategy("megatron").axes("seq") == ("cp",)
    assert load_strategy("hsdp").dp_shard == 8


def test_what_is_omitted_has_its_default() -> None:
    assert parse(SHARD) == Strategy("mine", (("heads", ("tp",)),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "shedule = '1f1b'" + SHARD,
            "mine.toml: unknown key 'shedule' (did you mean 'schedule'?); known keys: title, source, mesh, shard, "
            "schedule, vpp, recompute, zero, regather, overlap_grad, bucket_size, dp_shard, tp_x, reshard_after_forward, context, prefetch, grad_reduce, context_balance, bucket_first_stage, "
            "tp_overlap_chunks, moe_shared_expert_overlap, streams, fuse, "
            "expert_load, seed, capacity_factor, pad_to_capacity, alltoall, "
            "fp8, fp8_param_gather, fp8_dispatch, default_for",
        ),
        ("zero = 1", "mine.toml: table [shard] is missing; it says which axes shard each dim"),
        (
            "[shard]\nhead = ['tp']",
            "mine.toml: shard: unknown dim 'head' (did you mean 'heads'?); known: heads, kv_heads, d_ff, "
            "shared_d_ff, vocab, experts, expert_d_ff, slots, batch, seq, d_model",
        ),
        (
            "[shard]\nheads = ['tpp']",
            "mine.toml: shard: heads: unknown axis 'tpp' (did you mean 'tp'?); known: dp, cp, tp, tp_y, tp_x, edp, ep, etp",
        ),
        (
            "[shard]\nheads = 'tp'",
            "mine.toml: shard: heads is 'tp'; a list of names is expected, such as ['dp']",
        ),
        (
            "[shard]\nheads = ['tp', 'tp']",
            "mine.toml: shard: heads is ['tp', 'tp']; each axis may appear once",
        ),
        ("shard = 3", "mine.toml: shard is 3; a table of dim = [axes] is expected"),
        (
            "schedule = 'zigzag'" + SHARD,
            "mine.toml: schedule is 'zigzag'; known: 1f1b, gpipe, interleaved, looped-bfs, zb-h1, zb-v, dualpipe-v",
        ),
        (
            "recompute = 'ful'" + SHARD,
            "mine.toml: recompute is 'ful' (did you mean 'full'?); known: none, full, selective, every:K, ops:NAME,...",
        ),
        ("zero = 4" + SHARD, "mine.toml: zero is 4; an integer from 0 to 3 is expected"),
        ("zero = true" + SHARD, "mine.toml: zero is True; an integer from 0 to 3 is expected"),
        ("bucket_size = -1" + SHARD, "mine.toml: bucket_size is -1; an integer of at least 0 is expected"),
        ("overlap_grad = 1" + SHARD, "mine.toml: overlap_grad is 1; true or false is expected"),
        ("title = 1" + SHARD, "mine.toml: title is 1; a text is expected"),
        (
            "mesh = ['tp', 'dp']" + SHARD,
            "mine.toml: mesh is ['tp', 'dp']; list the axes outermost first: ['dp', 'tp']",
        ),
        (
            "mesh = ['dp']" + SHARD,
            "strategy mine: [shard] uses tp, which is not in mesh = ['dp']; add it there",
        ),
        ("zero = ", "mine.toml: not valid TOML: Invalid value (at end of document)"),
        (
            "zero = 1\nzero = 2" + SHARD,
            "mine.toml: not valid TOML: Cannot overwrite a value (at line 2, column 9)",
        ),
    ],
)
def test_wrong_files_are_named_with_key_and_known_values(text: str, message: str) -> None:
    assert complaint(text) == message


def test_absurd_files_are_one_line_too() -> None:
    assert complaint("zero = " + "9" * 5000 + SHARD).startswith("mine.toml: not valid TOML: ")
    assert complaint("zero = " + "[" * 100_000).startswith("mine.toml: not valid TOML: ")


def test_options_replace_keys_and_are_checked_alike() -> None:
    strategy = load_strategy("fsdp").replace(zero=2, schedule=None, dp_shard=4)
    assert (strategy.zero, strategy.schedule, strategy.dp_shard) == (2, "1f1b", 4)
    with pytest.raises(
        StrategyError, match=r"^strategy fsdp: zero is 7; an integer from 0 to 3 is expected$"
    ):
        strategy.replace(zero=7)
    with pytest.raises(StrategyError, match=r"^strategy fsdp: unknown key 'name'; known keys: title, "):
        strategy.replace(name="other")


def test_an_axis_that_a_strategy_does_not_use_must_be_1() -> None:
    ddp = load_strategy("ddp")
    ddp.check_degrees({"dp": 8, "pp": 2, "cp": 2, "tp": 1, "ep": 1})
    with pytest.raises(StrategyError) as caught:
        ddp.check_degrees({"dp": 4, "tp": 2})
    assert str(caught.value) == (
        "strategy ddp does not use the axis tp, but its degree is 2; leave it at 1 or take a strategy that uses it "
        "(this one uses pp, dp, cp)"
    )
    load_strategy("megatron_moe").check_degrees({"pp": 2, "dp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2})


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(StrategyError) as caught:
        load_strategy("megatron_spp")
    assert str(caught.value) == (
        "unknown strategy 'megatron_spp' (did you mean megatron_sp or megatron or megatron_moe?); "
        "known: ddp, deepseek_v3, fsdp, gpt3_175b, gpt3_1t, gpt3_530b, hsdp, llama3_405b, megascale_175b, megatron, "
        "megatron_moe, megatron_sp, mixtral_8x7b, mlperf_gpt3_175b, mlperf_llama31_405b, torchtitan, torchtitan_hsdp, "
        "tp_2d, zero2; the path of a .toml file works as well"
    )


def test_a_file_of_the_user_is_read_by_path(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(SHARD)
    assert load_strategy(path) == Strategy("own", (("heads", ("tp",)),))
    with pytest.raises(StrategyError, match=r"missing\.toml: cannot be read: No such file or directory$"):
        load_strategy(tmp_path / "missing.toml")
    path.write_bytes(b"\xff")
    with pytest.raises(
        StrategyError, match=r"own\.toml: not a text file in UTF-8: invalid start byte at byte 0$"
    ):
        load_strategy(str(path))


def test_a_policy_that_is_no_text_is_said_once() -> None:
    assert complaint("recompute = ['norm']" + SHARD) == "mine.toml: recompute is ['norm']; a text is expected"


def test_a_pipe_is_no_strategy(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.toml")
    with pytest.raises(StrategyError, match=r"is no file; give the path of one$"):
        load_strategy(tmp_path / "mine.toml")
