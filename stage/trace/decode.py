"""Reading Chakra messages out of untrusted bytes.

A known field in the wrong wire type is an error; protobuf would leave it out and a consumer read a zero.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from stage.errors import TraceError
from stage.trace.node import LISTS, NO_IO, SCALARS, Attribute, IOInfo, Metadata, Scalar, TraceNode
from stage.trace.protobuf import (
    LENGTH,
    VARINT,
    check_wire,
    from_varint,
    malformed,
    overlong,
    read_fields,
    read_length,
    read_list,
    read_packed,
    read_scalar,
    read_text,
    read_varint,
    skip_field,
    wire_type,
)

__all__ = [
    "AttributeCache",
    "decode_attribute",
    "decode_metadata",
    "decode_node",
    "open_trace",
    "read_messages",
    "read_trace",
]

AttributeCache = dict[bytes, tuple[str, Attribute]]
"""Decoded attributes by their bytes: few distinct ones recur on every node."""

ID_TAG: Final = 1 << 3 | VARINT
TYPE_TAG: Final = 3 << 3 | VARINT
DATA_DEPS_TAG: Final = 5 << 3 | LENGTH
ATTRIBUTE_TAG: Final = 10 << 3 | LENGTH
CACHE_LIMIT: Final = 1 << 16
MEMBERS: Final = {number: name for name, number in {**SCALARS, **LISTS}.items()}


def read_messages(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each message of a trace: varint32 length, message, again to the end."""
    pos, total = 0, len(data)
    while pos < total:
        start = pos
        size = data[pos]
        pos += 1
        if size > 127:
            if pos < total and data[pos] < 128:
                size += (data[pos] << 7) - 128
                pos += 1
            else:
                size, pos = read_varint(data, start, total, 5)
        if size > total - pos:
            raise malformed(
                start, f"a message of {size} bytes starts here but only {total - pos} bytes follow"
            )
        yield pos, pos + size
        pos += size


def decode_attribute(data: bytes, pos: int, end: int) -> tuple[str, Attribute]:
    """Return the name and the value of the AttributeProto in these bounds."""
    name = doc = member = ""
    value: Scalar | None = None
    values: list[Scalar] = []
    for number, wire, start, stop in read_fields(data, pos, end):
        if number in (1, 2):
            check_wire(number, wire, LENGTH, pos)
            text = read_text(data, start, stop)
            name, doc = (text, doc) if number == 1 else (name, text)
        elif number in MEMBERS:
            if member != MEMBERS[number]:
                member, values = MEMBERS[number], []
            kind, _, shape = member.rpartition("_")
            if shape == "list":
                check_wire(number, wire, LENGTH, pos)
                values += read_list(data, kind, start, stop)
            else:
                check_wire(number, wire, wire_type(kind), pos)
                value = read_scalar(data, kind, start, stop)
    return name, Attribute(member, tuple(values) if member.endswith("_list") else value, doc)


def decode_io(data: bytes, pos: int, end: int, earlier: IOInfo) -> IOInfo:
    """Return the IOInfo in these bounds, merged into an earlier one of the same node."""
    texts = [earlier.values, earlier.shapes, earlier.types]
    for number, wire, start, stop in read_fields(data, pos, end):
        if number <= 3:
            check_wire(number, wire, LENGTH, pos)
            texts[number - 1] = read_text(data, start, stop)
    return IOInfo(*texts)


def decode_metadata(data: bytes, pos: int, end: int) -> Metadata:
    """Return the GlobalMetadata in these bounds."""
    version, attrs = "", {}
    for number, wire, start, stop in read_fields(data, pos, end):
        if number > 2:
            continue
        check_wire(number, wire, LENGTH, pos)
        if number == 1:
            version = read_text(data, start, stop)
        else:
            name, attribute = decode_attribute(data, start, stop)
            attrs[name] = attribute
    return Metadata(version, attrs)


class Draft:
    """A node being decoded. It has the slots of `TraceNode`, and becomes one by taking its class.

    That takes a quarter of the time of the frozen initializer, which sets each field through `object`.
    """

    __slots__ = tuple(field.name for field in dataclasses.fields(TraceNode))

    def __init__(self, fields: list[Any], attrs: dict[str, Attribute], repeated: tuple[str, ...]) -> None:
        _, self.id, self.name, self.type, ctrl, data, start, duration, self.inputs, self.outputs, _ = fields
        self.ctrl_deps = tuple(ctrl)
        self.data_deps = tuple(data)
        self.start_time_micros = start
        self.duration_micros = duration
        self.attrs = attrs
        self.repeated = repeated


def decode_node(data: bytes, pos: int, end: int, cache: AttributeCache) -> TraceNode:
    """Return the Node in these bounds; `cache` is the caller's and may be kept over many nodes and files.

    The fields that stand on nearly every node are read on the spot, for speed; `read_field` reads any.
    """
    begin = pos
    attrs: dict[str, Attribute] = {}
    fields: list[Any] = [0, 0, "", 0, [], [], 0, 0, NO_IO, NO_IO, attrs]
    while pos < end:
        tag = data[pos]
        if tag == ATTRIBUTE_TAG:
            pos = read_attributes(fields, data, pos, end, cache)
        elif tag == TYPE_TAG and pos + 1 < end and data[pos + 1] < 128:
            fields[3] = data[pos + 1]
            pos += 2
        elif tag == ID_TAG and pos + 2 < end and data[pos + 2] < 128 <= data[pos + 1]:
            fields[1] = data[pos + 1] + (data[pos + 2] << 7) - 128
            pos += 3
        elif tag == DATA_DEPS_TAG and pos + 1 < end and data[pos + 1] < 128:
            start = pos + 2
            pos = start + data[pos + 1]
            if pos > end:
                raise overlong(start, pos - start, end)
            fields[5] += read_packed(data, start, pos)
        else:
            pos = read_field(fields, data, pos, end)
    repeated = () if fields[0] == len(attrs) else repeated_names(data, begin, end)
    draft: Any = Draft(fields, attrs, repeated)
    draft.__class__ = TraceNode
    node: TraceNode = draft
    return node


def read_attributes(fields: list[Any], data: bytes, pos: int, end: int, cache: AttributeCache) -> int:
    """Store the attributes that stand in a row from `pos` and count them; return the position behind them.

    Keys of the cache are attributes with their tag and a length of one byte, so a hit needs no other check
    than that it ends within the message.
    """
    attrs = fields[10]
    count, last = 0, end - 1
    while pos < last and data[pos] == ATTRIBUTE_TAG:
        stop = pos + 2 + data[pos + 1]
        found = cache.get(data[pos:stop])
        if found is None:
            start, stop = read_length(data, pos + 1, end)
            found = decode_attribute(data, start, stop)
            if data[pos + 1] < 128:
                if len(cache) >= CACHE_LIMIT:
                    cache.clear()
                cache[data[pos:stop]] = found
        attrs[found[0]] = found[1]
        pos = stop
        count += 1
    if pos > end or (pos == last and data[pos] == ATTRIBUTE_TAG):
        raise malformed(pos, "the message ends inside an attribute")
    fields[0] += count
    return pos


def read_field(fields: list[Any], data: bytes, pos: int, end: int) -> int:
    """Store the field of a node at `pos`, or skip an unknown one; return the position behind it."""
    tag, start = read_varint(data, pos, end, 5)
    number, wire = tag >> 3, tag & 7
    if number > 10 or number == 0:
        return skip_field(data, pos, end)[1]
    if number in (4, 5) and wire == VARINT:
        value, stop = read_varint(data, start, end)
        fields[number].append(value)
    elif number in (1, 3, 6, 7):
        check_wire(number, wire, VARINT, pos)
        value, stop = read_varint(data, start, end)
        fields[number] = from_varint("int32", value) if number == 3 else value
    else:
        check_wire(number, wire, LENGTH, pos)
        start, stop = read_length(data, start, end)
        if number in (4, 5):
            fields[number] += read_packed(data, start, stop)
        elif number == 2:
            fields[2] = read_text(data, start, stop)
        elif number == 10:
            name, attribute = decode_attribute(data, start, stop)
            fields[10][name] = attribute
            fields[0] += 1
        else:
            fields[number] = decode_io(data, start, stop, fields[number])
    return stop


def repeated_names(data: bytes, pos: int, end: int) -> tuple[str, ...]:
    """Return the names that more than one attribute of a node has."""
    found = (field for field in read_fields(data, pos, end) if field[0] == 10)
    names = Counter(decode_attribute(data, start, stop)[0] for _, _, start, stop in found)
    return tuple(name for name, count in names.items() if count > 1)


def open_trace(data: bytes) -> tuple[Metadata, Iterator[tuple[int, int]]]:
    """Return the metadata of a trace and the bounds of its nodes."""
    if not data:
        raise TraceError("the trace is empty: write it again")
    if data.startswith(b"\x1f\x8b"):
        raise TraceError("the trace is compressed with gzip: unpack it first, no consumer reads it so")
    bounds = read_messages(data)
    return decode_metadata(data, *next(bounds)), bounds


def read_trace(data: bytes | memoryview) -> tuple[Metadata, Iterator[TraceNode]]:
    """Return the metadata and the nodes of a trace; nodes are decoded while they are taken.

    >>> read_trace(b"")
    Traceback (most recent call last):
    stage.errors.TraceError: the trace is empty: write it again
    """
    data = bytes(data)
    metadata, bounds = open_trace(data)
    cache: AttributeCache = {}
    return metadata, (decode_node(data, pos, end, cache) for pos, end in bounds)
