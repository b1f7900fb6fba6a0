"""Messages between classes: what stands for the other rank of a message when one rank stands for each class.

A send of the ranks of a class is one link from each of them to a rank of another class, or of the same. The link is a
map of the members of one class to those of the other, whatever formula it is written with; the receive at its other
end is the inverse of that map. So all messages pair up if those of first ranks do that have the same link.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from stage.trace.classes import RankClasses
from stage.trace.image import Ints
from stage.trace.peer import Peer, peer_positions
from stage.trace.report import Findings
from stage.trace.verify_node import RECV, SEND
from stage.trace.verify_record import CHANNEL, KIND, PARTNER, PEER, RankRecord

__all__ = ["Links"]

ALONE = -1
"""The channel of a message that is no link between two classes."""


@dataclass(slots=True)
class Links:
    """The links of a set; those that map the n-th rank of a class to the n-th of another have channel 0."""

    classes: RankClasses
    findings: Findings
    channels: dict[tuple[int, int, bytes], int] = field(default_factory=dict)

    def between_classes(self, number: int, record: RankRecord, peers: dict[int, Peer]) -> RankRecord:
        """The record of the first rank of a class with the first ranks of its peers' classes as partners.

        `peers` has the peer of a message by the position of its node, where it is one that each rank has for itself.
        """
        columns = record.columns.copy()
        known: dict[tuple[int, Peer], tuple[int, int]] = {}
        for at, position in self._messages(record):
            kind, peer = int(columns[KIND, at]), peers.get(position)
            if peer is None:
                columns[[PARTNER, CHANNEL], at] = self._alone(int(columns[PEER, at]))
                continue
            if (kind, peer) not in known:
                known[kind, peer] = self._link(number, kind, peer)
            columns[[PARTNER, CHANNEL], at] = known[kind, peer]
        return replace(record, columns=columns)

    def _messages(self, record: RankRecord) -> Iterator[tuple[int, int]]:
        """Column and position of each message."""
        positions = np.flatnonzero(np.frombuffer(record.structure.kinds, np.uint8) >= SEND)
        chosen = np.flatnonzero((record.columns[KIND] == SEND) | (record.columns[KIND] == RECV))
        return zip(chosen.tolist(), positions[chosen].tolist(), strict=True)

    def _alone(self, rank: int) -> tuple[int, int]:
        """Partner and channel where all ranks of a class name the same rank: right if they are one."""
        if not 0 <= rank < self.classes.mesh.world:
            return rank, ALONE
        first = self.classes.first(self.classes.of(rank))
        return first, 0 if first == rank else ALONE

    def _link(self, number: int, kind: int, peer: Peer) -> tuple[int, int]:
        """Partner and channel of the messages of a class to or from a peer."""
        classes = self.classes
        own = classes.partition.positions(number)
        there = peer_positions(classes.mesh, own, peer)
        others = np.unique(classes.partition.numbers(there)).tolist()
        if len(others) > 1:
            text = f"its ranks' peers {peer} are of classes {others}, not of one"
            self.findings.add(classes.first(number), None, "class-shape", text)
            return classes.first(number), ALONE
        (other,) = others
        ends = (number, other, there) if kind == SEND else (other, number, own[np.argsort(there)])
        return classes.first(other), self._channel(*ends)

    def _channel(self, source: int, target: int, link: Ints) -> int:
        """The number of a link, which has the position of the target for each member of the source class."""
        if np.array_equal(link, self.classes.partition.positions(target)):
            return 0
        key = source, target, link.tobytes()
        return self.channels.setdefault(key, 1 + len(self.channels))
