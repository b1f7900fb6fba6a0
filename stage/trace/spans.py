"""Where in a trace the fields stand that differ between ranks of one class: names of groups, and ranks of peers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stage.trace.decode import read_messages
from stage.trace.node import SCALARS, NodeType
from stage.trace.protobuf import (
    LENGTH,
    VARINT,
    overlong,
    read_length,
    read_text,
    read_varint,
    skip_field,
)

__all__ = ["ENDS", "GROUP_NAME", "Span", "communication_spans", "span_value"]

GROUP_NAME: Final = b"pg_name"
ENDS: Final = (b"comm_src", b"comm_dst")
AXES: Final = b"axes"
NAMES: Final = (GROUP_NAME, *ENDS)
WANTED: Final = frozenset((GROUP_NAME, AXES, *ENDS))
ATTRIBUTE: Final = 10
ATTRIBUTE_TAG: Final = ATTRIBUTE << 3 | LENGTH
NAME_TAG: Final = 1 << 3 | LENGTH
TYPE: Final = 3
TEXT_TAG: Final = SCALARS["string_val"] << 3 | LENGTH
NUMBER_TAG: Final = SCALARS["int32_val"] << 3 | VARINT
COMMUNICATION: Final = frozenset((NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL))


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes `start` to `stop` that hold the value of an attribute: of a text its length too.

    `node` is the number of the node in the file, `axes` what a collective says that its group spans.
    """

    node: int
    name: bytes
    start: int
    stop: int
    value: int | str
    axes: tuple[str, ...] = ()


def communication_spans(data: bytes) -> Iterator[Span]:
    """The values of `pg_name` of each collective, and of `comm_src` and `comm_dst` of each message, in file order.

    A value in another member of the oneof than the usual one is left out, and the last of several attributes of one
    name is taken, as consumers do. Malformed bytes are a `TraceError`.
    """
    bounds = read_messages(data)
    next(bounds, None)
    for node, (pos, end) in enumerate(bounds):
        if any(data.find(name, pos, end) >= 0 for name in NAMES):
            yield from _spans(data, node, pos, end)


def _spans(data: bytes, node: int, pos: int, end: int) -> Iterator[Span]:
    kind, axes = 0, ""
    found: dict[bytes, tuple[int, int, int | str]] = {}
    for number, start, stop in _fields(data, pos, end):
        if number == TYPE:
            kind = start
        elif number == ATTRIBUTE:
            name = data[start + 2 : start + 2 + data[start + 1]] if stop - start > 2 else b""
            if name in WANTED and data[start] == NAME_TAG:
                value = _value(data, start + 2 + len(name), stop)
                if value is not None and name == AXES:
                    axes = str(value[2])
                elif value is not None:
                    found[name] = value
    if kind in COMMUNICATION:
        names = (GROUP_NAME,) if kind == NodeType.COMM_COLL else ENDS
        for name in names:
            if name in found:
                yield Span(node, name, *found[name], tuple(axes.split()))


def _fields(data: bytes, pos: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number, the start (of a varint the value) and the stop of each field; attributes are read on the spot."""
    last = end - 1
    while pos < end:
        if data[pos] == ATTRIBUTE_TAG and pos < last and data[pos + 1] < 128:
            start = pos + 2
            pos = start + data[pos + 1]
            if pos > end:
                raise overlong(start, pos - start, end)
            yield ATTRIBUTE, start, pos
            continue
        tag, after = read_varint(data, pos, end, 5)
        if tag & 7 == VARINT and tag > 7:
            value, pos = read_varint(data, after, end)
            yield tag >> 3, value, pos
        else:
            start, pos = skip_field(data, pos, end)
            yield tag >> 3, start, pos


def _value(data: bytes, pos: int, end: int) -> tuple[int, int, int | str] | None:
    """Start, stop and value of the text or the int32 that ends an attribute."""
    if pos >= end:
        return None
    tag, start = read_varint(data, pos, end, 5)
    if tag == TEXT_TAG:
        content, stop = read_length(data, start, end)
        found: tuple[int, int, int | str] = (start, stop, read_text(data, content, stop))
    elif tag == NUMBER_TAG:
        value, stop = read_varint(data, start, end)
        found = (start, stop, value)
    else:
        return None
    return found if stop == end else None


def span_value(data: bytes, span: Span) -> int | str:
    """What another trace of the same class has where this span is."""
    if span.name == GROUP_NAME:
        content, stop = read_length(data, span.start, span.stop)
        return read_text(data, content, stop)
    return read_varint(data, span.start, span.stop)[0]
