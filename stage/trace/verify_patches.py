"""Proof that what differs between the ranks of a class is what may differ: the names of groups and the ranks of peers.

A rank's bytes are those of its class with these fields put in. Where the tables of positions are exactly the fields
of one rank's trace, and values that nobody reads, every other byte is the same on all ranks, and every rank is read
as that one is.
"""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from stage.trace.classes import RankClasses
from stage.trace.decode import read_messages
from stage.trace.expand import ClassImage
from stage.trace.image import PEER_WIDTH, Ints
from stage.trace.peer import Peer
from stage.trace.report import Findings
from stage.trace.spans import ENDS, GROUP_NAME, Span, communication_spans, span_value
from stage.trace.unread import is_unread
from stage.trace.verify_node import COLL, RECV, SEND
from stage.trace.verify_record import RankRecord

__all__ = ["ClassPatches", "tables_fit"]

Axes = tuple[str, ...]
USUAL = {COLL: frozenset({GROUP_NAME}), SEND: frozenset(ENDS), RECV: frozenset(ENDS)}
OTHER_END = {SEND: b"comm_dst", RECV: b"comm_src"}
ROOM = range(1, 6)
"""Bytes that the length of a group's name may take."""


def tables_fit(classes: RankClasses, number: int) -> bool:
    """Whether every entry of a class's tables is a place in its bytes, a known group, and a peer that there is."""
    image, groups = classes.image(number), classes.groups
    size = len(image.data)
    return all(
        axes in groups.first and rows.shape[1:] == (groups.width(axes),) and inside(rows, size)
        for axes, rows in image.groups.items()
    ) and all(
        peer.exists(classes.mesh) and inside(starts, size - PEER_WIDTH + 1)
        for peer, starts in image.peers.items()
    )


def inside(places: Ints, size: int) -> bool:
    """Whether places are those of so many bytes."""
    return bool(np.all((places >= 0) & (places < size)))


@dataclass(slots=True)
class ClassPatches:
    """The check of one class's tables, on the trace of the class's first rank.

    `data` is that trace; `numbers` has for each set of axes the group of every position of the mesh.
    """

    classes: RankClasses
    number: int
    record: RankRecord
    data: bytes
    numbers: dict[tuple[str, ...], Ints]
    findings: Findings
    spans: dict[int, Span] = field(default_factory=dict)
    patched: dict[int, Axes | Peer] = field(default_factory=dict)
    unread: list[tuple[int, int]] = field(default_factory=list)
    bounds: list[tuple[int, int]] = field(default_factory=list)
    named: dict[int, set[bytes]] = field(default_factory=dict)

    @property
    def image(self) -> ClassImage:
        """The image whose tables are checked."""
        return self.classes.image(self.number)

    def check(self) -> None:
        """Report every entry of a table that is no such field, and every field that should be in one."""
        self.spans = {span.start: span for span in communication_spans(self.data)}
        for axes, rows in self.image.groups.items():
            self._table(axes, rows, self._width(axes))
        for peer, starts in self.image.peers.items():
            self._table(peer, starts.reshape(-1, 1) + np.arange(PEER_WIDTH), PEER_WIDTH)
        for start, span in self.spans.items():
            key = self.patched.get(start)
            position = self.classes.position(self.record.rank)
            problems = self._fixed(span) if key is None else self._varying(span, key, position)
            for rule, text in problems:
                self.findings.add(self.record.rank, self.record.ident(span.node), rule, text)
        self._last()

    def peers(self) -> dict[int, Peer]:
        """The peer of each message that is one each rank has for itself, by the position of its node."""
        ends = np.frombuffer(self.record.structure.kinds, np.uint8)
        return {
            span.node: key
            for start, key in self.patched.items()
            if isinstance(key, Peer)
            and (span := self.spans[start]).name == OTHER_END.get(int(ends[span.node]))
        }

    def _width(self, axes: tuple[str, ...]) -> int:
        """Bytes of the name of a group over `axes`, after checking that every such name fits."""
        width = self.classes.groups.width(axes)
        numbers = self.numbers.get(axes)
        digits = (
            {len(str(n)) for n in (numbers[numbers > 0].min(), numbers.max())} if numbers is not None else ()
        )
        if any(width - count not in ROOM for count in digits):
            self._refuse(f"names of groups over {' '.join(axes)} do not fit {width} bytes")
        return width

    def _table(self, key: Axes | Peer, rows: Ints, width: int) -> None:
        """Match the rows of one table with fields of the trace."""
        what = f"peer {key}" if isinstance(key, Peer) else f"group over {' '.join(key)}"
        whole = np.array_equal(rows, rows[:, :1] + np.arange(width)) if rows.size else True
        for start in rows[:, 0].tolist() if rows.size else ():
            span = self.spans.get(start)
            fits = whole and span is not None and span.stop - start == width
            if whole and span is None and self._lacks(start, start + width):
                self.unread.append((start, start + width))
            elif span is None or not fits or (span.name == GROUP_NAME) == isinstance(key, Peer):
                self._refuse(f"byte {start} is set to the {what}, but it is not where such a field stands")
            elif start in self.patched:
                self._refuse(f"byte {start} is set twice, the second time to the {what}")
            else:
                self.patched[start] = key

    def _lacks(self, start: int, stop: int) -> bool:
        """Whether bytes are an attribute that their node lacks, and may, since it has another name.

        By its old name a reader does not find it, whatever the rank has there.
        """
        if not self.bounds:
            self.bounds = list(islice(read_messages(self.data), 1, None))
            for span in self.spans.values():
                self.named.setdefault(span.node, set()).add(span.name)
        node = bisect(self.bounds, (start, len(self.data))) - 1
        if node < 0 or stop > self.bounds[node][1]:
            return False
        usual = USUAL.get(self.record.structure.kinds[node], frozenset())
        return self.named.get(node, set()) < usual and is_unread(self.data, self.bounds[node], (start, stop))

    def _refuse(self, text: str) -> None:
        self.findings.add(self.record.rank, None, "patch", text)

    def _last(self) -> None:
        """Report where the last rank of the class differs from the first but in its own fields."""
        position = int(self.classes.partition.positions(self.number)[-1])
        rank = self.classes.rank_at(position)
        data = bytes(self.classes.rank(rank))
        same = (
            np.frombuffer(self.data, np.uint8) == np.frombuffer(data, np.uint8)
            if len(data) == len(self.data)
            else np.zeros(1, np.bool_)
        )
        for start, stop in (*((start, self.spans[start].stop) for start in self.patched), *self.unread):
            same[start:stop] = True
        if not same.all():
            self.findings.add(
                rank, None, "patch", "differs from other ranks of its class in more than groups and peers"
            )
            return
        for start, key in self.patched.items():
            span = replace(self.spans[start], value=span_value(data, self.spans[start]))
            for rule, text in self._varying(span, key, position):
                self.findings.add(rank, self.record.ident(span.node), rule, text)

    def _varying(self, span: Span, key: Axes | Peer, position: int) -> Iterator[tuple[str, str]]:
        """What is wrong with a field that the rank at a position has for itself."""
        if isinstance(key, Peer):
            peer = int(self.classes.peers(np.array([position]), key)[0])
            if span.value != peer:
                yield "patch", f"names rank {span.value}, but its peer {key} is rank {peer}"
            return
        expected = str(self.numbers[key][position]) if key in self.numbers else ""
        if span.axes != key:
            yield "patch-axes", f"says that its group spans {span.axes}, but is given one over {key}"
        elif span.value != expected:
            yield "patch", f"is on group {span.value}, but the formula gives {expected}"

    def _fixed(self, span: Span) -> Iterator[tuple[str, str]]:
        """What is wrong with a field that all ranks of the class have alike."""
        size = self.classes.ranks_per_class
        if size == 1:
            return
        own = self.classes.partition.positions(self.number)
        if span.name != GROUP_NAME:
            yield "patch", f"names rank {span.value} as {span.name.decode()} on all {size} ranks of its class"
        elif str(span.value).isdecimal() and span.value != "0" and not self._common(int(span.value), own):
            text = f"is on group {span.value} on all {size} ranks of its class, not all of them its members"
            yield "group-member", text

    def _common(self, group: int, own: Ints) -> bool:
        """Whether a group has all ranks of the class."""
        return any(bool(np.all(numbers[own] == group)) for numbers in self.numbers.values())
