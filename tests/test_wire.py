"""The wire format against the schema's official Python module, and on bytes nobody should have written."""

import contextlib
import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.errors import TraceError
from stage.trace import wire
from stage.trace.node import LISTS, SCALARS, Attribute, IOInfo, Metadata, NodeType, TraceNode

schema: Any = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
IDS = st.integers(0, 2**64 - 1)


def integers(bits: int, signed: bool) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False, width=32),
    "bool": st.booleans(),
    "string": TEXT,
    "bytes": st.binary(max_size=12),
} | {
    f"{prefix}{bits}": integers(bits, prefix not in ("uint", "fixed"))
    for prefix in ("int", "uint", "sint", "fixed", "sfixed")
    for bits in (32, 64)
}


def attributes() -> st.SearchStrategy[Attribute]:
    scalars = [st.builds(Attribute, st.just(f"{kind}_val"), values, TEXT) for kind, values in KINDS.items()]
    lists = [
        st.builds(Attribute, st.just(f"{kind}_list"), st.lists(values, max_size=4).map(tuple), TEXT)
        for kind, values in KINDS.items()
    ]
    return st.one_of(*scalars, *lists, st.just(Attribute("", None)))


NODES = st.builds(
    TraceNode,
    id=IDS,
    name=TEXT,
    type=st.sampled_from([int(kind) for kind in NodeType]),
    data_deps=st.lists(IDS, max_size=4).map(tuple),
    ctrl_deps=st.lists(IDS, max_size=4).map(tuple),
    start_time_micros=IDS,
    duration_micros=IDS,
    inputs=st.builds(IOInfo, TEXT, TEXT, TEXT),
    outputs=st.builds(IOInfo, TEXT, TEXT, TEXT),
    attrs=st.dictionaries(TEXT, attributes(), max_size=4),
)


def official(node: TraceNode) -> Any:
    """The same node as a message of the official module."""
    message = schema.Node(
        id=node.id,
        name=node.name,
        type=node.type,
        data_deps=node.data_deps,
        ctrl_deps=node.ctrl_deps,
        start_time_micros=node.start_time_micros,
        duration_micros=node.duration_micros,
    )
    for target, io in ((message.inputs, node.inputs), (message.outputs, node.outputs)):
        target.values, target.shapes, target.types = io.values, io.shapes, io.types
    for name, attribute in node.attrs.items():
        into = message.attr.add(name=name, doc_string=attribute.doc_string)
        if isinstance(attribute.value, tuple):
            getattr(into, attribute.member).SetInParent()
            getattr(into, attribute.member).values.extend(attribute.value)
        elif attribute.member:
            setattr(into, attribute.member, attribute.value)
    return message


def decode(*messages: bytes) -> list[TraceNode]:
    """Nodes of a trace with these messages behind its metadata."""
    return list(wire.read_trace(b"".join(map(wire.frame, (wire.encode_metadata("1.0.0"), *messages))))[1])


@settings(max_examples=300, deadline=None)
@given(NODES)
def test_node_round_trips_through_official_module(node: TraceNode) -> None:
    ours = wire.encode_node(node)
    parsed = schema.Node.FromString(ours)
    if not any(io.values or io.shapes or io.types for io in (node.inputs, node.outputs)):
        parsed.inputs.SetInParent()
        parsed.outputs.SetInParent()
    theirs = official(node)
    assert schema.Node.FromString(ours).attr == theirs.attr
    assert (parsed.id, parsed.name, parsed.type) == (node.id, node.name, node.type)
    assert decode(theirs.SerializeToString()) == decode(ours) == [node]


@pytest.mark.parametrize("member", [*SCALARS, *LISTS])
def test_member_numbers_are_those_of_the_schema(member: str) -> None:
    assert schema.AttributeProto.DESCRIPTOR.fields_by_name[member].number == {**SCALARS, **LISTS}[member]


def test_enumerations_are_those_of_the_schema() -> None:
    names = {number: name.removesuffix("_NODE") for name, number in schema.NodeType.items()}
    assert {int(kind): kind.name for kind in NodeType} == names


def test_metadata_round_trips() -> None:
    attrs = {"schema": Attribute("string_val", "x"), "sizes": Attribute("int64_list", (1, -2))}
    message = wire.encode_metadata("0.0.4", attrs)
    assert schema.GlobalMetadata.FromString(message).version == "0.0.4"
    assert wire.read_trace(wire.frame(message))[0] == Metadata("0.0.4", attrs)


@pytest.mark.parametrize(
    ("member", "values", "width"),
    [
        ("int32_val", [0, 1, 2**31 - 1], 5),
        ("int64_val", [0, 300, 2**62, -1], 10),
        ("uint64_val", [0, 2**64 - 1], 10),
        ("sint32_val", [-(2**31), 0], 5),
        ("bool_val", [False, True], 1),
        ("string_val", ["1", "2048"], 6),
        ("bytes_val", [b"ab", b"abcd"], 7),
    ],
)
def test_padded_values_have_one_length_and_parse(member: str, values: list[Any], width: int) -> None:
    encoded = [wire.attribute("x", member, value, width) for value in values]
    assert len({len(item) for item in encoded}) == 1
    for value, item in zip(values, encoded, strict=True):
        assert getattr(schema.Node.FromString(item).attr[0], member) == value
        assert decode(item)[0].attrs["x"] == Attribute(member, value)


def test_unpacked_and_split_dependencies_are_read() -> None:
    message = b"\x28\x05" + b"\x2a\x02\x06\x07" + b"\x20\x01" + b"\x28" + wire.varint(8, 4)
    assert list(schema.Node.FromString(message).data_deps) == [5, 6, 7, 8]
    assert decode(message)[0].data_deps == (5, 6, 7, 8)
    assert decode(message)[0].ctrl_deps == (1,)


def test_unpacked_list_values_are_read_and_parts_of_a_list_merge() -> None:
    part = b"\x08\x05\x08\x06"
    message = wire.delimited(10, wire.delimited(10, part) + wire.delimited(10, b"\x0a\x01\x07"))
    assert list(schema.Node.FromString(message).attr[0].int64_list.values) == [5, 6, 7]
    assert decode(message)[0].attrs[""] == Attribute("int64_list", (5, 6, 7))
    floats = wire.delimited(10, wire.delimited(4, b"\x09" + struct.pack("<d", math.pi)))
    assert decode(floats)[0].attrs[""] == Attribute("double_list", (math.pi,))


def test_last_member_of_the_oneof_wins() -> None:
    body = wire.encode_value("a", "int64_val", 5) + wire.encode_value("a", "string_val", "x")
    assert schema.AttributeProto.FromString(body).WhichOneof("value") == "string_val"
    assert decode(wire.delimited(10, body))[0].attrs[""] == Attribute("string_val", "x")


def test_repeated_attribute_is_named_and_its_last_value_kept() -> None:
    node = decode(wire.attribute("a", "int64_val", 1) + wire.attribute("a", "int64_val", 2))[0]
    assert (node.repeated, node.get("a"), node.get("b", 7)) == (("a",), 2, 7)


@pytest.mark.parametrize(
    "unknown",
    [
        b"\x58\x80\x80\x01",
        b"\x59" + bytes(8),
        b"\x5d" + bytes(4),
        b"\x5a\x03abc",
        b"\x5b\x08\x01\x63\x08\x01\x64\x5c",
    ],
    ids=["varint", "fixed64", "fixed32", "length", "nested groups"],
)
def test_unknown_fields_are_skipped(unknown: bytes) -> None:
    message = b"\x08\x07" + unknown + b"\x12\x01n"
    assert schema.Node.FromString(message).name == "n"
    assert decode(message) == [TraceNode(7, "n", 0)]
    inside = wire.delimited(10, b"\x0a\x01k" + unknown[:0] + b"\xc8\x02\x05" + b"\x48\x04")
    assert decode(inside)[0].attrs == {"k": Attribute("int64_val", 4)}


def test_long_and_padded_tags_are_read() -> None:
    assert decode(b"\x88\x00\x07" + b"\xd2\x80\x00\x00")[0] == TraceNode(
        7, "", 0, attrs={"": Attribute("", None)}
    )


# 9 bytes of frame and metadata stand in front of the message, then its own length: it starts at byte 9.
BROKEN = {
    "id is a text": (b"\x0a\x01a", "byte 9: field 1 of the message here has wire type 2, not 0"),
    "name is a number": (b"\x10\x01", "byte 9: field 2 of the message here has wire type 0, not 2"),
    "attr is fixed": (b"\x55" + bytes(4), "byte 9: field 10 of the message here has wire type 5, not 2"),
    "field number 0": (b"\x00\x01", "byte 9: field number 0 does not exist in protobuf"),
    "field number 0, length": (b"\x02\x01\x00", "byte 9: field number 0 does not exist in protobuf"),
    "wire type 7": (b"\x5f", "byte 9: wire type 7 of field 11 is not possible here"),
    "group end alone": (b"\x5c", "byte 9: wire type 4 of field 11 is not possible here"),
    "group not closed": (b"\x5b\x08\x01", "byte 9: a group is not closed"),
    "group closed wrongly": (b"\x5b\x64", "byte 10: group 12 ends here but was not the one opened last"),
    "groups too deep": (b"\x5b" * 200, "byte 110: groups are nested deeper than 100"),
    "varint unfinished": (b"\x08\x80", "byte 10: the message ends inside a varint"),
    "varint absent": (b"\x08", "byte 10: the message ends inside a varint"),
    "varint of 11 bytes": (b"\x08" + b"\x80" * 10 + b"\x00", "byte 10: a varint is longer than 10 bytes"),
    "varint of 70 bits": (b"\x08" + b"\xff" * 9 + b"\x7f", "byte 10: a varint holds more than 64 bits"),
    "name too long": (
        b"\x12\x05ab",
        "byte 10: a field of 5 bytes starts here but its message has only 2 left",
    ),
    "huge name": (
        b"\x12\xff\xff\xff\xff\x7f",
        "byte 10: a field of 34359738367 bytes starts here but its message has only 0 left",
    ),
    "length absent": (b"\x12", "byte 10: the message ends inside a varint"),
    "name not UTF-8": (b"\x12\x02a\xff", "byte 12: a text is not UTF-8"),
    "dependency unfinished": (b"\x2a\x02\x01\x80", "byte 12: the message ends inside a varint"),
    "fixed field unfinished": (b"\x5d\x00", "byte 9: the message ends inside field 11"),
    "attribute value in wrong wire type": (
        wire.delimited(10, b"\x4a\x01a"),
        "byte 11: field 9 of the message here has wire type 2, not 0",
    ),
    "attribute runs into the next message": (
        b"\x52\x09\x0a\x01a",
        "byte 10: a field of 9 bytes starts here but its message has only 3 left",
    ),
    "attribute without length": (b"\x52", "byte 9: the message ends inside an attribute"),
    "attribute name not UTF-8": (wire.delimited(10, b"\x0a\x01\x80"), "byte 13: a text is not UTF-8"),
    "attribute longer than its message": (
        wire.delimited(10, b"\x0a\x09a"),
        "byte 12: a field of 9 bytes starts here but its message has only 1 left",
    ),
    "doubles cut": (
        wire.delimited(10, wire.delimited(4, wire.delimited(1, b"abc"))),
        "byte 15: 3 bytes do not hold whole double values",
    ),
    "text as list of numbers": (
        wire.delimited(10, wire.delimited(10, b"\x0d" + bytes(4))),
        "byte 13: the values of a int64 list have wire type 5",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_node_is_an_error_that_names_the_byte(name: str) -> None:
    message, text = BROKEN[name]
    with pytest.raises(TraceError) as caught:
        decode(message)
    assert str(caught.value) == f"{text}; the file is damaged or no Chakra trace: write it again"


def test_truncated_trace_names_the_message_that_is_cut() -> None:
    whole = wire.frame(wire.encode_metadata("1.0.0")) + wire.frame(wire.encode_node(TraceNode(1, "node", 4)))
    for size in range(1, len(whole)):
        if size == 8:
            continue  # metadata alone is a trace without nodes
        with pytest.raises(TraceError, match=f"^byte {0 if size < 8 else 8}: "):
            list(wire.read_trace(whole[:size])[1])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the trace is empty: write it again"),
        (
            b"\x1f\x8b\x08\x00rest",
            "the trace is compressed with gzip: unpack it first, no consumer reads it so",
        ),
        (
            b"\xff\xff\xff\xff\x0f",
            "byte 0: a message of 4294967295 bytes starts here but only 0 bytes follow",
        ),
        (b"\x80\x80\x80\x80\x80\x01", "byte 0: a varint is longer than 5 bytes"),
        (
            wire.frame(wire.encode_node(TraceNode(1, "a", 4))),
            "byte 1: field 1 of the message here has wire type 0",
        ),
    ],
    ids=["empty", "gzip", "absurd length", "length of six bytes", "no metadata"],
)
def test_file_that_is_no_trace_is_an_error(data: bytes, text: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(wire.read_trace(data)[1])
    assert str(caught.value).startswith(text)


def test_known_attribute_that_runs_into_the_next_message_is_an_error() -> None:
    whole = wire.attribute("a", "int64_val", 1)
    cut = wire.encode_node(TraceNode(1, "", 4)) + whole[:4]
    nodes = wire.read_trace(wire.frame(b"") + wire.frame(whole) + bytes([len(cut)]) + cut + whole[4:])[1]
    with pytest.raises(TraceError, match="the message ends inside an attribute"):
        list(nodes)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_trace_errors(data: bytes) -> None:
    with contextlib.suppress(TraceError):
        list(wire.read_trace(data)[1])


@settings(max_examples=500, deadline=None)
@given(NODES, st.data())
def test_flipped_bytes_raise_nothing_but_trace_errors(node: TraceNode, data: st.DataObject) -> None:
    message = bytearray(wire.encode_node(node))
    for _ in range(data.draw(st.integers(1, 3))):
        if message:
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(message))
    except TraceError:
        return
    assert schema.Node.FromString(bytes(message)).id == found[0].id, "we accept only what protobuf accepts"


@pytest.mark.parametrize(
    ("member", "value", "text"),
    [
        ("int32_val", 2**31, "attribute 'a' holds 2147483648, which is no int32: choose a wider member"),
        ("uint64_val", -1, "attribute 'a' holds -1, which is no uint64: choose a wider member"),
        ("float_val", 1e300, "attribute 'a' holds 1e+300, too large for a float: use a double"),
        ("int64_val", 1.5, "attribute 'a' holds 1.5, which is no int64: choose another member"),
        ("bytes_val", "x", "attribute 'a' holds 'x', which is no bytes: choose another member"),
    ],
)
def test_value_that_does_not_fit_its_member_is_an_error(member: str, value: Any, text: str) -> None:
    with pytest.raises(TraceError) as caught:
        wire.attribute("a", member, value)
    assert str(caught.value) == text


def test_unknown_member_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(TraceError, match="in member 'int_val': members are double_val, float_val, int32_val"):
        wire.attribute("a", "int_val", 1)
