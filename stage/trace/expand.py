"""Expand a program to the bytes of its rank class: copy each template's image to its instances and patch them.

The work is done with numpy on all instances of an image at once; what remains for a rank are the fields that name its
groups and peers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stage.trace.image import (
    LAYER_WIDTH,
    MICRO_BATCH_WIDTH,
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
from stage.trace.program import COLUMNS, PORTS, Program
from stage.trace.scatter import Scatter, digit_words, varint_words

__all__ = ["ClassImage", "Encoded", "expand"]

FIELD_WIDTHS = {"layer": LAYER_WIDTH, "micro_batch": MICRO_BATCH_WIDTH, "step": STEP_WIDTH, "tag": TAG_WIDTH}
BASE, FORWARD = COLUMNS.index("base"), COLUMNS.index("forward")
SHARED = [COLUMNS.index(name) for name in ("micro_batch", "step", "tag")]
TOGETHER = 1 << 19
"""Bytes that are copied before they are patched."""

IN_FORWARD = 1 << 32
"""Ports in the forward instance are told from others by adding this to the node's number."""

Encoded = dict[tuple[int, Pattern], Image]
"""Images by the identity of their template and by how its ports are connected."""


@dataclass(frozen=True, slots=True)
class ClassImage:
    """The bytes of a rank class's trace, and where each rank's own group names and peers go.

    `groups` maps axes to a row of positions for each place of the name (padded length and digits); `peers` maps a
    distance in stages to the positions of that rank's number.
    """

    data: Bytes
    groups: dict[tuple[str, ...], Ints]
    peers: dict[int, Ints]

    @property
    def memory(self) -> int:
        """The bytes that it takes in memory."""
        return self.data.nbytes + sum(a.nbytes for a in (*self.groups.values(), *self.peers.values()))


def _connections(rows: Ints, starts: Ints, nodes: Ints) -> Ints:
    """For each instance and port: -1 for none, `IN_FORWARD` + node, or the first port connected to the same node.

    `starts` are the first ids of all instances of the program, ascending, and `nodes` how many each has.
    """
    ports, forward = rows[:, PORTS:], rows[:, FORWARD : FORWARD + 1]
    length = np.where(forward >= 0, nodes[np.searchsorted(starts, forward)], 0)
    inside = (ports >= forward) & (ports < forward + length)
    found = np.broadcast_to(np.arange(ports.shape[1]), ports.shape).copy()
    for port in range(1, ports.shape[1]):
        for earlier in reversed(range(port)):
            same = ports[:, port] == ports[:, earlier]
            found[same, port] = earlier
    found = np.where(inside, IN_FORWARD + ports - forward, found)
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
    return (1, connection - IN_FORWARD) if connection >= IN_FORWARD else (2 + connection, 0)


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
    peers: dict[int, list[Ints]] = {}
    for (image, rows), at in zip(parts, starts, strict=True):
        _fill(scatter, at, image, rows)
        for axes, positions in image.groups.items():
            places = (at[:, None] + positions).reshape(-1, 1) + np.arange(widths.groups[axes])
            groups.setdefault(axes, []).append(places)
        for distance, positions in image.peers.items():
            peers.setdefault(distance, []).append((at[:, None] + positions).ravel())
    return ClassImage(
        data,
        {axes: np.concatenate(found) for axes, found in groups.items()},
        {distance: np.concatenate(found) for distance, found in peers.items()},
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
    _put_numbers(Scatter(images.reshape(-1)), places, image, firsts, [COLUMNS[k] for k in SHARED])
    copies, numbers = [row.data for row in images], shared.tolist()
    some = max(16, TOGETHER // length)
    for first in range(0, len(rows), some):
        part = slice(first, first + some)
        for start, number in zip(at[part].tolist(), numbers[part], strict=True):
            scatter.bytes[start : start + length] = copies[number]
        _put_numbers(scatter, at[part], image, rows[part], ["layer", "bucket"])
        _put_ids(scatter, at[part], image, rows[part])


def _put_ids(scatter: Scatter, at: Ints, image: Image, rows: Ints) -> None:
    """Put the ids of nodes and of those they depend on."""
    word = np.uint32 if image.id_width <= 4 else np.uint64
    columns = np.concatenate([[BASE, FORWARD], np.arange(PORTS, rows.shape[1])])
    values = rows.astype(word)[:, columns[image.ids[:, 1]]] + image.ids[:, 2].astype(word)
    scatter.put(at, image.ids[:, 0], varint_words(values, image.id_width), image.id_width)


def _put_numbers(scatter: Scatter, at: Ints, image: Image, rows: Ints, names: Sequence[str]) -> None:
    """Put what instances are named by into their attributes and into their nodes' names."""
    for name in names:
        numbers = rows[:, COLUMNS.index(name)][:, None].astype(np.uint64)
        if name in image.fields:
            width = FIELD_WIDTHS[name]
            scatter.put(at, image.fields[name], varint_words(numbers, width), width)
        if name in image.digits:
            count = image.counts[name]
            scatter.put(at, image.digits[name], digit_words(numbers, count), count)
