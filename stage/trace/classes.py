"""Rank classes: from the bytes that a class shares to the bytes of one rank.

A rank's trace is its class's image with the names of the rank's own groups and the ranks of its peers put in. Which
these are is a formula of the rank's place on the mesh, so any rank is made alone.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from stage.errors import TraceError
from stage.mesh import Mesh
from stage.trace.expand import ClassImage
from stage.trace.groups import GroupTable
from stage.trace.image import PEER_WIDTH, put_varints

__all__ = ["RankClasses"]

Bytes = NDArray[np.uint8]


class RankClasses:
    """The classes of a job: pipeline stages, `count` of them, whose images `image` makes.

    `axes` are all sets of axes that communicate. `placement[position]` is the rank at a position of the mesh, None
    where they are the same. An image is made once and kept; with `keep`, those used last are, up to so many bytes.
    `digests` are the length and the SHA-256 of each image, where they are known already.
    """

    def __init__(
        self,
        mesh: Mesh,
        axes: Iterable[Sequence[str]],
        count: int,
        image: Callable[[int], ClassImage],
        placement: NDArray[np.int64] | None = None,
        *,
        keep: int | None = None,
        digests: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.mesh, self.count, self.placement = mesh, count, placement
        self._keep, self._digests = keep, dict(enumerate(digests))
        self.groups = GroupTable(mesh, axes, placement)
        self._make = image
        self._images: dict[int, ClassImage] = {}
        self._position = None if placement is None else np.argsort(placement)

    @property
    def ranks_per_class(self) -> int:
        """Ranks of each class."""
        return self.mesh.world // self.count

    def position(self, rank: int) -> int:
        """Where a rank stands on the mesh."""
        if not 0 <= rank < self.mesh.world:
            raise TraceError(
                f"rank {rank} is not one of the {self.mesh.world} ranks; "
                f"choose one from 0 to {self.mesh.world - 1}"
            )
        return rank if self._position is None else int(self._position[rank])

    def rank_at(self, position: int) -> int:
        """The rank that stands at a position of the mesh."""
        return position if self.placement is None else int(self.placement[position])

    def of(self, rank: int) -> int:
        """The class of a rank."""
        return self.position(rank) // self.ranks_per_class

    def image(self, number: int) -> ClassImage:
        """The bytes shared by the ranks of a class."""
        image = self._images.pop(number, None)
        if image is None:
            image = self._make(number)
        self._images[number] = image
        if self._keep is not None:
            self._forget(self._keep)
        return image

    def _forget(self, keep: int) -> None:
        """Drop the images that were not used for longest, but never the last one."""
        total = sum(image.memory for image in self._images.values())
        while total > keep and len(self._images) > 1:
            total -= self._images.pop(next(iter(self._images))).memory

    def digest(self, number: int) -> tuple[int, str]:
        """The length of a class's image and its SHA-256."""
        if number not in self._digests:
            data = self.image(number).data
            self._digests[number] = len(data), hashlib.sha256(data.data).hexdigest()
        return self._digests[number]

    def rank(self, rank: int) -> Bytes:
        """The bytes of a rank's trace."""
        position = self.position(rank)
        image = self.image(self.of(rank))
        data = image.data.copy()
        for axes, where in image.groups.items():
            data[where] = self._name(axes, position)
        for distance, where in image.peers.items():
            peer = np.full((1, 1), self._neighbour(position, distance), np.int64)
            put_varints(data[None, :], where, peer, PEER_WIDTH)
        return data

    def _name(self, axes: tuple[str, ...], position: int) -> Bytes:
        """The name of the rank's group over `axes`, its length before it padded to the width that all of them have."""
        name = str(self.groups.number(axes, position)).encode()
        room = self.groups.width(axes) - len(name)
        length = np.zeros((1, room), np.uint8)
        put_varints(length, np.zeros(1, np.int64), np.full((1, 1), len(name), np.int64), room)
        return np.concatenate([length[0], np.frombuffer(name, np.uint8)])

    def _neighbour(self, position: int, distance: int) -> int:
        """The rank `distance` stages further at the same place of the other axes."""
        there = position + distance * self.ranks_per_class
        assert 0 <= there < self.mesh.world, "a stage at the end has no such neighbour"
        return self.rank_at(there)
