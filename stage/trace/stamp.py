"""Stamps: what a rank has of its own, put into the bytes that its class shares.

A rank's own bytes are the names of its groups and the numbers of its peers, some twenty of them. They stand at many
places of the trace, so the places and what goes there are listed once for a class; a rank is then one indexed copy.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stage.trace.expand import ClassImage
from stage.trace.groups import GroupTable
from stage.trace.image import PEER_WIDTH, put_varints
from stage.trace.peer import Peer

__all__ = ["Stamp"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class Stamp:
    """The bytes of a class, ready to take those of one rank after another.

    `peers(positions, peer)` are the ranks that are this peer of those at `positions` of the mesh.
    """

    def __init__(self, image: ClassImage, groups: GroupTable, peers: Callable[[Ints, Peer], Ints]) -> None:
        self.data = image.data.copy()
        self._groups, self._peers = groups, peers
        self._axes, self._named = list(image.groups), list(image.peers)
        places = list(image.groups.values())
        places += [where.reshape(-1, 1) + np.arange(PEER_WIDTH) for where in image.peers.values()]
        starts = np.cumsum([0, *(where.shape[1] for where in places)])
        sources = [
            np.broadcast_to(start + np.arange(where.shape[1]), where.shape)
            for start, where in zip(starts, places, strict=False)
        ]
        empty = np.zeros((0, 1), np.int64)
        self._places = np.concatenate([where.ravel() for where in (*places, empty)])
        self._sources = np.concatenate([source.ravel() for source in (*sources, empty)])

    def own(self, positions: Ints) -> Bytes:
        """The own bytes of the ranks at these positions of the mesh, a row for each."""
        columns = [self._groups.names(axes, positions) for axes in self._axes]
        for peer in self._named:
            number = np.zeros((len(positions), PEER_WIDTH), np.uint8)
            put_varints(number, np.zeros(1, np.int64), self._peers(positions, peer)[:, None], PEER_WIDTH)
            columns.append(number)
        return np.concatenate([np.zeros((len(positions), 0), np.uint8), *columns], axis=1)

    def print(self, own: Bytes) -> Bytes:
        """The bytes of the rank whose own bytes these are, in an array that the next rank overwrites."""
        self.data[self._places] = own[self._sources]
        return self.data
