from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.cost.efficiency import Efficiency
from stage.cost.system_file import SHIPPED, list_systems, load_system, parse_system, read_system, system_of
from stage.errors import StageError

MINE = """
title = "Mine"
sources = ["a wish"]
assumptions = ["host", "network.node.latency_ns"]
compute = { unit = "core", units = 10, clock_mhz = { matrix = 1000 }, tile = [64, 32] }
matrix_tflops = { bf16 = 100 }
vector_tflops = { fp32 = 1 }
matrix_flops_per_clock = { bf16 = 10_000 }
memory = { capacity_bytes = 10_000_000_000, bandwidth_gb_s = 1000 }
host = { bandwidth_gb_s = 50, kernel_gap_us = 1, kernel_launch_us = 2 }

[[network]]
name = "node"
topology = "fully_connected"
ranks = 4
bandwidth_gb_s = 100
latency_ns = 10

[[network]]
name = "pod"
topology = "ring"
ranks = 2
bandwidth_gb_s = 10
latency_ns = 100.5
"""


def message(text: str) -> str:
    with pytest.raises(StageError) as caught:
        parse_system("mine", text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_file_of_ones_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    system = load_system(tmp_path / "mine.toml")
    assert (system.name, system.memory_bytes, system.peak("bf16")) == ("mine", 10**10, 1e14)
    assert (system.clock, system.tile, system.l2_bytes) == ({"matrix": 1e9}, (64, 32), None)
    assert system.tiers[1].latency == pytest.approx(100.5e-9)
    assert (system.kernel_gap, system.kernel_launch, system.framework_op) == (1e-6, 2e-6, None)
    assert (system.tdp_watts, system.idle_watts) == (None, None)
    assert load_system(str(tmp_path / "mine.toml")) == system


def test_text_and_tables_come_with_a_system(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    system, text, table = read_system(tmp_path / "mine.toml")
    assert text == MINE
    assert table["network"][0]["name"] == system.tiers[0].name == "node"


def test_unknown_system_lists_the_known_ones() -> None:
    with pytest.raises(StageError) as caught:
        load_system("h1000")
    known = ", ".join(list_systems())
    assert str(caught.value) == f"there is no system 'h1000': take one of {known}, or a .toml file"


@pytest.mark.parametrize("name", ["../systems/h100", "", "h100\0", "a/b", "H100"])
def test_name_is_no_path(name: str) -> None:
    with pytest.raises(StageError, match="there is no system"):
        load_system(name)


def test_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    (tmp_path / "large.toml").write_bytes(b"#" * ((1 << 20) + 1))
    for name, text in (("none", "cannot be read"), ("bytes", "cannot be read"), ("large", "is larger than")):
        with pytest.raises(StageError, match=text):
            load_system(tmp_path / f"{name}.toml")
    with pytest.raises(StageError, match="cannot be read"):
        load_system("\0.toml")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "title",
            "titel",
            "system mine: lacks the key 'title': add it",
        ),
        (
            'title = "Mine"',
            'title = "Mine"\ncolour = "red"',
            "system mine: has the unknown key 'colour'; known: title, sources, assumptions, compute, matrix_tflops, "
            "matrix_flops_per_clock, vector_tflops, vector_flops_per_clock, memory, host, power, efficiency, network",
        ),
        ('["a wish"]', "[]", "system mine: sources is []; a list of texts is expected"),
        ('["a wish"]', '"a wish"', "system mine: sources is 'a wish'; a list of texts is expected"),
        ('"Mine"', '"a\\nb"', "system mine: title is 'a\\nb'; a text of one line is expected"),
        ("= { bf16 = 100 }", "= 1", "system mine: [matrix_tflops] is 1; a table [matrix_tflops] is expected"),
        (
            "= { bf16 = 100 }",
            "= {}",
            "system mine: [matrix_tflops] is empty; give a number by fp64, fp32, tf32, "
            "fp16, bf16, fp8, mxfp8, fp6, fp4, int8",
        ),
        (
            "bf16 = 100 ",
            "bf16 = true ",
            "system mine: [matrix_tflops] bf16 is True; a number above 0 is expected",
        ),
        ("bf16 = 100 ", "bf16 = 0 ", "system mine: [matrix_tflops] bf16 is 0; a number above 0 is expected"),
        (
            "bf16 = 100 ",
            "bf16 = 90 ",
            "system mine: [matrix_tflops] bf16 is 90, but 10 units x 1000 MHz x 10000 a clock are 100: correct one",
        ),
        (
            "bf16 = 100 ",
            "fp16 = 100 ",
            "system mine: [matrix_flops_per_clock] has bf16: give [matrix_tflops] bf16 and the clock too",
        ),
        (
            "matrix = 1000",
            "vector = 1000",
            "system mine: [matrix_flops_per_clock] has bf16: give [matrix_tflops] bf16 and the clock too",
        ),
        (
            "units = 10",
            "units = 0",
            "system mine: [compute] units is 0; an integer of at least 1 is expected",
        ),
        (
            "[64, 32]",
            "[64]",
            "system mine: [compute] tile is [64]; a list of 2 integers of at least 1 is expected",
        ),
        (
            "= 1000 }\nhost",
            "= inf }\nhost",
            "system mine: [memory] bandwidth_gb_s is inf; a number above 0 is expected",
        ),
        (
            "10_000_000_000",
            "1e10",
            "system mine: [memory] capacity_bytes is 10000000000.0; an integer of at least 1 is expected",
        ),
        (
            '"ring"',
            '"Ring"',
            "system mine: [[network]] pod topology is 'Ring'; one of ring, switch, fully_connected, torus, fat_tree is expected",
        ),
        (
            "ranks = 2",
            "ranks = 1",
            "system mine: [[network]] pod ranks is 1; an integer of at least 2 is expected",
        ),
        ("ranks = 4", "", "system mine: give `ranks` on every [[network]] but the last"),
        (
            "ranks = 2",
            "ranks = 2\ndims = [2]",
            "system mine: [[network]] pod: give `dims` for a torus, and for nothing else",
        ),
        (
            '"ring"\nranks = 2',
            '"torus"\nranks = 2\ndims = [2, 2]',
            "system mine: [[network]] pod: dims [2, 2] have 4 devices, not 2: make them agree",
        ),
        (
            "latency_ns = 10\n",
            "latency = 10\n",
            "system mine: [[network]] node lacks the key 'latency_ns': add it",
        ),
        (
            "latency_ns = 10\n",
            "latency_ns = 10\nlatency = 10\n",
            "system mine: [[network]] node has the unknown key 'latency'; known: name, topology, ranks, "
            "bandwidth_gb_s, latency_ns, dims, shares_links, in_network_reduction, picojoules_per_bit, link",
        ),
        (
            "latency_ns = 10\n",
            "latency_ns = 10\nshares_links = true\n",
            "system mine: the first [[network]] has none inside it to share links with: drop shares_links",
        ),
        (
            '"pod"',
            '"node"',
            "system mine: two [[network]] have one name among node, node: rename one",
        ),
        (
            '"host",',
            '"hosts",',
            "system mine: assumptions has 'hosts', which is no key of the file: write one such as "
            "'power.idle_watts' or 'network.node.latency_ns'",
        ),
        (
            "[[network]]",
            "[power]\ntdp_watts = 1\nidle_watts = 2\n[[network]]",
            "system mine: [power] idle_watts is above tdp_watts: exchange them",
        ),
        (
            "[[network]]",
            "[efficiency]\nmemory_share = 1.5\n[[network]]",
            "system mine: [efficiency] memory_share is 1.5; a share of at most 1 is expected",
        ),
        (
            "[[network]]",
            "[efficiency]\nmatrix_share = { bf16 = 0 }\n[[network]]",
            "system mine: [efficiency] [matrix_share] bf16 is 0; a number above 0 is expected",
        ),
        (
            "[[network]]",
            "[efficiency]\nsoftmax_clocks = [1, -1]\n[[network]]",
            "system mine: [efficiency] softmax_clocks is [1, -1]; two numbers above 0, forward and backward, are expected",
        ),
        (
            "[[network]]",
            "[efficiency]\ngemm = 1\n[[network]]",
            "system mine: [efficiency] has the unknown key 'gemm'; known: matrix_share, boost_share, memory_share, "
            "reuse_share, attention_share, kernel_us, tile_us, block_us, attention_rows, operand_gb_s, softmax_clocks",
        ),
    ],
)
def test_mistake_in_a_file_is_an_error(old: str, new: str, text: str) -> None:
    assert MINE.count(old) >= 1
    assert message(MINE.replace(old, new, 1)) == text


def test_efficiency_is_read() -> None:
    said = """[efficiency]
matrix_share = { bf16 = 0.7, fp8 = 0.6 }
boost_share = 0.9
operand_gb_s = 4000
memory_share = 0.8
reuse_share = 0.1
kernel_us = 2
tile_us = 0.5
attention_share = 0.75
softmax_clocks = [0.1, 0.3]
attention_rows = 64
block_us = 3
[[network]]"""
    assert parse_system("mine", MINE).efficiency == Efficiency()
    found = parse_system("mine", MINE.replace("[[network]]", said, 1)).efficiency
    expected = Efficiency(
        {"bf16": 0.7, "fp8": 0.6}, 0.9, 4e12, 0.8, 0.1, 2e-6, 5e-7, 0.75, (0.1, 0.3), 64, 3e-6
    )
    for field in fields(Efficiency):
        assert getattr(found, field.name) == pytest.approx(getattr(expected, field.name)), field.name
    assert (found.matrix_share("fp8"), found.matrix_share("tf32")) == (0.6, 0.7)


def test_network_is_a_list_of_tables() -> None:
    head = MINE[: MINE.index("[[network]]")].replace(', "network.node.latency_ns"', "")
    assert message(head + "network = 5") == (
        "system mine: network is 5; [[network]], one for each tier, the innermost first, is expected"
    )
    assert message(head + "network = []") == "system mine: give `ranks` on every [[network]] but the last"
    assert message(head + "network = [3]") == (
        "system mine: [[network]] is 3; a table [[network]] is expected"
    )


def test_text_that_is_no_toml_is_an_error() -> None:
    assert message("x").startswith("system mine: not valid TOML: ")


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(date(2024, 1, 1))
)
VALUES = st.recursive(
    PLAIN | st.integers(10**300, 10**400) | st.sampled_from(["torus", "switch", 1e300, 5e-324, 2, [2, 2]]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "bf16", "x"]), inner)
    ),
    max_leaves=6,
)


def changed(table: Any, draw: st.DrawFn) -> Any:
    """A table in which one value, however deep, is another, or is missing."""
    if isinstance(table, dict) and table and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(table)))
        if not draw(st.integers(0, 4)):
            return {name: value for name, value in table.items() if name != key}
        return {**table, key: changed(table[key], draw)}
    if isinstance(table, list) and table and draw(st.booleans()):
        index = draw(st.integers(0, len(table) - 1))
        return [*table[:index], changed(table[index], draw), *table[index + 1 :]]
    return draw(VALUES)


@st.composite
def damaged_files(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(list_systems()))
    table: Any = read_system(SHIPPED / f"{name}.toml")[2]
    for _ in range(draw(st.integers(1, 3))):
        table = changed(table, draw)
    return table if isinstance(table, dict) else {"title": table}


@settings(deadline=None, max_examples=150)
@given(damaged_files())
def test_damaged_file_is_one_line_or_a_system(table: dict[str, Any]) -> None:
    try:
        assert system_of("mine", table).levels(8)
    except StageError as err:
        assert "\n" not in str(err)  # noqa: PT017 - a system is as good


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=200) | st.sampled_from(list_systems()).map(lambda name: read_system(name)[1][:300]))
def test_any_text_is_one_line_or_a_system(text: str) -> None:
    with pytest.raises(StageError) as caught:
        parse_system("mine", text)
    assert "\n" not in str(caught.value)
