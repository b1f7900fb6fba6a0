"""Communication times on a system: alpha-beta by tier, with the fastest algorithm and protocol, as NCCL takes them.

A group on up to two levels of switches is priced by NCCL's algorithms (`stage.cost.collectives`). On a torus, and over
more levels, a collective runs level by level: an all-reduce scatters inwards out, and gathers back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stage.cost.collectives import Nodes, candidates, message, shuffle
from stage.cost.levels import Level, levels_of
from stage.cost.system import System
from stage.cost.work import Exchange
from stage.errors import StageError

__all__ = ["KINDS", "Network", "whole_bytes"]

Floats = NDArray[np.float64]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute", "send")


@dataclass(frozen=True)
class Network:
    """The network of a system, as what prices exchanges.

    >>> from stage.cost.system_file import load_system
    >>> network = Network(load_system("h100"))
    >>> gib = 2**30
    >>> seconds = network.exchanges([Exchange("all_gather", gib // 8, (8,)), Exchange("send", gib, (1, 2))])
    >>> (1e3 * seconds).round(2).tolist()
    [2.75, 22.42]
    """

    system: System

    def exchanges(self, exchanges: Sequence[Exchange]) -> Floats:
        """Seconds of each exchange, from when all members are ready until the last is done; 0 of one member."""
        levels = cache(lambda spread: levels_of(self.system, spread))
        return np.array([_seconds(one, levels(one.spread)) for one in exchanges], np.float64)


def whole_bytes(exchange: Exchange) -> int:
    """Bytes of the whole buffer: of an all_gather what it ends with, of the others what `bytes` says already."""
    return exchange.bytes * exchange.members if exchange.kind == "all_gather" else exchange.bytes


def _seconds(exchange: Exchange, levels: Sequence[Level]) -> float:
    """Seconds of one exchange over the levels that its members are on."""
    kind, size = exchange.kind, whole_bytes(exchange)
    if kind not in KINDS:
        raise StageError(f"the network has no time for {kind!r}: it has those of {', '.join(KINDS)}")
    if size <= 0:
        raise StageError(f"a {kind} of {size} bytes is priced: exchanges have at least 1 byte")
    if not levels:
        return 0.0
    if kind in {"send", "permute"}:
        return message(levels[-1], size)
    if kind == "all_to_all":
        return shuffle(levels, size)
    if len(levels) > 2 or any(level.rings for level in levels):
        return _by_level(kind, levels, size)
    inner = levels[0] if levels[0].innermost else None
    nodes = Nodes(inner, levels[-1] if levels[-1] is not inner else None)
    return min(algorithm(size) for algorithm in candidates(kind, nodes, exchange.dtype))


def _by_level(kind: str, levels: Sequence[Level], size: float) -> float:
    """A collective that runs over one level after the other, each with what the levels inside leave of the buffer."""
    trips = 2 if kind == "all_reduce" else 1
    seconds, inside = max(protocol.ring_base for protocol in levels[0].link.protocols.values()), 1
    for level in levels:
        passed = (
            size if kind == "broadcast" else size * trips * (level.members - 1) / (level.members * inside)
        )
        seconds += min(
            trips * level.steps * (level.latency + protocol.ring_step)
            + passed / min(protocol.ring * level.bandwidth, protocol.cap)
            for protocol in level.link.protocols.values()
        )
        inside *= level.members
    return seconds
