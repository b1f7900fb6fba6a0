"""Byte images: a template encoded once, then copied for every instance and patched in place.

Every field that differs between instances (ids, dependencies, layer, micro-batch, tag) or between ranks (group names,
peers) has a fixed width: varints are padded, a string's length is padded to make up for its digits, and numbers in
names have leading zeros. Parsers accept all of these, and so the work for a rank is a copy of bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stage.trace.node import CommType, NodeType
from stage.trace.peer import OWN, Peer
from stage.trace.program import PIPELINE_PHASES
from stage.trace.template import EARLIER, Ref, Template, TemplateNode
from stage.trace.wire import attribute as encode_attribute
from stage.trace.wire import varint

__all__ = ["Image", "NameStyle", "Pattern", "Widths", "encode_template", "put_varints"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Pattern = tuple[tuple[int, int] | None, ...]

COLLECTIVE_TYPES = {
    "all_reduce": CommType.ALL_REDUCE,
    "all_gather": CommType.ALL_GATHER,
    "all_to_all": CommType.ALL_TO_ALL,
    "reduce_scatter": CommType.REDUCE_SCATTER,
    "permute": CommType.ALL_TO_ALL,
}
"""How the schema says each collective. It has no permute; libraries run one as an all-to-all of uneven parts."""
attribute = lru_cache(maxsize=4096)(encode_attribute)  # most nodes share most of their attributes
TAG_WIDTH = 5
PEER_WIDTH = 3
LAYER_WIDTH = 2
MICRO_BATCH_WIDTH = 3
CHUNK_WIDTH = 1
STEP_WIDTH = 2
PHASE_WIDTH = 9
"""Bytes of a phase of the pipeline with its length before it, padded where the phase is shorter than others."""

SOURCES = ("self", *EARLIER)
"""What an id is counted from: the base of the instance itself or of an earlier one; ports come after these."""


@dataclass(frozen=True, slots=True)
class NameStyle:
    """How many digits layers, micro-batches and steps have in names (0: not named)."""

    layer: int
    micro_batch: int
    step: int


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an id, and of the group name of each set of axes."""

    ids: int
    groups: dict[tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded template and where it is patched.

    `ids` has a row (position, source, offset) for each id and dependency; a source is a place in `SOURCES`, or after
    these a port. `fields` maps `layer micro_batch chunk step tag` to positions of varints, `pipeline_phase` to those of
    a text and its length, and `digits` numbers of names to positions of text, of as many digits as `counts` has. `tags`
    says for each position of a tag how much it is more than the instance's.
    `groups` maps axes to the positions of their names, `peers` a peer (`OWN` is the rank itself) to those of its
    number.
    """

    data: Bytes
    ids: Ints
    fields: dict[str, Ints]
    digits: dict[str, Ints]
    counts: dict[str, int]
    groups: dict[tuple[str, ...], Ints]
    peers: dict[Peer, Ints]
    id_width: int
    tags: Ints


class _Encoder:
    """One template on its way to an image."""

    def __init__(self, template: Template, style: NameStyle, widths: Widths) -> None:
        self.template, self.style, self.widths = template, style, widths
        self.out = bytearray()
        self.ids: list[tuple[int, int, int]] = []
        self.fields: dict[str, list[int]] = {}
        self.tags: list[int] = []
        self.digits: dict[str, list[int]] = {}
        self.counts = {
            "layer": style.layer, "micro_batch": style.micro_batch, "step": style.step, "bucket": template.digits
        }  # fmt: skip
        self.groups: dict[tuple[str, ...], list[int]] = {}
        self.peers: dict[Peer, list[int]] = {}
        self.marks: list[tuple[int, object]] = []

    def node(self, index: int, node: TemplateNode, deps: Sequence[tuple[int, int]]) -> None:
        message = bytearray()
        marks: list[tuple[str, object, int]] = []
        width = self.widths.ids
        message += b"\x08"
        marks.append(("id", (0, index), len(message)))
        message += bytes(width)
        name = self._name(node, marks, len(message))
        message += name
        message += b"\x18" + varint(_node_type(node))
        if deps:
            message += b"\x2a" + varint(width * len(deps))
            for dep in deps:
                marks.append(("id", dep, len(message)))
                message += bytes(width)
        for attr, mark in self._attributes(node):
            message += attr
            if mark is not None:
                kind, key, back = mark
                marks.append((kind, key, len(message) - back))
        self.out += varint(len(message))
        start = len(self.out)
        self.out += message
        for kind, key, at in marks:
            self._mark(kind, key, start + at)

    def _mark(self, kind: str, key: object, at: int) -> None:
        if kind == "id":
            assert isinstance(key, tuple)
            self.ids.append((at, key[0], key[1]))
        elif kind in ("field", "digit"):
            (self.fields if kind == "field" else self.digits).setdefault(str(key), []).append(at)
        elif kind == "tag":
            assert isinstance(key, int)
            self.fields.setdefault("tag", []).append(at)
            self.tags.append(key)
        elif kind == "group":
            assert isinstance(key, tuple)
            self.groups.setdefault(key, []).append(at)
        else:
            assert isinstance(key, Peer)
            self.peers.setdefault(key, []).append(at)

    def _name(self, node: TemplateNode, marks: list[tuple[str, object, int]], start: int) -> bytes:
        """`layer07.attn.q_proj/forward/mb003`, with `/step1` where there are several."""
        text = self.template.block
        places: list[tuple[str, int]] = []
        for number in ("layer", "bucket"):
            if number in self._numbers():
                places.append((number, len(text)))
                text += "0" * self.counts[number]
        text += f".{node.name}/{node.phase}"
        named = {"micro_batch": "/mb" if "micro_batch" in self._numbers() else "", "step": "/step"}
        for number, prefix in named.items():
            if prefix and self.counts[number]:
                text += prefix
                places.append((number, len(text)))
                text += "0" * self.counts[number]
        raw = text.encode()
        head = b"\x12" + varint(len(raw))
        marks += [("digit", key, start + len(head) + at) for key, at in places]
        return head + raw

    def _numbers(self) -> tuple[str, ...]:
        return self.template.numbers

    def _attributes(self, node: TemplateNode) -> list[tuple[bytes, tuple[str, object, int] | None]]:
        found: list[tuple[bytes, tuple[str, object, int] | None]] = [
            (attribute("is_cpu_op", "bool_val", False), None)
        ]
        if node.is_compute:
            found.append((attribute("num_ops", "int64_val", node.flops), None))
            found.append((attribute("tensor_size", "uint64_val", node.bytes), None))
        elif node.kind in COLLECTIVE_TYPES:
            width = self.widths.groups[node.axes]
            found.append((attribute("comm_type", "int64_val", int(COLLECTIVE_TYPES[node.kind])), None))
            found.append((attribute("comm_size", "int64_val", node.bytes), None))
            name = attribute("pg_name", "string_val", "0" * max(1, width - 5), width=width)
            found.append((name, ("group", node.axes, width)))
            found.append((attribute("axes", "string_val", " ".join(node.axes)), None))
            splits = {"in_splits": node.in_splits, "out_splits": node.out_splits}
            found += [(attribute(key, "int64_list", sizes), None) for key, sizes in splits.items() if sizes]
        else:
            found.append((attribute("comm_size", "int64_val", node.bytes), None))
            assert node.peer is not None, f"{node.name} goes nowhere"
            ends = (OWN, node.peer) if node.kind == "send" else (node.peer, OWN)
            for key, peer in zip(("comm_src", "comm_dst"), ends, strict=True):
                found.append((attribute(key, "int32_val", 0, width=PEER_WIDTH), ("peer", peer, PEER_WIDTH)))
            found.append(
                (attribute("comm_tag", "int32_val", 0, width=TAG_WIDTH), ("tag", node.tag_offset, TAG_WIDTH))
            )
            if node.axes:
                found.append((attribute("axes", "string_val", " ".join(node.axes)), None))
        texts = (*_texts(node), ("part", self.template.part))
        found += [(attribute(k, "string_val", v), None) for k, v in texts if v]
        if "pipeline_phase" in self._numbers():
            phase = attribute("pipeline_phase", "string_val", PIPELINE_PHASES[-1], width=PHASE_WIDTH)
            found.append((phase, ("field", "pipeline_phase", PHASE_WIDTH)))
        widths = {"layer": LAYER_WIDTH, "micro_batch": MICRO_BATCH_WIDTH, "chunk": CHUNK_WIDTH}
        for key in (number for number in self._numbers() if number in widths):
            found.append((attribute(key, "int32_val", 0, width=widths[key]), ("field", key, widths[key])))
        if self.style.step:
            found.append((attribute("step", "int32_val", 0, width=STEP_WIDTH), ("field", "step", STEP_WIDTH)))
        return found

    def image(self) -> Image:
        def at(positions: dict[object, list[int]]) -> dict[object, Ints]:
            return {key: np.array(value, np.int64) for key, value in positions.items()}

        return Image(
            np.frombuffer(bytes(self.out), np.uint8),
            np.array(self.ids, np.int64).reshape(-1, 3),
            at(self.fields),  # type: ignore[arg-type]
            at(self.digits),  # type: ignore[arg-type]
            self.counts,
            at(self.groups),  # type: ignore[arg-type]
            at(self.peers),  # type: ignore[arg-type]
            self.widths.ids,
            np.array(self.tags, np.int64),
        )


def _texts(node: TemplateNode) -> tuple[tuple[str, str], ...]:
    return (
        ("op", node.op),
        ("phase", node.phase),
        ("dtype", node.dtype),
        ("shapes", node.shapes),
        ("stream", node.stream),
    )


def _node_type(node: TemplateNode) -> NodeType:
    special = {"compute": NodeType.COMP, "send": NodeType.COMM_SEND, "recv": NodeType.COMM_RECV}
    return special.get(node.kind, NodeType.COMM_COLL)


def resolve_deps(template: Template, pattern: Pattern) -> list[list[tuple[int, int]]]:
    """The dependencies of each node as (source, offset), each once; `pattern` says what each port is."""
    port = dict(zip(template.ports, pattern, strict=True))
    resolved = []
    for node in template.nodes:
        deps: dict[tuple[int, int], None] = {}
        for ref in node.deps:
            found = port[str(ref.target)] if ref.kind == "port" else _source(ref)
            if found is not None:
                deps[found] = None
        resolved.append(list(deps))
    return resolved


def _source(ref: Ref) -> tuple[int, int]:
    return (SOURCES.index(ref.kind), int(ref.target))


def encode_template(template: Template, pattern: Pattern, style: NameStyle, widths: Widths) -> Image:
    """The image of a template whose ports are connected as `pattern` says.

    An entry of the pattern is None for a port that is connected to nothing, else (source, offset): the id of the port
    itself, or where the port is node j of an earlier instance, that source and j.
    """
    encoder = _Encoder(template, style, widths)
    for i, (node, deps) in enumerate(zip(template.nodes, resolve_deps(template, pattern), strict=True)):
        encoder.node(i, node, deps)
    return encoder.image()


def put_varints(rows: Bytes, positions: Ints, values: Ints, width: int) -> None:
    """Write `values` (rows x positions, or one column to be broadcast) as padded varints into every row."""
    for k in range(width):
        part = (values >> (7 * k)) & 0x7F
        rows[:, positions + k] = part | (0x80 if k < width - 1 else 0)
