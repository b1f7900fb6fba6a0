"""Where in a trace the fields stand that differ between ranks of one class: names of groups, and ranks of peers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stage.trace.decode import read_messages
from stage.trace.node import SCALARS, NodeType
from stage.trace.protobuf import LENGTH, VARINT, read_fields, read_length, read_varint

__all__ = ["ENDS", "GROUP_NAME", "Span", "communication_spans"]

GROUP_NAME: Final = b"pg_name"
ENDS: Final = (b"comm_src", b"comm_dst")
AXES: Final = b"axes"
ATTRIBUTE: Final = 10
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

    The trace is one that has been read without an error. A value in another member of the oneof than the usual one
    is left out, and the last of several attributes of one name is taken, as consumers do.
    """
    bounds = read_messages(data)
    next(bounds)
    for node, (pos, end) in enumerate(bounds):
        if data.find(GROUP_NAME, pos, end) < 0 and not any(data.find(name, pos, end) >= 0 for name in ENDS):
            continue
        yield from _spans(data, node, pos, end)


def _spans(data: bytes, node: int, pos: int, end: int) -> Iterator[Span]:
    kind, axes = 0, ""
    found: dict[bytes, tuple[int, int, int | str]] = {}
    for number, _, start, stop in read_fields(data, pos, end):
        if number == TYPE:
            kind = start
        elif number == ATTRIBUTE:
            name, value = _attribute(data, start, stop)
            if value is not None and name == AXES:
                axes = str(value[2])
            elif value is not None:
                found[name] = value
    if kind in COMMUNICATION:
        names = (GROUP_NAME,) if kind == NodeType.COMM_COLL else ENDS
        for name in names:
            if name in found:
                yield Span(node, name, *found[name], tuple(axes.split()))


def _attribute(data: bytes, pos: int, end: int) -> tuple[bytes, tuple[int, int, int | str] | None]:
    """The name of an attribute and, of a text or an int32 behind it, start, stop and value."""
    tag, after = read_varint(data, pos, end, 5)
    if tag != 1 << 3 | LENGTH:
        return b"", None
    start, stop = read_length(data, after, end)
    name = data[start:stop]
    if name not in (GROUP_NAME, AXES, *ENDS) or stop >= end:
        return name, None
    tag, value_at = read_varint(data, stop, end, 5)
    if tag == TEXT_TAG:
        start, stop = read_length(data, value_at, end)
        found: tuple[int, int, int | str] = (value_at, stop, data[start:stop].decode())
    elif tag == NUMBER_TAG:
        value, stop = read_varint(data, value_at, end)
        found = (value_at, stop, value)
    else:
        return name, None
    return name, found if stop == end else None
