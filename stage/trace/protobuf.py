"""The protobuf wire format, read out of untrusted bytes.

The reader is stricter than protobuf where a consumer would silently read a zero: a text that is not UTF-8,
a length that runs past its message and a varint longer than its ten bytes are errors that name the byte.
Unknown fields are skipped, padded varints are read. Memory stays within a constant factor of the input.
"""

import struct
from collections.abc import Iterator
from typing import Final

from stage.errors import TraceError
from stage.trace.node import Scalar

__all__ = [
    "FORMATS",
    "LENGTH",
    "VARINT",
    "check_wire",
    "from_varint",
    "malformed",
    "overlong",
    "read_fields",
    "read_length",
    "read_list",
    "read_packed",
    "read_scalar",
    "read_text",
    "read_varint",
    "skip_field",
    "wire_type",
]

NESTING_LIMIT: Final = 100
VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = range(6)

FORMATS: Final = {
    "double": "<d",
    "float": "<f",
    "fixed32": "<I",
    "fixed64": "<Q",
    "sfixed32": "<i",
    "sfixed64": "<q",
}
"""Struct formats of the kinds of fixed width; every other kind but string and bytes is a varint."""


def malformed(offset: int, what: str) -> TraceError:
    """Return the error for malformed bytes at an offset of the file."""
    return TraceError(f"byte {offset}: {what}; the file is damaged or no Chakra trace: write it again")


def overlong(start: int, size: int, end: int) -> TraceError:
    """Return the error for a field whose content at `start` would run past its message."""
    return malformed(
        start, f"a field of {size} bytes starts here but its message has only {end - start} left"
    )


def read_varint(data: bytes, pos: int, end: int, longest: int = 10) -> tuple[int, int]:
    """Return the varint at `pos` and the position behind it; lengths and tags are at most 5 bytes."""
    start, result, shift = pos, 0, 0
    while pos < end:
        byte = data[pos]
        pos += 1
        result |= (byte & 127) << shift
        if byte < 128:
            if result >> 64:
                raise malformed(start, "a varint holds more than 64 bits")
            return result, pos
        shift += 7
        if shift == 7 * longest:
            raise malformed(start, f"a varint is longer than {longest} bytes")
    raise malformed(start, "the message ends inside a varint")


def read_text(data: bytes, pos: int, stop: int) -> str:
    """Return the UTF-8 text in these bounds."""
    try:
        return data[pos:stop].decode()
    except UnicodeDecodeError as err:
        raise malformed(pos + err.start, "a text is not UTF-8") from err


def read_length(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Return the bounds of the length-delimited field whose length stands at `pos`."""
    size, start = read_varint(data, pos, end, 5)
    if size > end - start:
        raise malformed(
            pos, f"a field of {size} bytes starts here but its message has only {end - start} left"
        )
    return start, start + size


def read_fields(data: bytes, pos: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, stop) of each field; start is the *value* of a varint field."""
    while pos < end:
        tag, after = read_varint(data, pos, end, 5)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT and number:
            value, stop = read_varint(data, after, end)
            yield number, wire, value, stop
        else:
            after, stop = skip_field(data, pos, end)
            yield number, wire, after, stop
        pos = stop


def skip_field(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Return the bounds of the content of the field whose tag stands at `pos`; its kind may be unknown."""
    tag, start = read_varint(data, pos, end, 5)
    number, wire = tag >> 3, tag & 7
    if not 0 < number < 1 << 29:
        raise malformed(pos, f"field number {number} does not exist in protobuf")
    if wire == VARINT:
        return start, read_varint(data, start, end)[1]
    if wire == LENGTH:
        return read_length(data, start, end)
    if wire == GROUP:
        return start, skip_group(data, pos, end)
    if wire not in (FIXED64, FIXED32):
        raise malformed(pos, f"wire type {wire} of field {number} is not possible here")
    stop = start + (8 if wire == FIXED64 else 4)
    if stop > end:
        raise malformed(pos, f"the message ends inside field {number}")
    return start, stop


def skip_group(data: bytes, pos: int, end: int) -> int:
    """Return the position behind the group whose start tag stands at `pos`."""
    opened: list[int] = []
    start = pos
    while pos < end:
        tag, after = read_varint(data, pos, end, 5)
        number, wire = tag >> 3, tag & 7
        if wire == GROUP:
            opened.append(number)
        elif wire == GROUP_END and opened.pop() != number:
            raise malformed(pos, f"group {number} ends here but was not the one opened last")
        elif wire != GROUP_END:
            after = skip_field(data, pos, end)[1]
        if not opened:
            return after
        if len(opened) > NESTING_LIMIT:
            raise malformed(pos, f"groups are nested deeper than {NESTING_LIMIT}")
        pos = after
    raise malformed(start, "a group is not closed")


def from_varint(kind: str, value: int) -> int | bool:
    """Return the value that a raw 64-bit varint has in a field of this kind."""
    if kind == "bool":
        return value != 0
    if kind in ("sint32", "sint64"):
        value &= (1 << int(kind[4:])) - 1
        return (value >> 1) ^ -(value & 1)
    bits = int(kind[-2:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "i" and value >> (bits - 1) else value


def wire_type(kind: str) -> int:
    """Return the wire type of a single value of this kind."""
    if kind in ("string", "bytes"):
        return LENGTH
    if kind in FORMATS:
        return FIXED64 if struct.calcsize(FORMATS[kind]) == 8 else FIXED32
    return VARINT


def read_scalar(data: bytes, kind: str, start: int, stop: int) -> Scalar:
    """Return one value of this kind; `start` is the raw value where the kind is a varint."""
    if kind == "string":
        return read_text(data, start, stop)
    if kind == "bytes":
        return data[start:stop]
    if kind in FORMATS:
        value: float | int = struct.unpack_from(FORMATS[kind], data, start)[0]
        return value
    return from_varint(kind, start)


def read_list(data: bytes, kind: str, pos: int, end: int) -> list[Scalar]:
    """Return the repeated `values` of a list message, packed or not."""
    values: list[Scalar] = []
    single = wire_type(kind)
    for number, wire, start, stop in read_fields(data, pos, end):
        if number != 1:
            continue
        if wire == single:
            values.append(read_scalar(data, kind, start, stop))
        elif wire == LENGTH and single == VARINT:
            values.extend(from_varint(kind, value) for value in read_packed(data, start, stop))
        elif wire == LENGTH:
            size = struct.calcsize(FORMATS[kind])
            if (stop - start) % size:
                raise malformed(start, f"{stop - start} bytes do not hold whole {kind} values")
            values.extend(value for (value,) in struct.iter_unpack(FORMATS[kind], data[start:stop]))
        else:
            raise malformed(pos, f"the values of a {kind} list have wire type {wire}")
    return values


def read_packed(data: bytes, pos: int, stop: int) -> list[int]:
    """Return the varints packed in these bounds; those of up to two bytes are read on the spot, for speed."""
    values = []
    while pos < stop:
        value = data[pos]
        pos += 1
        if value > 127:
            if pos < stop and data[pos] < 128:
                value += (data[pos] << 7) - 128
                pos += 1
            else:
                value, pos = read_varint(data, pos - 1, stop)
        values.append(value)
    return values


def check_wire(number: int, wire: int, expected: int, offset: int) -> None:
    """Raise unless a known field has the wire type of its kind."""
    if wire != expected:
        raise malformed(offset, f"field {number} of the message here has wire type {wire}, not {expected}")
