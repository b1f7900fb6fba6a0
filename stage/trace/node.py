"""The parts of a Chakra trace as plain values: nodes, attributes, metadata.

A trace says what one device does. It is a list of nodes; a node names its predecessors by id and carries
attributes. An attribute is a value *and* the member of the protobuf oneof it stands in, because consumers
read one fixed member for each attribute and take any other for a zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = [
    "LISTS",
    "SCALARS",
    "VERSIONS",
    "Attribute",
    "CommType",
    "IOInfo",
    "Metadata",
    "NodeType",
    "Scalar",
    "TraceNode",
    "Value",
]

Scalar = int | float | bool | str | bytes
Value = Scalar | tuple[Scalar, ...] | None

VERSIONS = ("0.0.4", "1.0.0")
"""Schema versions that are written; the messages of both are the same."""

KINDS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)

SCALARS: Mapping[str, int] = {f"{kind}_val": 3 + 2 * position for position, kind in enumerate(KINDS)}
"""Scalar members of the attribute oneof and their field numbers."""

LISTS: Mapping[str, int] = {f"{kind}_list": 4 + 2 * position for position, kind in enumerate(KINDS)}
"""List members of the attribute oneof and their field numbers."""


class NodeType(IntEnum):
    """What a node does, numbered as in the schema."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CommType(IntEnum):
    """Which collective a COMM_COLL node runs, numbered as in the schema."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute: the oneof member it stands in and its value.

    >>> Attribute("int64_val", 4096)
    Attribute(member='int64_val', value=4096, doc_string='')

    Invariants: a `_list` member has a tuple as value; an attribute without a value has member "" and None.
    """

    member: str
    value: Value
    doc_string: str = ""

    def __post_init__(self) -> None:
        assert isinstance(self.value, tuple) == self.member.endswith("_list"), self.member
        assert (self.value is None) == (self.member == ""), self.member


@dataclass(frozen=True, slots=True)
class IOInfo:
    """Inputs or outputs of a node as the schema has them: three texts, usually JSON lists."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The first message of a trace: its schema version and attributes of the whole trace."""

    version: str
    attrs: Mapping[str, Attribute] = field(default_factory=dict)


NO_IO = IOInfo()


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One node of a trace.

    >>> node = TraceNode(7, "matmul", NodeType.COMP, (3,), attrs={"num_ops": Attribute("int64_val", 1024)})
    >>> node.get("num_ops"), node.get("tensor_size", 0)
    (1024, 0)

    `type` is a plain int, because a file may hold a number the schema does not know. `repeated` names the
    attributes that stood in the file more than once; `attrs` has the last value of each, as protobuf has it.
    """

    id: int
    name: str
    type: int
    data_deps: tuple[int, ...] = ()
    ctrl_deps: tuple[int, ...] = ()
    start_time_micros: int = 0
    duration_micros: int = 0
    inputs: IOInfo = NO_IO
    outputs: IOInfo = NO_IO
    attrs: Mapping[str, Attribute] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()

    def get(self, name: str, default: Value = None) -> Value:
        """Return the plain value of an attribute, or `default` when the node does not have it."""
        found = self.attrs.get(name)
        return default if found is None else found.value
