"""Descriptions of systems: what one device computes and moves, and how devices are connected.

A system is a TOML file of vendor figures, dense and for one direction, with the source they are from. The
parser is pure; `stage.cost.systems` holds the shipped files.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import StageError

__all__ = ["TOPOLOGIES", "System", "Tier", "list_systems", "load_system", "parse_system"]

TOPOLOGIES = ("Ring", "Switch", "FullyConnected")
SHIPPED = Path(__file__).resolve().parent / "systems"
LARGEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the network, the innermost first: `ranks` devices or groups (None: as many as there are).

    `bandwidth` is bytes a second that one device sends, `latency` seconds.
    """

    topology: str
    ranks: int | None
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class System:
    """One kind of device and its network.

    `peak_flops` is FLOP/s by dtype without sparsity, `memory_bytes` the capacity and `memory_bandwidth` bytes a
    second.

    Invariants: only the last tier may leave its number of ranks open.
    """

    name: str
    title: str
    source: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        if not self.tiers or any(tier.ranks is None for tier in self.tiers[:-1]):
            raise StageError(f"system {self.name}: give `ranks` on every [[network]] but the last")

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a dtype."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise StageError(f"system {self.name} has no peak for {dtype}: it has those of {known}")
        return self.peak_flops[dtype]

    def levels(self, world: int) -> tuple[tuple[Tier, int], ...]:
        """Return the tiers that a job of `world` ranks spans, with how many each connects.

        The numbers are above 1 and multiply to `world`. A job that does not fill whole inner tiers is spread
        evenly: 12 ranks on nodes of 8 are 2 x 6.

        >>> [count for _, count in load_system("h100").levels(12)]
        [6, 2]
        """
        assert world > 0, world
        found: list[tuple[Tier, int]] = []
        left = world
        for tier in self.tiers[:-1]:
            assert tier.ranks is not None, self.name
            count = max(number for number in range(1, tier.ranks + 1) if left % number == 0)
            found.append((tier, count))
            left //= count
        found.append((self.tiers[-1], left))
        limit = self.tiers[-1].ranks
        if limit is not None and left > limit:
            largest = math.prod(tier.ranks or 1 for tier in self.tiers)
            raise StageError(
                f"system {self.name} connects {largest} devices, not {world}: add a [[network]] tier"
            )
        return tuple((tier, count) for tier, count in found if count > 1)


def list_systems() -> list[str]:
    """Return the names of the shipped systems, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_system(name: str | Path) -> System:
    """Return a shipped system by name, or the one in a file of one's own."""
    path = Path(name) if str(name).endswith(".toml") else SHIPPED / f"{name}.toml"
    if path.parent == SHIPPED and path.stem not in list_systems():
        raise StageError(
            f"there is no system {name!r}: take one of {', '.join(list_systems())}, or a .toml file"
        )
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise StageError(f"{path} is larger than any system file: check the path")
        return parse_system(path.stem, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as err:
        raise StageError(f"{path} cannot be read ({err}): check the path") from err


def parse_system(name: str, text: str) -> System:
    """Return the system that a TOML text describes."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as err:
        raise StageError(f"system {name}: not valid TOML: {err}") from err
    check_keys(name, table, ("title", "source", "peak_tflops", "memory", "network"))
    memory, peaks = (section(name, table, key) for key in ("memory", "peak_tflops"))
    check_keys(f"{name}: [memory]", memory, ("capacity_gb", "bandwidth_gb_s"))
    network = table["network"]
    if not peaks or not isinstance(network, list):
        raise StageError(
            f"system {name}: give [peak_tflops] by dtype and [[network]], the innermost tier first"
        )
    return System(
        name,
        text_of(name, table, "title"),
        text_of(name, table, "source"),
        {dtype: 1e12 * number(f"{name}: [peak_tflops]", peaks, dtype) for dtype in peaks},
        round(1e9 * number(f"{name}: [memory]", memory, "capacity_gb")),
        1e9 * number(f"{name}: [memory]", memory, "bandwidth_gb_s"),
        tuple(parse_tier(f"{name}: [[network]]", tier) for tier in network),
    )


def parse_tier(where: str, table: object) -> Tier:
    """Return the tier that one [[network]] table describes."""
    if not isinstance(table, dict):
        raise StageError(f"system {where} is no table: write [[network]]")
    ranks = table.get("ranks")
    known = ("topology", "bandwidth_gb_s", "latency_ns")
    check_keys(
        where, {key: value for key, value in table.items() if key != "ranks"}, known, optional=("ranks",)
    )
    if table["topology"] not in TOPOLOGIES:
        raise StageError(f"system {where} topology is {table['topology']!r}; known: {', '.join(TOPOLOGIES)}")
    if ranks is not None and (type(ranks) is not int or ranks < 2):
        raise StageError(f"system {where} ranks is {ranks!r}; an integer of at least 2 is expected")
    bandwidth, latency = number(where, table, "bandwidth_gb_s"), number(where, table, "latency_ns")
    return Tier(table["topology"], ranks, 1e9 * bandwidth, 1e-9 * latency)


def check_keys(
    where: str, table: Mapping[str, object], known: Sequence[str], *, optional: Sequence[str] = ()
) -> None:
    """Raise unless a table has exactly the keys it must."""
    for key in table:
        if key not in known:
            raise StageError(
                f"system {where} has the unknown key {key!r}; known: {', '.join((*known, *optional))}"
            )
    for key in known:
        if key not in table:
            raise StageError(f"system {where} lacks the key {key!r}: add it")


def section(name: str, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table within a table."""
    value = table[key]
    if not isinstance(value, dict):
        raise StageError(f"system {name}: {key} is {value!r}; a table [{key}] is expected")
    return value


def text_of(name: str, table: Mapping[str, Any], key: str) -> str:
    """Return a text of a table."""
    value = table[key]
    if not isinstance(value, str):
        raise StageError(f"system {name}: {key} is {value!r}; a text is expected")
    return value


def number(where: str, table: Mapping[str, Any], key: str) -> float:
    """Return a number above 0 of a table."""
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise StageError(f"system {where} {key} is {value!r}; a number above 0 is expected")
    return float(value)
