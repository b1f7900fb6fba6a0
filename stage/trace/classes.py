"""Rank classes: from the bytes that a class shares to the bytes of one rank.

A rank's trace is its class's image with the names of the rank's own groups and the ranks of its peers put in. Which
these are is a formula of the rank's place on the mesh, so any rank is made alone.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice

import numpy as np
from numpy.typing import NDArray

from stage.errors import TraceError
from stage.trace.expand import ClassImage
from stage.trace.groups import GroupTable
from stage.trace.partition import Partition
from stage.trace.peer import Peer, peer_positions
from stage.trace.stamp import Stamp

__all__ = ["RankClasses"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
TOGETHER = 1024


class RankClasses:
    """The classes of a job, those of a `partition` of its ranks, whose images `image` makes by their numbers.

    `axes` are all sets of axes that communicate. `placement[position]` is the rank at a position of the mesh, None
    where they are the same. An image is made once and kept; with `keep`, those used last are, up to so many bytes.
    `digests` are the length and the SHA-256 of each image, where they are known.
    """

    def __init__(
        self,
        partition: Partition,
        axes: Iterable[Sequence[str]],
        image: Callable[[int], ClassImage],
        placement: NDArray[np.int64] | None = None,
        *,
        keep: int | None = None,
        digests: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.partition, self.mesh, self.placement = partition, partition.mesh, placement
        self.count, self.ranks_per_class = partition.count, partition.ranks_per_class
        self._world = self.mesh.world  # a product over the atoms, asked for several times a rank
        self._keep, self._digests = keep, dict(enumerate(digests))
        self.groups = GroupTable(self.mesh, axes, placement)
        self._make = image
        self._images: dict[int, ClassImage] = {}
        self._stamps: dict[int, Stamp] = {}
        self._position = None if placement is None else np.argsort(placement)

    def position(self, rank: int) -> int:
        """Where a rank stands on the mesh."""
        if not 0 <= rank < self._world:
            raise TraceError(
                f"rank {rank} is not one of the {self._world} ranks; choose one from 0 to {self._world - 1}"
            )
        return rank if self._position is None else int(self._position[rank])

    def rank_at(self, position: int) -> int:
        """The rank that stands at a position of the mesh."""
        return position if self.placement is None else int(self.placement[position])

    def of(self, rank: int) -> int:
        """The class of a rank."""
        return self.partition.number(self.position(rank))

    def first(self, number: int) -> int:
        """The rank at the first of the positions of a class."""
        return self.rank_at(self.partition.first(number))

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
            number = next(iter(self._images))
            total -= self._images.pop(number).memory
            self._stamps.pop(number, None)

    def digest(self, number: int) -> tuple[int, str]:
        """The length of a class's image and its SHA-256."""
        if number not in self._digests:
            data = self.image(number).data
            self._digests[number] = len(data), hashlib.sha256(data.data).hexdigest()
        return self._digests[number]

    def rank(self, rank: int) -> Bytes:
        """The bytes of a rank's trace."""
        return next(self.each([rank])).copy()

    def each_bytes(self, ranks: Sequence[int]) -> Iterator[memoryview]:
        """What `each` gives, as plain bytes in memory."""
        return (data.data for data in self.each(ranks))

    def each(self, ranks: Sequence[int]) -> Iterator[Bytes]:
        """The bytes of each of these ranks, in an array that the next one overwrites.

        Those of one class are prepared together, which makes a rank little more than a copy of bytes.
        """
        for start in range(0, len(ranks), TOGETHER):
            positions = np.array([self.position(rank) for rank in ranks[start : start + TOGETHER]], np.int64)
            numbers = self.partition.numbers(positions)
            prepared: dict[int, Iterator[Bytes]] = {}
            for number, members in groupby(numbers.tolist()):
                stamp = self._stamp(number)
                if number not in prepared:
                    prepared[number] = iter(stamp.own(positions[numbers == number]))
                for own in islice(prepared[number], len(list(members))):
                    yield stamp.print(own)

    def _stamp(self, number: int) -> Stamp:
        image = self.image(number)  # asked for first, so that it counts as used and stays
        if number not in self._stamps:
            self._stamps[number] = Stamp(image, self.groups, self.peers)
        return self._stamps[number]

    def peers(self, positions: Ints, peer: Peer) -> Ints:
        """The ranks that are this peer of the ranks at these positions of the mesh."""
        there = peer_positions(self.mesh, positions, peer)
        return there if self.placement is None else self.placement[there]
