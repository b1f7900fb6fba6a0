"""The simple network of ASTRA-sim's analytical backend without contention: a switch, and rings of chunks one by one.

It reproduces what that simulator computes, nanoseconds included, so that step times can be compared
(https://github.com/astra-sim/astra-sim, 2.x: `system/Sys.cc` cuts a collective into chunks, which run one after the
other with one active chunk; `collective_algorithm/Ring.cc` sends them; `PacketBundle.cc` reduces; `BasicTopology.cpp`
of the network backend delays; `Workload.cc` runs kernels at its roofline). Its all_to_all in a ring passes every part
on by neighbours, n(n-1)/2 steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage.cost.work import Exchange, Kernel
from stage.errors import StageError

__all__ = ["AstraNetwork"]

Floats = NDArray[np.float64]

MESSAGES = ("send", "recv")
RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "permute": 1}
"""Collectives that it simulates, and how often they go around; a permute is written as an all_to_all."""


@dataclass(frozen=True, slots=True)
class AstraNetwork:
    """Its input files: a Switch of `bandwidth` bytes a second, and nanoseconds `latency`, to which a message adds two.

    `splits` is `preferred-dataset-splits`, `endpoint` the `endpoint-delay` in ns, `memory` the `local-mem-bw` in
    bytes a second, `peak` the `peak-perf` in FLOP/s.

    A collective has at least `world` bytes a chunk (except all_gather), where `world` is all NPUs.

    >>> network = AstraNetwork(world=2)
    >>> network.exchanges([Exchange("all_reduce", 2**20, (2,)), Exchange("send", 1000, (2,))]).tolist()
    [2.8164e-05, 1.018e-06]
    """

    world: int
    bandwidth: float = 50.0 * 2**30
    latency: float = 500.0
    splits: int = 4
    endpoint: int = 10
    memory: float = 3000e9
    peak: float = 900e12

    def kernels(self, kernels: Sequence[Kernel]) -> Floats:
        """Seconds of each kernel at the simulator's roofline, in whole nanoseconds; 0 without FLOPs or bytes."""
        times = [
            int(one.flops / min(self.peak, self.memory * one.flops / one.bytes) * 1e9)
            if one.flops and one.bytes
            else 0
            for one in kernels
        ]
        return np.array(times, np.float64) / 1e9

    def exchanges(self, exchanges: Sequence[Exchange]) -> Floats:
        """Seconds of each exchange, which are whole nanoseconds; 0 of one member."""
        return np.array([self._nanoseconds(exchange) / 1e9 for exchange in exchanges], np.float64)

    def _nanoseconds(self, exchange: Exchange) -> int:
        """Nanoseconds of one exchange."""
        if exchange.members == 1:
            return 0
        if exchange.kind in MESSAGES:
            return self._delay(exchange.bytes)
        if exchange.kind not in RINGS:
            raise StageError(
                f"ASTRA-sim does not simulate {exchange.kind!r}: it has {', '.join((*RINGS, *MESSAGES))}"
            )
        chunks, part = self._chunks(exchange)
        return chunks * self._ring(exchange.kind, exchange.members, part)

    def _chunks(self, exchange: Exchange) -> tuple[int, int]:
        """How many chunks there are, and the bytes of one; a rest is one more, of full size."""
        size = exchange.bytes
        part = size // self.splits
        if exchange.kind != "all_gather" and part < self.world:
            part, size = self.world, self.splits * self.world
        if not part:
            raise StageError(
                f"ASTRA-sim cannot cut an all_gather of {size} bytes in {self.splits}: gather at least that"
            )
        return -(-size // part), part

    def _ring(self, kind: str, members: int, part: int) -> int:
        """Nanoseconds of a chunk: a message each step, and the endpoint before the first and after each.

        What arrives to be reduced is written once and read twice before it is passed on.
        """
        message = part if kind == "all_gather" else part // members
        steps = RINGS[kind] * (members - 1)
        if kind in {"all_to_all", "permute"}:
            steps = members * (members - 1) // 2
        reduced = members - 1 if kind in {"all_reduce", "reduce_scatter"} else 0
        moves = 3 * int(message / self.memory * 1e9)
        return self.endpoint + steps * (self._delay(message) + self.endpoint) + reduced * moves

    def _delay(self, message: int) -> int:
        """Nanoseconds of a message: two links to and from the switch, and its bytes."""
        return int(2 * self.latency + message / (self.bandwidth / 1e9))
