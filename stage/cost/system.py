"""Descriptions of systems: what one device computes and moves, and how devices are connected.

A system is a TOML file of vendor figures, dense and for one direction, with the sources they are from;
`stage.cost.system_file` reads it, and `stage/cost/systems` holds the shipped ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from stage.cost.efficiency import Efficiency
from stage.errors import StageError

__all__ = ["DTYPES", "TOPOLOGIES", "System", "Tier"]

TOPOLOGIES = ("ring", "switch", "fully_connected", "torus", "fat_tree")
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp6", "fp4", "int8")
PEAK_TOLERANCE = 0.01
"""How far a vendor's peak may be from units x clock x operations a clock, for both are rounded."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the network, the innermost first: `ranks` devices or groups (None: as many as there are).

    `bandwidth` is bytes a second that one device sends, over all its links of this tier together; `latency` is
    seconds from one end to the other. A torus has the size of each dimension in `dims`. With `shares_links` the
    tier is reached through the links of the one inside it, as a spine is through the adapter that leads to the
    leaf. `in_network_reduction` says that switches can add (NVLink SHARP), `link` which generation the links are of
    (`stage.cost.links.LINKS`).
    """

    name: str
    topology: str
    ranks: int | None
    bandwidth: float
    latency: float
    dims: tuple[int, ...] = ()
    shares_links: bool = False
    in_network_reduction: bool = False
    picojoules_per_bit: float | None = None
    link: str = "plain"

    def slice(self, count: int) -> "tuple[Tier, ...] | None":
        """Return the dimensions that connect `count` of the tier, each with its ranks; None if it can not.

        Part of a torus is the box of that many devices whose longest side is shortest; its dimensions are rings
        that share the bandwidth equally, as many links lead along each.

        >>> torus = Tier("pod", "torus", 4096, 300e9, 1e-6, (16, 16, 16))
        >>> [(ring.ranks, ring.bandwidth / 1e9) for ring in torus.slice(32) or ()]
        [(2, 100.0), (4, 100.0), (4, 100.0)]
        """
        if not self.dims:
            fits = self.ranks is None or count <= self.ranks
            return (replace(self, ranks=count),) * (count > 1) if fits else None
        sides = sides_of_box(self.dims, count)
        if sides is None:
            return None
        share = self.bandwidth / len(self.dims)
        ring = replace(self, topology="ring", dims=(), bandwidth=share, ranks=None)
        return tuple(replace(ring, ranks=side) for side in sides if side > 1)


@dataclass(frozen=True, slots=True)
class System:
    """One kind of device and its network.

    `matrix_flops` and `vector_flops` are FLOP/s by dtype, without sparsity, of the units that multiply matrices
    and of the others; the `..._per_clock` are those of one unit in one clock cycle, where they are known.
    `clock` is Hz by "matrix", "vector" or a dtype whose matrix unit has another clock. `units` counts what a
    kernel's tiles are spread over (SMs, CUs, TensorCores); `instruction` is the (m, n, k) of the largest 16 bit
    matrix instruction, `tile` the (m, n) that a library gives a unit for a large product. Memory is bytes and
    bytes a second, `host_bandwidth` bytes a second in one direction. `kernel_gap` is the seconds from the end of
    a kernel to the start of the next that is already queued, `kernel_launch` those of the host for one launch,
    `framework_op` those of the host for one op of an eager framework, launch included (None: programs are
    compiled whole, so the host issues no ops). `efficiency` is how close to the peaks kernels come. `assumptions` names
    the keys whose figures no source gives.

    Invariants: only the last tier may leave its ranks open; tiers have different names, and the first has links
    of its own; a torus has dims that multiply to its ranks, and nothing else has dims; a peak is within 1 % of
    units x clock x FLOPs a clock where those are given.
    """

    name: str
    title: str
    sources: tuple[str, ...]
    unit: str
    units: int
    matrix_flops: Mapping[str, float]
    vector_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    tiers: tuple[Tier, ...]
    host_bandwidth: float
    kernel_gap: float
    kernel_launch: float
    framework_op: float | None = None
    clock: Mapping[str, float] = field(default_factory=dict)
    matrix_flops_per_clock: Mapping[str, float] = field(default_factory=dict)
    vector_flops_per_clock: Mapping[str, float] = field(default_factory=dict)
    instruction: tuple[int, ...] | None = None
    tile: tuple[int, ...] | None = None
    l2_bytes: int | None = None
    tdp_watts: float | None = None
    idle_watts: float | None = None
    assumptions: tuple[str, ...] = ()
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        where = f"system {self.name}"
        check_tiers(where, self.tiers)
        check_peaks(where, self, "matrix", self.matrix_flops, self.matrix_flops_per_clock)
        check_peaks(where, self, "vector", self.vector_flops, self.vector_flops_per_clock)
        if None not in {self.tdp_watts, self.idle_watts} and self.idle_watts > self.tdp_watts:  # type: ignore[operator]
            raise StageError(f"{where}: [power] idle_watts is above tdp_watts: exchange them")

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a dtype, by whichever units are faster at it."""
        found = [peaks[dtype] for peaks in (self.matrix_flops, self.vector_flops) if dtype in peaks]
        if not found:
            known = ", ".join(dict.fromkeys((*self.matrix_flops, *self.vector_flops)))
            raise StageError(f"system {self.name} has no peak for {dtype}: it has those of {known}")
        return max(found)

    def links(self) -> tuple[tuple[Tier, ...], ...]:
        """Return the tiers, those together that a device reaches through the same links."""
        starts = [index for index, tier in enumerate(self.tiers) if not tier.shares_links]
        return tuple(self.tiers[start:stop] for start, stop in pairwise((*starts, len(self.tiers))))

    def levels(self, world: int) -> tuple[Tier, ...]:
        """Return the dimensions of the network of a job of `world` ranks, each a tier of so many `ranks`.

        The numbers are above 1 and multiply to `world`. Each set of links is one dimension (a torus has one for
        each of its own), with the figures of the tier that spans the ranks on them. A job that does not fill
        whole inner tiers is spread evenly: 12 ranks on nodes of 8 are 2 x 6.

        >>> from stage.cost.system_file import load_system
        >>> [(tier.name, tier.ranks) for tier in load_system("h100").levels(12)]
        [('node', 6), ('rail', 2)]
        """
        assert world > 0, world
        found: list[Tier] = []
        left = world
        *inner, last = self.links()
        for group in inner:
            largest = min(left, math.prod(tier.ranks or left for tier in group))
            counts = (count for count in range(largest, 0, -1) if left % count == 0)
            spans = ((count, span(group, count)) for count in counts)
            count, tiers = next((count, tiers) for count, tiers in spans if tiers is not None)
            found.extend(tiers)
            left //= count
        outermost = span(last, left)
        if outermost is None:
            reach = math.prod(tier.ranks or 1 for tier in self.tiers)
            raise StageError(
                f"system {self.name} connects {reach} devices, and no slice of {world}: add a [[network]] tier"
            )
        return (*found, *outermost)


def span(group: Sequence[Tier], count: int) -> tuple[Tier, ...] | None:
    """Return the dimensions by which tiers on one set of links connect `count`; None if they can not."""
    inside = 1
    for tier in group:
        if tier.ranks is None or count <= inside * tier.ranks:
            return tier.slice(count) if inside == 1 else (replace(tier, ranks=count),)
        inside *= tier.ranks
    return None


def sides_of_box(dims: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Return sides of at most `dims` that multiply to `count`, the longest (then the next) as short as can be.

    >>> sides_of_box((16, 16, 16), 1024), sides_of_box((4, 2), 16)
    ((8, 8, 16), None)
    """
    if len(dims) == 1:
        return (count,) if count <= dims[0] else None
    best: tuple[int, ...] | None = None
    for side in range(1, min(dims[0], count) + 1):
        rest = sides_of_box(dims[1:], count // side) if count % side == 0 else None
        sides = None if rest is None else (side, *rest)
        if sides and (best is None or sorted(sides, reverse=True) < sorted(best, reverse=True)):
            best = sides
    return best


def check_tiers(where: str, tiers: Sequence[Tier]) -> None:
    """Raise unless tiers make a network."""
    if not tiers or any(tier.ranks is None for tier in tiers[:-1]):
        raise StageError(f"{where}: give `ranks` on every [[network]] but the last")
    names = [tier.name for tier in tiers]
    if len(set(names)) != len(names):
        raise StageError(f"{where}: two [[network]] have one name among {', '.join(names)}: rename one")
    if tiers[0].shares_links:
        raise StageError(
            f"{where}: the first [[network]] has none inside it to share links with: drop shares_links"
        )
    for tier in tiers:
        if (tier.topology == "torus") != bool(tier.dims):
            raise StageError(
                f"{where}: [[network]] {tier.name}: give `dims` for a torus, and for nothing else"
            )
        if tier.dims and math.prod(tier.dims) != tier.ranks:
            raise StageError(
                f"{where}: [[network]] {tier.name}: dims {list(tier.dims)} have {math.prod(tier.dims)} devices, "
                f"not {tier.ranks}: make them agree"
            )


def check_peaks(
    where: str, system: System, kind: str, peaks: Mapping[str, float], rates: Mapping[str, float]
) -> None:
    """Raise if a peak is not what the units do in a second."""
    for dtype, rate in rates.items():
        clock = system.clock.get(dtype if kind == "matrix" else kind) or system.clock.get(kind)
        if clock is None or dtype not in peaks:
            raise StageError(
                f"{where}: [{kind}_flops_per_clock] has {dtype}: give [{kind}_tflops] {dtype} and the clock too"
            )
        if abs(system.units * clock * rate / peaks[dtype] - 1) > PEAK_TOLERANCE:
            raise StageError(
                f"{where}: [{kind}_tflops] {dtype} is {peaks[dtype] / 1e12:g}, but {system.units} units x "
                f"{clock / 1e6:g} MHz x {rate:g} a clock are {system.units * clock * rate / 1e12:.6g}: correct one"
            )
