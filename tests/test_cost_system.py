import math
import tomllib
from pathlib import Path

import pytest

from stage.cost.system import System, Tier
from stage.cost.system_file import SHIPPED, list_systems, load_system
from stage.errors import StageError

NAMES = [
    "a100-40gb-pcie",
    "a100-40gb-sxm",
    "a100-80gb-pcie",
    "a100-80gb-sxm",
    "b200",
    "b300",
    "gaudi3",
    "gb200",
    "gb300",
    "h100",
    "h100-pcie",
    "h20",
    "h200",
    "h800",
    "l40s",
    "mi250x",
    "mi250x-gcd",
    "mi300x",
    "mi355x",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
]

# Dense bf16 TFLOP/s, the GB or GiB of the name, GB/s of memory, and GB/s of the innermost links in one direction,
# typed again from the vendors' tables.
VENDORS = {
    "a100-40gb-pcie": (312, 40, 1555, 31.5),
    "a100-40gb-sxm": (312, 40, 1555, 300),
    "a100-80gb-pcie": (312, 80, 1935, 31.5),
    "a100-80gb-sxm": (312, 80, 2039, 300),
    "b200": (4500 / 2, 180, 62e3 / 8, 1800 / 2),
    "b300": (36e3 / 8 / 2, 270, 62e3 / 8, 1800 / 2),
    "gaudi3": (1835, 128, 3670, 21 * 200 / 8),
    "gb200": (360e3 / 72 / 2, 186, 576e3 / 72, 130e3 / 72 / 2),
    "gb300": (360e3 / 72 / 2, 279, 576e3 / 72, 130e3 / 72 / 2),
    "h100": (1978.9 / 2, 80, 3350, 900 / 2),
    "h100-pcie": (1513 / 2, 80, 2000, 63),
    "h20": (148, 96, 4000, 900 / 2),
    "h200": (1978.9 / 2, 141, 4800, 900 / 2),
    "h800": (1978.9 / 2, 80, 3350, 400 / 2),
    "l40s": (362.05, 45, 864, 31.5),
    "mi250x": (383, 128, 3276.8, 6 * 50),
    "mi250x-gcd": (383 / 2, 64, 3276.8 / 2, 4 * 50),
    "mi300x": (1307.4, 192, 5300, 7 * 128 / 2),
    "mi355x": (2516.6, 288, 8000, 7 * 153.6 / 2),
    "tpu-v4": (275, 32, 1200, 6 * 50),
    "tpu-v5e": (197, 16, 819, 400 / 2),
    "tpu-v5p": (459, 95, 2765, 1200 / 2),
    "tpu-v6e": (918, 32, 1638, 800 / 2),
}


def test_shipped_systems_are_listed() -> None:
    assert list_systems() == NAMES == sorted(VENDORS)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_figures_are_the_vendors(name: str) -> None:
    system = load_system(name)
    tflops, gib, memory, links = VENDORS[name]
    assert system.name == name
    assert system.matrix_flops["bf16"] == pytest.approx(tflops * 1e12, rel=2e-3)
    assert system.memory_bandwidth == pytest.approx(memory * 1e9, rel=1e-2)
    assert system.tiers[0].bandwidth == pytest.approx(links * 1e9, rel=5e-3)
    # Names count GiB, of which a driver keeps up to 1 % back.
    assert 0.99 < system.memory_bytes / (gib * 2**30) < 1.005


@pytest.mark.parametrize("name", NAMES)
def test_shipped_file_says_where_its_figures_are_from(name: str) -> None:
    system = load_system(name)
    assert len(system.sources) >= 2
    assert any(word in " ".join(system.sources) for word in ("NVIDIA", "AMD", "Google", "Intel"))
    # Nobody publishes what a host or a path through a network takes.
    assert {"host.kernel_gap_us", "host.kernel_launch_us"} <= set(system.assumptions)
    for tier in system.tiers:
        assumed = {f"network.{tier.name}", f"network.{tier.name}.latency_ns"} & set(system.assumptions)
        assert assumed or "us a hop" in " ".join(system.sources)


@pytest.mark.parametrize("name", NAMES)
def test_peaks_agree_with_one_another(name: str) -> None:
    """Narrower numbers are never slower on the matrix units, and those are never slower than the others."""
    system = load_system(name)
    wide_to_narrow = [
        ["fp64", "tf32", "bf16", "fp8", "fp4"],
        ["tf32", "fp16", "fp8"],
        ["fp8", "mxfp8", "fp4"],
    ]
    for order in wide_to_narrow:
        peaks = [system.matrix_flops[dtype] for dtype in order if dtype in system.matrix_flops]
        assert peaks == sorted(peaks)
    for dtype, peak in system.vector_flops.items():
        assert peak <= system.matrix_flops.get(dtype, math.inf) * 1.01


@pytest.mark.parametrize("name", NAMES)
def test_outer_links_are_slower_and_farther(name: str) -> None:
    tiers = load_system(name).tiers
    assert [tier.bandwidth for tier in tiers] == sorted((tier.bandwidth for tier in tiers), reverse=True)
    assert [tier.latency for tier in tiers] == sorted(tier.latency for tier in tiers)
    assert tiers[-1].ranks is None


def test_most_peaks_are_checked_against_the_hardware() -> None:
    """The reader checks units x clock x FLOPs a clock: most files give them, so that the check means something."""
    checked = [name for name in NAMES if load_system(name).matrix_flops_per_clock]
    assert len(checked) >= 15
    a100 = load_system("a100-80gb-sxm")
    assert a100.units * a100.clock["matrix"] * a100.matrix_flops_per_clock["bf16"] == 108 * 1410e6 * 2048


def test_domain_of_72() -> None:
    for name in ("gb200", "gb300"):
        first = load_system(name).tiers[0]
        assert (first.ranks, first.topology, first.in_network_reduction) == (72, "switch", True)


def test_bare_name_is_the_sxm_part() -> None:
    assert load_system("h100").units == 132
    assert load_system("h100-pcie").units == 114


@pytest.mark.parametrize(
    ("world", "counts"),
    [
        (1, []),
        (2, [2]),
        (8, [8]),
        (12, [6, 2]),
        (13, [13]),
        (24, [8, 3]),
        (512, [8, 64]),
        (131072, [8, 16384]),
    ],
)
def test_levels_multiply_to_the_world(world: int, counts: list[int]) -> None:
    levels = load_system("h100").levels(world)
    assert [tier.ranks for tier in levels] == counts
    assert math.prod(counts) == world


def test_tiers_on_one_set_of_links_are_one_level() -> None:
    """A rail and the cluster beyond it share an adapter, so they are never two dimensions with its bandwidth each."""
    system = load_system("h100")
    assert [[tier.name for tier in group] for group in system.links()] == [["node"], ["rail", "cluster"]]
    within, beyond = system.levels(256)[1], system.levels(512)[1]
    assert (within.name, within.ranks, within.latency) == ("rail", 32, 2700e-9)
    assert (beyond.name, beyond.ranks, beyond.latency) == ("cluster", 64, 3300e-9)


@pytest.mark.parametrize(
    ("world", "counts"),
    [(4, [2, 2]), (16, [4, 4]), (64, [8, 8]), (256, [16, 16]), (1024, [16, 16, 4]), (34, [17, 2])],
)
def test_slice_of_a_torus_is_a_box(world: int, counts: list[int]) -> None:
    found = load_system("tpu-v5e").levels(world)
    assert sorted((tier.ranks for tier in found), key=lambda ranks: -(ranks or 0)) == sorted(
        counts, reverse=True
    )
    inside = [tier for tier in found if tier.name == "pod"]
    # 200 GB/s over four links: each of the two dimensions has half.
    assert {(tier.topology, tier.bandwidth) for tier in inside} <= {("ring", 100e9)}


def two_tiers(**changes: object) -> System:
    inner, outer = Tier("node", "switch", 4, 1e11, 1e-8), Tier("pod", "ring", 2, 1e10, 1e-7)
    given: dict[str, object] = {
        "name": "mine",
        "title": "Mine",
        "sources": ("a wish",),
        "unit": "core",
        "units": 10,
        "matrix_flops": {"bf16": 1e14},
        "vector_flops": {"fp32": 1e12},
        "memory_bytes": 1,
        "memory_bandwidth": 1.0,
        "tiers": (inner, outer),
        "host_bandwidth": 1.0,
        "kernel_gap": 1.0,
        "kernel_launch": 1.0,
    }
    return System(**given | changes)  # type: ignore[arg-type]


def test_world_beyond_the_last_tier_is_an_error() -> None:
    with pytest.raises(StageError) as caught:
        two_tiers().levels(16)
    expected = "system mine connects 8 devices, and no slice of 16: add a [[network]] tier"
    assert str(caught.value) == expected


def test_peak_is_that_of_the_faster_units() -> None:
    system = two_tiers(vector_flops={"fp32": 2e12, "bf16": 3e12})
    assert (system.peak("bf16"), system.peak("fp32")) == (1e14, 2e12)
    with pytest.raises(StageError) as caught:
        load_system("a100-80gb-sxm").peak("fp8")
    known = "fp64, tf32, fp16, bf16, int8, fp32"
    assert str(caught.value) == f"system a100-80gb-sxm has no peak for fp8: it has those of {known}"


@pytest.mark.parametrize("peak", [0.989e14, 1.0e14, 1.0101e14])
def test_peak_within_a_percent_of_the_hardware_is_accepted(peak: float) -> None:
    clock, rates = {"matrix": 1e9}, {"bf16": 1e4}
    accepted = abs(1e14 / peak - 1) <= 0.01
    if accepted:
        two_tiers(matrix_flops={"bf16": peak}, clock=clock, matrix_flops_per_clock=rates)
    else:
        with pytest.raises(StageError) as caught:
            two_tiers(matrix_flops={"bf16": peak}, clock=clock, matrix_flops_per_clock=rates)
        assert str(caught.value) == (
            "system mine: [matrix_tflops] bf16 is 98.9, but 10 units x 1000 MHz x 10000 a clock are 100: correct one"
        )


def test_every_shipped_number_has_its_unit_in_its_key() -> None:
    """GB/s, bytes, MHz and the like stand in the names, so that no figure needs a guess."""
    units = ("_gb_s", "_bytes", "_mhz", "_us", "_ns", "_watts", "_per_bit", "_tflops", "_per_clock", "_share")
    counts = {"units", "ranks", "dims", "instruction", "tile", "attention_rows"}

    def check(table: dict[str, object], within: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                check(value, key)
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                for tier in value:
                    check(tier, key)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                assert key in counts or key.endswith(units) or within.endswith(units), key

    for name in NAMES:
        check(tomllib.loads((SHIPPED / f"{name}.toml").read_text(encoding="utf-8")), "")


def test_template_says_every_key_that_a_shipped_file_uses() -> None:
    template = Path(__file__).resolve().parent.parent / "docs" / "examples" / "template.toml"
    system = load_system(template)
    assert system.peak("bf16") == pytest.approx(2097.2e12)
    assert [tier.ranks for tier in system.levels(16 * 16 * 3)] == [16, 6, 8]
    words = template.read_text(encoding="utf-8")
    for name in NAMES:
        table = tomllib.loads((SHIPPED / f"{name}.toml").read_text(encoding="utf-8"))
        keys = {*table, *table["compute"], *table["memory"], *table["host"], *table.get("power", {})}
        for tier in table["network"]:
            keys |= set(tier)
        assert [key for key in keys if key not in words] == []
