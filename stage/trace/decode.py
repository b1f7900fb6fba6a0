"""Reading Chakra messages out of untrusted bytes.

A known field in the wrong wire type is an error, where protobuf would leave it out and a consumer read a zero.
"""

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
    read_fields,
    overlong,
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
    "read_messages",
    "read_trace",
]

AttributeCache = dict[bytes, tuple[str, Attribute]]
"""Decoded attributes by their bytes: few distinct ones recur on every node."""

ATTRIBUTE_TAG: Final = 10 << 3 | LENGTH
CACHE_LIMIT: Final = 1 << 16
LONGEST_CACHED: Final = 256
MEMBERS: Final = {number: name for name, number in {**SCALARS, **LISTS}.items()}


def read_messages(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each message of a trace: varint32 length, message, again to the end."""
    pos, total = 0, len(data)
    while pos < total:
        start = pos
        size = data[pos]
        pos += 1
        if size > 127:
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


def decode_node(data: bytes, pos: int, end: int, cache: AttributeCache) -> TraceNode:
    """Return the Node in these bounds; `cache` is the caller's and may be kept over many nodes and files."""
    fields: list[Any] = [None, 0, "", 0, [], [], 0, 0, NO_IO, NO_IO]
    attrs: dict[str, Attribute] = {}
    repeated: list[str] = []
    while pos < end:
        tag, start = data[pos], pos + 1
        if tag > 127:
            tag, start = read_varint(data, pos, end, 5)
        if tag & 7 == LENGTH and start < end:
            size, start = data[start], start + 1
            if size > 127:
                size, start = read_varint(data, start - 1, end, 5)
            pos = start + size
            if pos > end:
                raise overlong(start, size, end)
            if tag == ATTRIBUTE_TAG:
                body = data[start:pos]
                found = cache.get(body) or remember(cache, body, decode_attribute(data, start, pos))
                if found[0] in attrs:
                    repeated.append(found[0])
                attrs[found[0]] = found[1]
            else:
                set_length_field(fields, tag >> 3, data, start, pos)
        else:
            pos = read_short_field(fields, data, pos, end)
    kind = fields[3] if fields[3] < 128 else from_varint("int32", fields[3])
    twice = tuple(dict.fromkeys(repeated)) if repeated else ()
    data_deps, ctrl_deps = tuple(fields[5]), tuple(fields[4])
    return TraceNode(fields[1], fields[2], kind, data_deps, ctrl_deps, *fields[6:], attrs, twice)


def remember(cache: AttributeCache, body: bytes, found: tuple[str, Attribute]) -> tuple[str, Attribute]:
    """Return what was found after keeping it, unless it is long or the cache is full."""
    if len(cache) >= CACHE_LIMIT:
        cache.clear()
    if len(body) <= LONGEST_CACHED:
        cache[body] = found
    return found


def set_length_field(fields: list[Any], number: int, data: bytes, start: int, stop: int) -> None:
    """Store one length-delimited field of a node, or leave an unknown one out."""
    if number in (4, 5):
        fields[number] += read_packed(data, start, stop)
    elif number == 2:
        fields[2] = read_text(data, start, stop)
    elif number in (8, 9):
        fields[number] = decode_io(data, start, stop, fields[number])
    elif number in (1, 3, 6, 7):
        check_wire(number, LENGTH, VARINT, start)
    elif number == 0:
        raise malformed(start, "field number 0 does not exist in protobuf")


def read_short_field(fields: list[Any], data: bytes, pos: int, end: int) -> int:
    """Store one field of a node that is a varint, or skip an unknown one; return the position behind it."""
    tag, start = read_varint(data, pos, end, 5)
    number, wire = tag >> 3, tag & 7
    if number > 10 or number == 0:
        return skip_field(data, pos, end)[1]
    check_wire(number, wire, LENGTH if number in (2, 8, 9, 10) else VARINT, pos)
    if number in (2, 8, 9, 10):
        raise malformed(start, "the message ends where a length should stand")
    value, stop = read_varint(data, start, end)
    if number in (4, 5):
        fields[number].append(value)
    else:
        fields[number] = value
    return stop


def read_trace(data: bytes | memoryview) -> tuple[Metadata, Iterator[TraceNode]]:
    """Return the metadata and the nodes of a trace; nodes are decoded while they are taken.

    >>> read_trace(b"")
    Traceback (most recent call last):
    stage.errors.TraceError: the trace is empty: write it again
    """
    data = bytes(data)
    if not data:
        raise TraceError("the trace is empty: write it again")
    if data.startswith(b"\x1f\x8b"):
        raise TraceError("the trace is compressed with gzip: unpack it first, no consumer reads it so")
    bounds = read_messages(data)
    metadata = decode_metadata(data, *next(bounds))
    cache: AttributeCache = {}
    return metadata, (decode_node(data, pos, end, cache) for pos, end in bounds)
