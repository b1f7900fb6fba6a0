"""Reading systems from their TOML files: the shipped ones by name, a user's own by path."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stage.cost.efficiency import read_efficiency
from stage.cost.links import LINKS
from stage.cost.reading import Reader, reading
from stage.cost.system import DTYPES, TOPOLOGIES, System, Tier
from stage.errors import StageError
from stage.files import open_file

__all__ = ["list_systems", "load_system", "parse_system", "read_system"]

SHIPPED = Path(__file__).resolve().parent / "systems"
LARGEST_FILE = 1 << 20


def list_systems() -> list[str]:
    """Return the names of the shipped systems, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_system(name: str | Path) -> System:
    """Return a shipped system by name, or the one in a file of one's own."""
    return read_system(name)[0]


def read_system(name: str | Path) -> tuple[System, str, dict[str, Any]]:
    """Return a system by name or path, the text of its file, and the tables as they stand there."""
    known = list_systems()
    if not str(name).endswith(".toml") and name not in known:
        raise StageError(f"there is no system {str(name)!r}: take one of {', '.join(known)}, or a .toml file")
    path = Path(name) if str(name).endswith(".toml") else SHIPPED / f"{name}.toml"
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise StageError(f"{path} is larger than any system file: check the path")
        with open_file(path) as file:
            text = file.read().decode()
    except (OSError, ValueError) as err:
        raise StageError(f"{path} cannot be read ({err}): check the path") from err
    table = parse_toml(path.stem, text)
    return system_of(path.stem, table), text, table


def parse_system(name: str, text: str) -> System:
    """Return the system that a TOML text describes."""
    return system_of(name, parse_toml(name, text))


def parse_toml(name: str, text: str) -> dict[str, Any]:
    """Return the tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as err:
        line = " ".join(str(err).split())
        raise StageError(f"system {name}: not valid TOML: {line}") from err


def system_of(name: str, table: dict[str, Any]) -> System:
    """Return the system that the tables of a file describe."""
    with reading(Reader(f"system {name}:", table)) as file:
        title, sources = file.text("title"), file.texts("sources")
        assumptions = file.texts("assumptions") if file.has("assumptions") else ()
        found = compute_of(file) | memory_of(file) | host_of(file) | power_of(file)
        found["efficiency"] = read_efficiency(file, DTYPES)
        network = file.value("network")
        if not isinstance(network, list):
            raise file.wrong("network", "[[network]], one for each tier, the innermost first,")
        tiers = tuple(tier_of(f"{file.where} [[network]]", tier) for tier in network)
    check_assumptions(file.where, table, assumptions)
    return System(name=name, title=title, sources=sources, assumptions=assumptions, tiers=tiers, **found)


def compute_of(file: Reader) -> dict[str, Any]:
    """Return what the tables of arithmetic say, as fields of a system."""
    found: dict[str, Any] = {}
    with reading(file.table_of("compute")) as compute:
        found["unit"], found["units"] = compute.text("unit"), compute.integer("units")
        for key, length in (("instruction", 3), ("tile", 2)):
            found[key] = compute.integers(key, length) if compute.has(key) else None
        found["l2_bytes"] = compute.integer("l2_bytes") if compute.has("l2_bytes") else None
        if compute.has("clock_mhz"):
            found["clock"] = numbers_of(compute, "clock_mhz", ("matrix", "vector", *DTYPES), 1e6)
    for kind in ("matrix", "vector"):
        found[f"{kind}_flops"] = numbers_of(file, f"{kind}_tflops", DTYPES, 1e12)
        if file.has(f"{kind}_flops_per_clock"):
            found[f"{kind}_flops_per_clock"] = numbers_of(file, f"{kind}_flops_per_clock", DTYPES, 1)
    return found


def numbers_of(file: Reader, key: str, known: tuple[str, ...], factor: float) -> dict[str, float]:
    """Return the numbers of a table within a table, times a factor."""
    with reading(file.table_of(key)) as table:
        numbers = table.numbers(known)
    return {name: factor * number for name, number in numbers.items()}


def memory_of(file: Reader) -> dict[str, Any]:
    """Return what [memory] says, as fields of a system."""
    with reading(file.table_of("memory")) as memory:
        return {
            "memory_bytes": memory.integer("capacity_bytes"),
            "memory_bandwidth": 1e9 * memory.number("bandwidth_gb_s"),
        }


def host_of(file: Reader) -> dict[str, Any]:
    """Return what [host] says, as fields of a system."""
    with reading(file.table_of("host")) as host:
        eager = host.has("framework_op_us")
        return {
            "host_bandwidth": 1e9 * host.number("bandwidth_gb_s"),
            "kernel_gap": 1e-6 * host.number("kernel_gap_us"),
            "kernel_launch": 1e-6 * host.number("kernel_launch_us"),
            "framework_op": 1e-6 * host.number("framework_op_us") if eager else None,
        }


def power_of(file: Reader) -> dict[str, Any]:
    """Return what [power] says, as fields of a system; nothing without it."""
    if not file.has("power"):
        return {}
    with reading(file.table_of("power")) as power:
        return {key: power.number(key) for key in ("tdp_watts", "idle_watts")}


def tier_of(where: str, table: object) -> Tier:
    """Return the tier that one [[network]] table describes."""
    with reading(Reader(where, table, example=" [[network]]")) as tier:
        name = tier.text("name")
        tier.where = f"{where} {name}"
        return Tier(
            name,
            tier.choice("topology", TOPOLOGIES),
            tier.integer("ranks", 2) if tier.has("ranks") else None,
            1e9 * tier.number("bandwidth_gb_s"),
            1e-9 * tier.number("latency_ns"),
            tier.integers("dims", least=2) if tier.has("dims") else (),
            shares_links=tier.flag("shares_links"),
            in_network_reduction=tier.flag("in_network_reduction"),
            picojoules_per_bit=tier.number("picojoules_per_bit") if tier.has("picojoules_per_bit") else None,
            link=tier.choice("link", tuple(LINKS)) if tier.has("link") else "plain",
        )


def check_assumptions(where: str, table: Mapping[str, Any], assumptions: Iterable[str]) -> None:
    """Raise unless every assumption names a key of the file, a tier of the network by its name."""
    tables: Any = {**table, "network": {tier["name"]: tier for tier in table["network"]}}
    for assumption in assumptions:
        found = tables
        for key in assumption.split("."):
            if not isinstance(found, dict) or key not in found:
                raise StageError(
                    f"{where} assumptions has {assumption!r}, which is no key of the file: write one such as "
                    "'power.idle_watts' or 'network.node.latency_ns'"
                )
            found = found[key]
