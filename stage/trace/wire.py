"""Chakra messages to bytes and back, without protobuf.

A trace is `[varint length][message]` again and again: one GlobalMetadata, then nodes. Varints can be padded
to a fixed width, which every protobuf parser accepts; so fields that differ from rank to rank can be patched
in place in a prepared image.
"""

import struct
from collections.abc import Iterable, Mapping

from stage.errors import TraceError
from stage.trace.decode import read_trace
from stage.trace.node import LISTS, SCALARS, Attribute, IOInfo, Scalar, TraceNode, Value
from stage.trace.protobuf import FORMATS, LENGTH, VARINT, wire_type

__all__ = ["attribute", "encode_metadata", "encode_node", "frame", "read_trace", "varint"]


def varint(value: int, width: int | None = None) -> bytes:
    """Return a value of 0 to 2**64 - 1 as a varint, padded with continuation bytes to `width` bytes.

    >>> varint(300).hex(), varint(300, 4).hex()
    ('ac02', 'ac828000')
    """
    assert 0 <= value < 1 << 64, value
    out = bytearray()
    while value > 127 or (width is not None and len(out) < width - 1):
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    assert width is None or len(out) == width <= 10, f"{len(out)} bytes do not fit a width of {width}"
    return bytes(out)


def tag(number: int, wire: int) -> bytes:
    """Return the tag that opens a field."""
    return varint(number << 3 | wire)


def delimited(number: int, content: bytes) -> bytes:
    """Return a length-delimited field."""
    return tag(number, LENGTH) + varint(len(content)) + content


def frame(message: bytes) -> bytes:
    """Return a message with its length in front, as it stands in a trace."""
    return varint(len(message)) + message


def check_range(name: str, kind: str, value: int) -> None:
    """Raise unless an integer fits its kind."""
    bits = int(kind[-2:])
    unsigned = kind.startswith(("uint", "fixed"))
    low, high = (0, 1 << bits) if unsigned else (-(1 << bits - 1), 1 << bits - 1)
    if not low <= value < high:
        raise TraceError(f"attribute {name!r} holds {value}, which is no {kind}: choose a wider member")


def encode_scalar(name: str, kind: str, value: Scalar, width: int | None = None) -> bytes:
    """Return the bytes of one value behind its tag; `width` counts them all."""
    if (kind == "string" and isinstance(value, str)) or (kind == "bytes" and isinstance(value, bytes)):
        content = value.encode() if isinstance(value, str) else value
        length = varint(len(content), None if width is None else width - len(content))
        assert len(length) <= 5, f"a length of {len(length)} bytes is too long for protobuf"
        return length + content
    if isinstance(value, (str, bytes)) or (isinstance(value, float) and kind not in ("double", "float")):
        raise TraceError(f"attribute {name!r} holds {value!r}, which is no {kind}: choose another member")
    if kind in ("double", "float"):
        try:
            return struct.pack(FORMATS[kind], value)
        except OverflowError as err:
            raise TraceError(
                f"attribute {name!r} holds {value}, too large for a {kind}: use a double"
            ) from err
    if kind == "bool":
        return varint(bool(value), width)
    whole = int(value)
    check_range(name, kind, whole)
    if kind in FORMATS:
        return struct.pack(FORMATS[kind], whole)
    if kind in ("sint32", "sint64"):
        whole = whole << 1 ^ whole >> 63
    return varint(whole & (1 << 64) - 1, width)


def encode_list(name: str, kind: str, values: Iterable[Scalar]) -> bytes:
    """Return the list message of these values; numbers are packed."""
    parts = [encode_scalar(name, kind, value) for value in values]
    if wire_type(kind) == LENGTH:
        return b"".join(tag(1, LENGTH) + part for part in parts)
    return delimited(1, b"".join(parts)) if parts else b""


def encode_value(name: str, member: str, value: Value, width: int | None = None) -> bytes:
    """Return the field of the oneof that holds a value, tag included."""
    kind = member.rpartition("_")[0]
    if member == "":
        return b""
    if member in SCALARS and isinstance(value, (int, float, str, bytes)):
        return tag(SCALARS[member], wire_type(kind)) + encode_scalar(name, kind, value, width)
    if member in LISTS and isinstance(value, tuple):
        assert width is None, "a list has no width"
        return delimited(LISTS[member], encode_list(name, kind, value))
    known = ", ".join([*SCALARS, *LISTS])
    raise TraceError(f"attribute {name!r} holds {value!r} in member {member!r}: members are {known}")


def attribute(name: str, member: str, value: Value, width: int | None = None, doc_string: str = "") -> bytes:
    """Return one AttributeProto as a field of a node, tag and length included.

    `width` is the number of bytes of a varint value or, of a string or bytes value, of its length and
    content together (a length takes 1 to 5 bytes). So values of one width give attributes of one length:

    >>> attribute("comm_tag", "int32_val", 5, width=5).hex()
    '52100a08636f6d6d5f746167388580808000'
    >>> {len(attribute("pg_name", "string_val", name, width=6)) for name in ("7", "12", "2048")}
    {19}
    """
    return delimited(10, encode_attribute(name, Attribute(member, value, doc_string), width))


def encode_attribute(name: str, value: Attribute, width: int | None = None) -> bytes:
    """Return the AttributeProto message of one attribute."""
    text = delimited(1, name.encode()) if name else b""
    doc = delimited(2, value.doc_string.encode()) if value.doc_string else b""
    return text + doc + encode_value(name, value.member, value.value, width)


def encode_io(number: int, io: IOInfo) -> bytes:
    """Return inputs or outputs as a field of a node; nothing for empty ones."""
    texts = (io.values, io.shapes, io.types)
    content = b"".join(delimited(at, text.encode()) for at, text in enumerate(texts, 1) if text)
    return delimited(number, content) if content else b""


def encode_number(number: int, value: int) -> bytes:
    """Return a varint field; nothing for a zero, as proto3 has it."""
    return tag(number, VARINT) + varint(value & (1 << 64) - 1) if value else b""


def encode_packed(number: int, values: Iterable[int]) -> bytes:
    """Return a packed field of varints; nothing for none."""
    content = b"".join(map(varint, values))
    return delimited(number, content) if content else b""


def encode_node(node: TraceNode) -> bytes:
    """Return the Node message, fields in the order of their numbers."""
    return b"".join(
        (
            encode_number(1, node.id),
            delimited(2, node.name.encode()) if node.name else b"",
            encode_number(3, node.type),
            encode_packed(4, node.ctrl_deps),
            encode_packed(5, node.data_deps),
            encode_number(6, node.start_time_micros),
            encode_number(7, node.duration_micros),
            encode_io(8, node.inputs),
            encode_io(9, node.outputs),
            *(delimited(10, encode_attribute(name, value)) for name, value in node.attrs.items()),
        )
    )


def encode_metadata(version: str, attrs: Mapping[str, Attribute] | None = None) -> bytes:
    """Return the GlobalMetadata message that opens a trace.

    >>> frame(encode_metadata("1.0.0")).hex()
    '070a05312e302e30'
    """
    content = delimited(1, version.encode()) if version else b""
    return content + b"".join(
        delimited(2, encode_attribute(name, value)) for name, value in (attrs or {}).items()
    )
