"""Peers: the rank that a message goes to or comes from, as a formula of the place of its own rank on the mesh.

Neighbours in a pipeline, in a ring and in a pairwise exchange are all the rank some steps further along flattened
axes, with wrap-around. A formula is what a program of many ranks can say; a rank's number follows from it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stage.mesh import Mesh

__all__ = ["OWN", "Peer", "peer_positions"]

Ints = NDArray[np.int64]


class Peer(NamedTuple):
    """The rank whose coordinate over `atoms`, flattened with the last one fastest, is `(own + offset) % degree`.

    Its other coordinates are those of the rank itself, which is the peer over no atoms.
    """

    atoms: tuple[str, ...]
    offset: int

    def __str__(self) -> str:
        return f"{self.offset:+d} over {' '.join(self.atoms)}" if self.atoms else "itself"

    def exists(self, mesh: Mesh) -> bool:
        """Whether a mesh has the atoms, each once, and the offset leads to another rank."""
        if not self.atoms:
            return not self.offset
        known = len(set(self.atoms)) == len(self.atoms) and set(self.atoms) <= set(mesh.names)
        return known and self.offset % mesh.degree(self.atoms) != 0


OWN = Peer((), 0)
"""The rank itself."""


def peer_positions(mesh: Mesh, positions: Ints, peer: Peer) -> Ints:
    """The positions on the mesh of the peers of the ranks at these positions.

    >>> from stage.mesh import build_mesh
    >>> mesh = build_mesh(pp=2, cp=3, tp=2)
    >>> peer_positions(mesh, np.arange(6), Peer(("cp",), 1)).tolist()
    [2, 3, 4, 5, 0, 1]
    """
    assert peer.exists(mesh), f"no rank has a peer {peer} on a mesh of {mesh.atoms}"
    digits = [(mesh.stride(atom), mesh.degree(atom)) for atom in peer.atoms]
    place = np.zeros_like(positions)
    for stride, degree in digits:
        place = place * degree + positions // stride % degree
    place, found = place + peer.offset, positions
    for stride, degree in reversed(digits):
        found = found + (place % degree - positions // stride % degree) * stride
        place = place // degree
    return found
