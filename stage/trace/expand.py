"""Expand a program to the bytes of its rank class: copy each template's image to its instances and patch them.

The work is done with numpy on all instances of an image at once; what remains for a rank are the fields that name its
groups and peers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stage.trace.image import (
    CHUNK_WIDTH,
    LAYER_WIDTH,
    MICRO_BATCH_WIDTH,
    PHASE_WIDTH,
    SOURCES,
    STEP_WIDTH,
    TAG_WIDTH,
    Bytes,
    Image,
    Ints,
    NameStyle,
    Pattern,
    Widths,
    encode_template,
)
from stage.trace.peer import Peer
from stage.trace.program import COLUMNS, PIPELINE_PHASES, PORTS, Program
from stage.trace.scatter import Scatter, digit_words, varint_words
from stage.trace.wire import varint

__all__ = ["ClassImage", "Encoded", "expand"]

FIELD_WIDTHS = {
    "layer": LAYER_WIDTH,
    "micro_batch": MICRO_BATCH_WIDTH,
    "chunk": CHUNK_WIDTH,
    "step": STEP_WIDTH,
    "tag": TAG_WIDTH,
}
BASE, PHASE = COLUMNS.index("base"), COLUMNS.index("pipeline_phase")
SHARED = [COLUMNS.index(name) for name in ("micro_batch", "chunk", "step", "pipeline_phase")]
TOGETHER = 1 << 19
"""Bytes that are copied before they are patched."""

IN_SOURCE = 1 << 32
"""A port in an earlier instance is the number of the node and this for each place in `SOURCES`; others are below it."""

Encoded = dict[tuple[int, Pattern], Image]
"""Images by the identity of their template and by how its ports are connected."""


@dataclass(frozen=True, slots=True)
class ClassImage:
    """The bytes of a rank class's trace, and where each rank's own group names and peers go.

    `groups` maps axes to a row of positions for each place of the name (padded length and digits); `peers` maps a
    peer to the positions of that rank's number.
    """

    data: Bytes
    groups: dict[tuple[str, ...], Ints]
    peers: dict[Peer, Ints]

    @property
    def memory(self) -> int:
        """The bytes that it takes in memory."""
        return self.data.nbytes + sum(a.nbytes for a in (*self.groups.values(), *self.peers.values()))


def _connections(rows: Ints, starts: Ints, nodes: Ints) -> Ints:
    """For each instance and port: -1 for none, a node of an earlier one, or the first port connected to the same node.

    `starts` are the first ids of all instances of the program, ascending, and `nodes` how many each has.
    """
    ports = rows[:, PORTS:]
    found = np.broadcast_to(np.arange(ports.shape[1]), ports.shape).copy()
    for port in range(1, ports.shape[1]):
        for earlier in reversed(range(port)):
            same = ports[:, port] == ports[:, earlier]
            found[same, port] = earlier
    for source in range(1, len(SOURCES)):
        base = rows[:, source : source + 1]
        length = np.where(base >= 0, nodes[np.searchsorted(starts, base)], 0)
        inside = (ports >= base) & (ports < base + length)
        found = np.where(inside, source * IN_SOURCE + ports - base, found)
    return np.where(ports < 0, -1, found)


def _alike(columns: Ints) -> Ints:
    """A number for each row that is the same where the rows are, from 0 on."""
    found = np.zeros(len(columns), np.int64)
    for column in columns.T:
        if (column != column[0]).any():
            kinds = np.unique(column, return_inverse=True)[1]
            found = np.unique(found * (1 + kinds.max()) + kinds, return_inverse=True)[1]
    return found


def _variants(connections: Ints) -> Iterator[tuple[Pattern, Ints]]:
    """Instances that share an image, those whose ports are connected alike, and how they are."""
    alike = _alike(connections)
    order = np.argsort(alike, kind="stable")
    for members in np.split(order, np.cumsum(np.bincount(alike))[:-1]):
        yield tuple(map(_pattern, connections[members[0]].tolist())), members


def _pattern(connection: int) -> tuple[int, int] | None:
    if connection < 0:
        return None
    source, number = divmod(connection, IN_SOURCE)
    return (source, number) if source else (len(SOURCES) + number, 0)


def expand(
    program: Program, style: NameStyle, widths: Widths, header: bytes, encoded: Encoded | None = None
) -> ClassImage:
    """The trace of a rank class, `header` (the framed metadata) first; images are shared through `encoded`."""
    known: Encoded = {} if encoded is None else encoded
    parts = list(_parts(program, style, widths, known))
    starts, size = _starts(parts, len(header))
    data = np.empty(size, np.uint8)
    data[: len(header)] = np.frombuffer(header, np.uint8)
    scatter = Scatter(data)
    groups: dict[tuple[str, ...], list[Ints]] = {}
    peers: dict[Peer, list[Ints]] = {}
    for (image, rows), at in zip(parts, starts, strict=True):
        _fill(scatter, at, image, rows)
        for axes, positions in image.groups.items():
            places = (at[:, None] + positions).reshape(-1, 1) + np.arange(widths.groups[axes])
            groups.setdefault(axes, []).append(places)
        for peer, positions in image.peers.items():
            peers.setdefault(peer, []).append((at[:, None] + positions).ravel())
    return ClassImage(
        data,
        {axes: np.concatenate(found) for axes, found in groups.items()},
        {peer: np.concatenate(found) for peer, found in peers.items()},
    )


def _parts(
    program: Program, style: NameStyle, widths: Widths, encoded: Encoded
) -> Iterator[tuple[Image, Ints]]:
    """Each image of a program with the rows of its instances."""
    counts = np.array([len(template.nodes) for template in program.templates])
    starts = np.concatenate([rows[:, BASE] for rows in program.instances])
    nodes = np.repeat(counts, program.counts())
    order = np.argsort(starts)
    for template, rows in zip(program.templates, program.instances, strict=True):
        connections = _connections(rows, starts[order], nodes[order])
        for pattern, members in _variants(connections):
            key = (id(template), pattern)
            if key not in encoded:
                encoded[key] = encode_template(template, pattern, style, widths)
            yield encoded[key], rows[members]


def _starts(parts: list[tuple[Image, Ints]], first: int) -> tuple[list[Ints], int]:
    """Where the bytes of each instance start, in the order of their ids from `first` on, and where the last ends."""
    order = np.argsort(np.concatenate([rows[:, BASE] for _, rows in parts]))
    lengths = np.repeat([len(image.data) for image, _ in parts], [len(rows) for _, rows in parts])
    ends = first + np.cumsum(lengths[order])
    starts = np.empty(len(order), np.int64)
    starts[order] = ends - lengths[order]
    return np.split(starts, np.cumsum([len(rows) for _, rows in parts])[:-1]), int(ends[-1])


def _fill(scatter: Scatter, at: Ints, image: Image, rows: Ints) -> None:
    """Put the image at each instance's place, with what is the instance's own.

    Numbers that instances share are put in first, once for all of them: a micro-batch has as many as layers. Instances
    are then taken some at a time, so that their bytes are still in the processor's cache when they are patched.
    """
    length = len(image.data)
    shared = _alike(rows[:, SHARED])
    firsts = rows[np.unique(shared, return_index=True)[1]]
    images = np.tile(image.data, (len(firsts), 1))
    places = np.arange(len(firsts)) * length
    once = Scatter(images.reshape(-1))
    _put_numbers(once, places, image, firsts, [COLUMNS[k] for k in SHARED if k != PHASE])
    _put_phases(once, places, image, firsts)
    copies, numbers = [row.data for row in images], shared.tolist()
    some = max(16, TOGETHER // length)
    for first in range(0, len(rows), some):
        part = slice(first, first + some)
        for start, number in zip(at[part].tolist(), numbers[part], strict=True):
            scatter.bytes[start : start + length] = copies[number]
        _put_numbers(scatter, at[part], image, rows[part], ["layer", "bucket", "tag"])
        _put_ids(scatter, at[part], image, rows[part])


def _put_ids(scatter: Scatter, at: Ints, image: Image, rows: Ints) -> None:
    """Put the ids of nodes and of those they depend on."""
    word = np.uint32 if image.id_width <= 4 else np.uint64
    columns = np.concatenate([np.arange(len(SOURCES)), np.arange(PORTS, rows.shape[1])])
    values = rows.astype(word)[:, columns[image.ids[:, 1]]] + image.ids[:, 2].astype(word)
    scatter.put(at, image.ids[:, 0], varint_words(values, image.id_width), image.id_width)


def _put_numbers(scatter: Scatter, at: Ints, image: Image, rows: Ints, names: Sequence[str]) -> None:
    """Put what instances are named by into their attributes and into their nodes' names."""
    for name in names:
        numbers = rows[:, COLUMNS.index(name)][:, None].astype(np.uint64)
        if name in image.fields:
            width = FIELD_WIDTHS[name]
            if name == "tag":
                numbers = numbers + image.tags.astype(np.uint64)
            scatter.put(at, image.fields[name], varint_words(numbers, width), width)
        if name in image.digits:
            count = image.counts[name]
            scatter.put(at, image.digits[name], digit_words(numbers, count), count)


def _put_phases(scatter: Scatter, at: Ints, image: Image, rows: Ints) -> None:
    """Put the phase of the pipeline into the attributes of instances, whose length is then that of all phases."""
    positions = image.fields.get("pipeline_phase")
    if positions is None:
        return
    texts = [text.encode() for text in PIPELINE_PHASES[1:]]
    padded = [varint(len(text), PHASE_WIDTH - len(text)) + text for text in texts]
    table = np.frombuffer(b"".join(padded), np.uint8).reshape(-1, PHASE_WIDTH)
    phases = rows[:, PHASE] - 1
    assert phases.min() >= 0, "what has a phase is placed in one"
    for k in range(PHASE_WIDTH):
        scatter.put(at, positions + k, table[phases, k : k + 1].astype(np.uint64), 1)
