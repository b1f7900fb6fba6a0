"""Expand a program to the bytes of its rank class: copy each template's image to its instances and patch them.

The work is done with numpy on all instances of an image at once; what remains for a rank are the fields that name its
groups and peers.
"""

from collections.abc import Sequence
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
    Widths,
    encode_template,
    put_varints,
)
from stage.trace.program import Instance, Program

__all__ = ["ClassImage", "expand"]

Pattern = tuple[tuple[int, int] | None, ...]
FIELD_WIDTHS = {"layer": LAYER_WIDTH, "micro_batch": MICRO_BATCH_WIDTH, "step": STEP_WIDTH, "tag": TAG_WIDTH}


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


def _pattern(instance: Instance, forward_nodes: int) -> Pattern:
    """How the ports of an instance are connected, so that no dependency is written twice."""
    found: list[tuple[int, int] | None] = []
    seen: dict[int, tuple[int, int]] = {}
    for k, port in enumerate(instance.ports):
        if port < 0:
            found.append(None)
        elif 0 <= instance.forward <= port < instance.forward + forward_nodes:
            found.append((1, port - instance.forward))
        else:
            found.append(seen.setdefault(port, (2 + k, 0)))
    return tuple(found)


def _variants(program: Program) -> dict[tuple[int, Pattern], list[int]]:
    """Instances that share an image: those of one template connected alike."""
    lengths = {
        instance.base: len(program.templates[instance.template].nodes) for instance in program.instances
    }
    variants: dict[tuple[int, Pattern], list[int]] = {}
    for i, instance in enumerate(program.instances):
        key = (instance.template, _pattern(instance, lengths.get(instance.forward, 0)))
        variants.setdefault(key, []).append(i)
    return variants


def expand(program: Program, style: NameStyle, widths: Widths, header: bytes) -> ClassImage:
    """The trace of a rank class, `header` (the framed metadata) first."""
    variants = _variants(program)
    images = {key: encode_template(program.templates[key[0]], key[1], style, widths) for key in variants}
    lengths = np.zeros(len(program.instances), np.int64)
    for key, members in variants.items():
        lengths[members] = len(images[key].data)
    starts = np.concatenate([[len(header)], len(header) + np.cumsum(lengths)])
    data = np.empty(int(starts[-1]), np.uint8)
    data[: len(header)] = np.frombuffer(header, np.uint8)
    groups: dict[tuple[str, ...], list[Ints]] = {}
    peers: dict[int, list[Ints]] = {}
    for key, members in variants.items():
        image, at = images[key], starts[members]
        rows = _fill(image, [program.instances[i] for i in members], style)
        for start, row in zip(at.tolist(), rows, strict=True):
            data[start : start + len(row)] = row
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


def _fill(image: Image, instances: Sequence[Instance], style: NameStyle) -> Bytes:
    """The image once for each instance, with what is the instance's own."""
    rows = np.tile(image.data, (len(instances), 1))
    if not len(instances):
        return rows
    bases = np.array([(i.base, i.forward, *i.ports) for i in instances], np.int64)
    values = bases[:, image.ids[:, 1]] + image.ids[:, 2]
    put_varints(rows, image.ids[:, 0], values, image.id_width)
    for name in image.fields.keys() | image.digits.keys():
        numbers = np.array([getattr(i, name) for i in instances], np.int64)
        if name in image.fields:
            put_varints(rows, image.fields[name], numbers[:, None], FIELD_WIDTHS[name])
        if name in image.digits:
            _put_digits(rows, image.digits[name], numbers, getattr(style, name))
    return rows


def _put_digits(rows: Bytes, positions: Ints, numbers: Ints, count: int) -> None:
    for k in range(count):
        digit = numbers // 10 ** (count - 1 - k) % 10
        rows[:, positions + k] = (digit + ord("0"))[:, None]
