"""Bytes of a trace that nobody reads, whatever they hold: values of attributes and fields that have no meaning.

An attribute that a node may lack, such as the rank itself in a message, is lacking where its name is another one. What
stands there is then a value like that of any unknown attribute, and it does no harm if ranks differ in it.
"""

from collections.abc import Iterator
from typing import Final

from stage.trace.decode import decode_attribute, decode_node
from stage.trace.node import SCALARS
from stage.trace.protobuf import FORMATS, LENGTH, VARINT, read_length, read_varint, skip_field
from stage.trace.verify_node import ATTRIBUTES

__all__ = ["is_unread"]

ATTRIBUTE: Final = 10
OTHERS: Final = {8: 3, 9: 3}
"""Fields of a node that are messages, inputs and outputs, with the last number of a field that these have."""
VALUES: Final = {number: member.removesuffix("_val") for member, number in SCALARS.items()}
LAST_OF_ATTRIBUTE: Final = 32

Bounds = tuple[int, int]


def is_unread(data: bytes, node: Bounds, place: Bounds) -> bool:
    """Whether bytes of a node are an unknown field, or the whole value of an attribute that means nothing there.

    `place` is what each rank sets to a padded varint or to a text with its length. Malformed bytes are a `TraceError`.
    """
    for number, wire, start, stop in _fields(data, *node):
        if start <= place[0] and place[1] <= stop:
            if number > ATTRIBUTE:
                return _skips(data, wire, (start, stop), place)
            if wire != LENGTH or number not in (ATTRIBUTE, *OTHERS):
                return False
            inner = read_length(data, start, node[1])
            last = OTHERS.get(number, LAST_OF_ATTRIBUTE)
            return _is_unread_within(data, inner, place, last) or (
                number == ATTRIBUTE and _has_no_meaning(data, node, inner, place)
            )
    return False


def _is_unread_within(data: bytes, message: Bounds, place: Bounds, last: int) -> bool:
    """Whether bytes are in a field of a message that is beyond its last one."""
    return any(
        number > last and _skips(data, wire, (start, stop), place)
        for number, wire, start, stop in _fields(data, *message)
    )


def _has_no_meaning(data: bytes, node: Bounds, attribute: Bounds, place: Bounds) -> bool:
    """Whether bytes are the whole value of an attribute that is not one of those of the node's type."""
    kind = decode_node(data, *node, {}).type
    if decode_attribute(data, *attribute)[0] in ATTRIBUTES.get(kind, {}):
        return False
    return any(
        (start, stop) == place and number in VALUES and VALUES[number] not in FORMATS
        for number, _, start, stop in _fields(data, *attribute)
    )


def _skips(data: bytes, wire: int, field: Bounds, place: Bounds) -> bool:
    """Whether a reader that skips a field skips these bytes of it with the rest, whatever they are."""
    if wire == VARINT:
        return field == place
    return wire == LENGTH and read_length(data, *field)[0] <= place[0] and place[1] <= field[1]


def _fields(data: bytes, pos: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type and bounds of each field, from behind its tag on."""
    while pos < end:
        tag, start = read_varint(data, pos, end, 5)
        stop = skip_field(data, pos, end)[1]
        yield tag >> 3, tag & 7, start, stop
        pos = stop
