"""A kit that runs a trace set in ASTRA-sim: network, system and memory files, groups and a run script."""

import math
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stage.cost.system import System
from stage.cost.system_file import load_system
from stage.errors import TraceError
from stage.io.chakra import open_directory
from stage.io.parts import groups_text
from stage.io.render import render
from stage.io.store import writing
from stage.trace.limits import ONE_AT_A_TIME
from stage.trace.streams import several_streams

__all__ = ["SystemForExport", "export_astra_sim", "system_for_export"]

GIB = float(1 << 30)
TOPOLOGIES = {
    "ring": "Ring",
    "switch": "Switch",
    "fat_tree": "Switch",  # without contention a fat tree is one switch
    "fully_connected": "FullyConnected",
}
"""The simulator's name of a topology; a torus is a ring for each of its dimensions."""
FILES = ("network.yml", "system.json", "memory.json", "run.sh")


@dataclass(frozen=True, slots=True)
class SystemForExport:
    """What the simulator asks of a system.

    `peak_tflops` is dense, `memory_gb_s` and the bandwidths of the network count 1e9 bytes; `network` has a
    (topology, npus_count, bandwidth_gb_s, latency_ns) for each dimension, the innermost first.

    Invariants: every dimension connects more than one rank, by a topology that the simulator knows.
    """

    name: str
    peak_tflops: float
    memory_gb_s: float
    network: tuple[tuple[str, int, float, float], ...]

    def __post_init__(self) -> None:
        for topology, count, _, _ in self.network:
            known = dict.fromkeys(TOPOLOGIES.values())
            if topology not in known or count < 2:
                raise TraceError(
                    f"system {self.name}: {topology} of {count} is no dimension of a network: connect two or more "
                    f"by {', '.join(known)}"
                )

    @property
    def world(self) -> int:
        """The number of ranks that the network connects."""
        return math.prod(count for _, count, _, _ in self.network)


def system_for_export(system: System, world: int, dtype: str = "bf16") -> SystemForExport:
    """Return what the simulator asks of a system when `world` ranks compute in `dtype`.

    >>> system_for_export(load_system("h100"), 16).network
    (('Switch', 8, 450.0, 600.0), ('Switch', 2, 50.0, 2700.0))
    """
    return SystemForExport(
        system.name,
        system.peak(dtype) / 1e12,
        system.memory_bandwidth / 1e9,
        tuple(
            (TOPOLOGIES[tier.topology], tier.ranks or 1, tier.bandwidth / 1e9, round(tier.latency * 1e9, 3))
            for tier in system.levels(world)
        ),
    )


class Traces(Protocol):
    """A trace set that is no folder: a `TraceSet`."""

    @property
    def world(self) -> int: ...
    @property
    def groups(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def manifest(self) -> Mapping[str, Any]: ...
    def write(self, path: Path, /, *, force: bool, progress: Callable[[int, int], None] | None) -> object: ...


@dataclass(frozen=True, slots=True)
class TraceFiles:
    """Files `<path>/<prefix>.<rank>.et` of `available` of `world` ranks; `name` is for messages."""

    name: str | Path
    path: Path
    prefix: str
    world: int
    available: int
    groups: Mapping[str, Sequence[int]]
    manifest: Mapping[str, Any]


def export_astra_sim(
    source: str | Path | Traces,
    out: str | Path,
    system: str | Path | SystemForExport,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write the kit that runs a trace set into a new folder; return what may go wrong when it is run.

    `system` is one by name, by the path of its file or by value; by name or file its peak is the one of the
    dtype that the set's manifest names. The traces of a folder stay where they are, and the kit refers to them by
    a relative path; those of a `TraceSet`, such as an open bundle, are written into the kit. With `force` an
    existing folder is used, and files of the kit in it are overwritten.
    """
    folder = Path(out)
    files = locate(source, folder)
    if not isinstance(system, SystemForExport):
        system = system_for_export(load_system(system), files.world, str(files.manifest.get("dtype", "bf16")))
    check_kit(files, folder, system, force=force)
    texts = {name: kit_text(name, files, folder, system) for name in FILES}
    if files.groups:
        texts["groups.json"] = groups_text(files.groups)
    made = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if not isinstance(source, str | Path):
                source.write(files.path, force=force, progress=progress)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            (folder / "run.sh").chmod(0o755)
        except BaseException:
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            raise
    several = several_streams(files.manifest, files.manifest.get("classes", ()))
    return [ONE_AT_A_TIME] if several else []


def locate(source: str | Path | Traces, folder: Path) -> TraceFiles:
    """Return where the files of a trace set are, or will be in a kit."""
    if isinstance(source, str | Path):
        found = open_directory(source)
        path, manifest = found.path, found.manifest or {}
        return TraceFiles(path, path, found.prefix, found.world, len(found.ranks), found.groups, manifest)
    inside = folder / "traces"
    name, ranks = "the trace set", source.world
    return TraceFiles(name, inside, "trace", ranks, ranks, source.groups, source.manifest)


def check_kit(source: TraceFiles, folder: Path, system: SystemForExport, *, force: bool) -> None:
    """Raise if the simulator cannot run the set on this system, or the kit cannot go where it is asked to."""
    if source.world < 2:
        raise TraceError(
            f"{source.name} is a job of one rank, but ASTRA-sim needs two or more: export another"
        )
    if source.available < source.world:
        have = f"{source.available} of {source.world} ranks"
        raise TraceError(
            f"{source.name} has the traces of {have}, but ASTRA-sim needs all: write the whole set"
        )
    if system.world != source.world:
        raise TraceError(
            f"system {system.name} connects {system.world} ranks, but {source.name} has {source.world}: "
            "describe a network of that many"
        )
    if folder.exists() and not (force and folder.is_dir()):
        raise TraceError(f"{folder} exists already: give another folder, or force to write into it")
    if folder.resolve() == source.path.resolve():
        raise TraceError(f"{folder} is the trace set itself: give another folder for the kit")


def kit_text(name: str, source: TraceFiles, folder: Path, system: SystemForExport) -> str:
    """Return the text of one file of the kit."""
    prefix = os.path.relpath(source.path.resolve(), folder.resolve()) + f"/{source.prefix}"
    return render(
        f"astra_sim/{name}.j2",
        system=system,
        bandwidths=[round(bandwidth * 1e9 / GIB, 6) for _, _, bandwidth, _ in system.network],
        world=source.world,
        prefix=shlex.quote(prefix),
        grouped=bool(source.groups),
    )
