"""Levels of the network that a group uses: its members at each, and what one of them sends there.

Bandwidths of tiers are those of a device while all others send too. So groups that run at once beside each other, one
on each GPU of the nodes or on each line of a torus, do not slow each other down; a spine of fewer links than its leaves
have, or nodes of fewer adapters than GPUs, say so in the bandwidth of their tier.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stage.cost.links import LINKS, Link
from stage.cost.system import System, Tier
from stage.errors import StageError

__all__ = ["Level", "levels_of"]

CUBE = 4
"""Sides of a three-dimensional torus that are multiples of this close to rings, by optical switches (TPU v4, v5p)."""


@dataclass(frozen=True, slots=True)
class Level:
    """So many `members` that reach each other over one set of links.

    `bandwidth` is bytes a second that one sends with large messages, along all `rings` of a torus together;
    `raw` the same at the links' nominal speed, `shuffle` seconds for each byte that one has for all members when
    each sends to each. `steps` is the longest way around, `latency` seconds of one step. `adds` says that its
    switches reduce, `innermost` that it is within a node.
    """

    members: int
    bandwidth: float
    raw: float
    shuffle: float
    steps: int
    latency: float
    link: Link
    adds: bool = False
    rings: bool = False
    innermost: bool = False


def levels_of(system: System, spread: Sequence[int]) -> tuple[Level, ...]:
    """The levels with more than one member, innermost first, of a group with a spread over a system's tiers.

    Tiers that share links are one level, with the figures of the outermost that the group needs.

    >>> from stage.cost.system_file import load_system
    >>> [(level.members, level.raw / 1e9) for level in levels_of(load_system("h100"), (8, 4, 2))]
    [(8, 450.0), (8, 50.0)]
    """
    if len(spread) > len(system.tiers) or any(count < 1 for count in spread):
        raise StageError(
            f"a group is spread {tuple(spread)} over the {len(system.tiers)} tiers of system {system.name}: "
            "give a number of at least 1 for each, the innermost first"
        )
    counts = (*spread, *[1] * (len(system.tiers) - len(spread)))
    found, start = [], 0
    for tiers in system.links():
        inside = counts[start : start + len(tiers)]
        if math.prod(inside) > 1:
            spans = max(at for at, count in enumerate(inside) if count > 1)
            level = _level(system, tiers[spans], math.prod(inside), shared=spans > 0)
            found.append(replace(level, innermost=not start))
        start += len(tiers)
    return tuple(found)


def _level(system: System, tier: Tier, members: int, *, shared: bool) -> Level:
    """What so many members of a tier have of its links."""
    link = LINKS[tier.link]
    if tier.ranks is not None and members > tier.ranks and not shared:
        raise StageError(
            f"a group has {members} members in a {tier.name} of system {system.name}, which has {tier.ranks}: "
            "correct its spread"
        )
    if tier.dims or tier.topology == "ring":
        return _rings(system, tier, members, link)
    share = (members - 1) / ((tier.ranks or members) - 1) if tier.topology == "fully_connected" else 1.0
    raw = tier.bandwidth * share
    bandwidth = raw * link.efficiency
    return Level(
        members,
        bandwidth,
        raw,
        (members - 1) / members / (bandwidth * link.direct),
        members - 1,
        tier.latency,
        link,
        tier.in_network_reduction,
    )


def _rings(system: System, tier: Tier, members: int, link: Link) -> Level:
    """A box of a torus, all of whose dimensions are used at once; a side that does not close has half its links.

    A message between two of k in a ring goes k/4 hops on average, so all to all loads each link with k/4 buffers.
    """
    sides = tier.slice(members) if tier.dims else (tier,)
    if sides is None:
        raise StageError(
            f"a group of {members} is no box of the {tier.name} of system {system.name}, whose sides are "
            f"{' x '.join(map(str, tier.dims))}: change its degree"
        )
    lengths = [side.ranks or 1 for side in sides] if tier.dims else [members]
    closed = [_closes(tier, length) for length in lengths]
    raws = [side.bandwidth * (1.0 if whole else 0.5) for side, whole in zip(sides, closed, strict=True)]
    bandwidths = [raw * link.efficiency for raw in raws]
    shuffle = max(length / 4 / each for length, each in zip(lengths, bandwidths, strict=True))
    steps = sum(length // 2 if whole else length - 1 for length, whole in zip(lengths, closed, strict=True))
    return Level(members, sum(bandwidths), sum(raws), shuffle, steps, tier.latency, link, rings=True)


def _closes(tier: Tier, length: int) -> bool:
    """Whether a side of a box closes to a ring."""
    whole = tier.dims or (tier.ranks or length,)
    return length > 2 and (length in whole or (len(tier.dims) == 3 and length % CUBE == 0))
