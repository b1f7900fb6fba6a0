"""Which peer a number in a trace is: the formula that gives what the first and the last rank of a class name there.

Axes of a mesh are runs of its atoms, so a peer is looked for along the runs that have the atoms in which two ranks
differ. Two of these that agree on the ranks at both corners of a class, one that wraps round and one that does not,
agree on all; where they do not, the comparison of every file with what the classes say of it fails.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from stage.mesh import Mesh
from stage.trace.peer import OWN, Peer, peer_positions

__all__ = ["PeerSearch"]


@dataclass(slots=True)
class PeerSearch:
    """The search for peers of the ranks at some positions of the mesh, the same for all numbers that they name."""

    mesh: Mesh
    placement: NDArray[np.int64] | None
    positions: tuple[int, ...]
    found: dict[tuple[int, ...], Peer | None] = field(default_factory=dict)

    def find(self, *named: int) -> Peer | None:
        """The peer that ranks name by these numbers, a rank each; None if there is no such formula."""
        if not all(0 <= rank < self.mesh.world for rank in named):
            return None
        if named not in self.found:
            ranks = np.array(named)
            there = ranks if self.placement is None else np.argsort(self.placement)[ranks]
            self.found[named] = self._explain(there)
        return self.found[named]

    def _explain(self, there: NDArray[np.int64]) -> Peer | None:
        here = np.array(self.positions)
        if np.array_equal(there, here):
            return OWN
        candidates = (peer for peer in self._candidates(int(there[0])) if peer.exists(self.mesh))
        return next(
            (peer for peer in candidates if np.array_equal(peer_positions(self.mesh, here, peer), there)),
            None,
        )

    def _candidates(self, there: int) -> Iterator[Peer]:
        """Peers of the first rank that may be the rank at a position, short runs of atoms first."""
        before, after = self.mesh.coordinates(self.positions[0]), self.mesh.coordinates(there)
        names = self.mesh.names
        runs = [names[start:stop] for start, stop in combinations(range(len(names) + 1), 2)]
        for run in sorted(runs, key=len):
            yield Peer(run, self.mesh.index(run, after) - self.mesh.index(run, before))
