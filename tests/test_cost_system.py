import math
from pathlib import Path

import pytest

from stage.cost.system import list_systems, load_system, parse_system
from stage.errors import StageError

MINE = """
title = "Mine"
source = "a wish"
peak_tflops = { bf16 = 100 }
memory = { capacity_gb = 10, bandwidth_gb_s = 1000 }

[[network]]
topology = "FullyConnected"
ranks = 4
bandwidth_gb_s = 100
latency_ns = 10

[[network]]
topology = "Ring"
ranks = 2
bandwidth_gb_s = 10
latency_ns = 100.5
"""


def message(text: str) -> str:
    with pytest.raises(StageError) as caught:
        parse_system("mine", text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shipped_systems_are_listed() -> None:
    assert list_systems() == ["a100-80gb-sxm", "b200", "h100", "h200"]


@pytest.mark.parametrize("name", list_systems())
def test_shipped_system_is_plausible(name: str) -> None:
    system = load_system(name)
    assert system.name == name
    assert "datasheet" in system.source or "Brief" in system.source
    assert system.peak("bf16") == system.peak("fp16") == pytest.approx(2 * system.peak("tf32"), rel=0.03)
    assert 1e12 < system.memory_bandwidth < 1e13
    assert 70e9 < system.memory_bytes < 200e9
    assert [tier.ranks for tier in system.tiers] == [8, None]
    assert system.tiers[0].bandwidth > system.tiers[1].bandwidth


@pytest.mark.parametrize(
    ("world", "counts"),
    [(1, []), (2, [2]), (8, [8]), (12, [6, 2]), (13, [13]), (24, [8, 3]), (131072, [8, 16384])],
)
def test_levels_multiply_to_the_world(world: int, counts: list[int]) -> None:
    levels = load_system("h100").levels(world)
    assert [count for _, count in levels] == counts
    assert math.prod(counts) == world


def test_file_of_ones_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    system = load_system(tmp_path / "mine.toml")
    assert (system.name, system.memory_bytes, system.peak("bf16")) == ("mine", 10 * 10**9, 1e14)
    assert system.tiers[1].latency == pytest.approx(100.5e-9)
    assert load_system(str(tmp_path / "mine.toml")) == system


def test_world_beyond_the_last_tier_is_an_error() -> None:
    with pytest.raises(StageError) as caught:
        parse_system("mine", MINE).levels(16)
    assert str(caught.value) == "system mine connects 8 devices, not 16: add a [[network]] tier"


def test_unknown_system_and_dtype_list_the_known_ones() -> None:
    with pytest.raises(StageError) as caught:
        load_system("h1000")
    known = "a100-80gb-sxm, b200, h100, h200"
    assert str(caught.value) == f"there is no system 'h1000': take one of {known}, or a .toml file"
    with pytest.raises(StageError) as caught:
        load_system("a100-80gb-sxm").peak("fp8")
    expected = "system a100-80gb-sxm has no peak for fp8: it has those of fp64, fp32, tf32, fp16, bf16, int8"
    assert str(caught.value) == expected


def test_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="cannot be read"):
        load_system(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(StageError, match="cannot be read"):
        load_system(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "title",
            "titel",
            "system mine has the unknown key 'titel'; known: title, source, peak_tflops, memory, network",
        ),
        ('source = "a wish"', "", "system mine lacks the key 'source': add it"),
        ('"a wish"', "1", "system mine: source is 1; a text is expected"),
        ("= { bf16 = 100 }", "= 1", "system mine: peak_tflops is 1; a table [peak_tflops] is expected"),
        (
            "bf16 = 100",
            "bf16 = true",
            "system mine: [peak_tflops] bf16 is True; a number above 0 is expected",
        ),
        ("bf16 = 100", "bf16 = 0", "system mine: [peak_tflops] bf16 is 0; a number above 0 is expected"),
        (
            "bf16 = 100",
            "",
            "system mine: give [peak_tflops] by dtype and [[network]], the innermost tier first",
        ),
        ("= 1000", "= inf", "system mine: [memory] bandwidth_gb_s is inf; a number above 0 is expected"),
        (
            '"Ring"',
            '"Torus"',
            "system mine: [[network]] topology is 'Torus'; known: Ring, Switch, FullyConnected",
        ),
        (
            "ranks = 2",
            "ranks = 1",
            "system mine: [[network]] ranks is 1; an integer of at least 2 is expected",
        ),
        ("ranks = 4", "", "system mine: give `ranks` on every [[network]] but the last"),
        (
            "latency_ns = 10\n",
            "latency = 10\n",
            "system mine: [[network]] has the unknown key 'latency'; known: topology, bandwidth_gb_s, latency_ns, ranks",
        ),
    ],
)
def test_mistake_in_a_file_is_an_error(old: str, new: str, text: str) -> None:
    assert message(MINE.replace(old, new)) == text


def test_text_that_is_no_toml_is_an_error() -> None:
    assert message("x").startswith("system mine: not valid TOML: ")
