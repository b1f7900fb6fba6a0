"""Events: the collectives and messages of one rank in order of issue, recorded or synthesized.

Records are normalised so that both sides speak of the same things: groups of one rank are dropped, `_coalesced` and
`(list)` variants are the plain collective, and bytes are those of the local input of an op (of the buffer for a
receive), which is also what a trace's `comm_size` holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stage.trace.node import NodeType, TraceNode

__all__ = ["Event", "RecordError", "mark", "recorded", "synthesized"]

PHASES = {
    "fwd": "forward",
    "loss": "forward",
    "bwd": "backward",
    "recompute": "backward",
    "finalize": "finalize",
    "optimizer": "optimizer",
    "optim": "optimizer",
    "clip": "optimizer",
    "clip_grad_norm": "optimizer",
    "sched": "pipeline",
}
"""Phases of records and of traces that have another name here."""

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
OPS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "permute", "recv", "reduce_scatter", "send")


class RecordError(Exception):
    """A file that is no record of a known format: one line that says why."""


@dataclass(frozen=True, slots=True)
class Event:
    """One collective (`group` holds its ranks), message (`group` holds the peer) or compute mark.

    Two events are equal if phase, op, group, bytes and dtype are. `name`, `micro_batch` and `details` (fields of a
    record that no comparison reads, but explanations do) only describe it.
    """

    phase: str
    op: str
    group: tuple[int, ...]
    bytes: int
    dtype: str
    name: str = field(default="", compare=False)
    micro_batch: int = field(default=-1, compare=False)
    details: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)

    def __str__(self) -> str:
        if self.op in ("F", "B"):
            return f"-- {self.op}{self.bytes}"
        where = f"rank {self.group[0]}" if self.op in ("send", "recv") else " ".join(map(str, self.group))
        return f"{self.phase:<9} {self.op} [{where}] {self.bytes} bytes {self.dtype}"


def mark(kind: str, micro_batch: int) -> Event:
    """The mark at which the forward (`F`) or backward (`B`) of a micro-batch begins."""
    return Event("", kind, (), micro_batch, "", micro_batch=micro_batch)


def recorded(ops: Sequence[Mapping[str, Any]]) -> list[Event]:
    """The events of a list of recorded ops, normalised; marks that are no compute are left out."""
    events = []
    for op in ops:
        if "mark" in op:
            events += _recorded_mark(op)
        elif op.get("group_size") != 1:
            events.append(_recorded_op(op))
    return events


def _recorded_mark(op: Mapping[str, Any]) -> list[Event]:
    kind = {"F": "F", "B": "B", "fwd": "F", "bwd": "B"}.get(op["mark"])
    if kind is None:
        return []
    return [mark(kind, int(op["mb"] if "mb" in op else op["n"]))]


def _recorded_op(op: Mapping[str, Any]) -> Event:
    name = str(op["op"]).removesuffix("_coalesced").removesuffix("(list)")
    if name not in OPS:
        raise RecordError(f"op {op['op']!r} is not one of {', '.join(OPS)}")
    group = (op["peer"],) if name in ("send", "recv") else tuple(op["group"])
    phase = PHASES.get(op.get("phase", "sched"))
    if phase is None:
        raise RecordError(f"phase {op['phase']!r} is not one of {', '.join(PHASES)}")
    dtype = str(op["dtype"]).removeprefix("torch.")
    return Event(
        phase,
        name,
        group,
        int(op["bytes"]),
        DTYPES.get(dtype, dtype),
        op.get("mod", ""),
        op.get("mb", -1),
        dict(op),
    )


def synthesized(
    nodes: Iterator[TraceNode], groups: Mapping[str, Sequence[int]], *, marks: bool
) -> list[Event]:
    """The events of a synthesized trace; with `marks` also where the forward and backward of micro-batches begin."""
    events: list[Event] = []
    current = ("", -1)
    for node in nodes:
        phase, micro_batch = str(node.get("phase", "")), _number(node, "micro_batch")
        phase = PHASES.get(phase, phase)
        if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            peer = _number(node, "comm_dst" if node.type == NodeType.COMM_SEND else "comm_src")
            events.append(_event(node, phase, (peer,), micro_batch))
        elif (
            marks
            and phase in ("forward", "backward")
            and micro_batch >= 0
            and (phase, micro_batch) != current
        ):
            current = (phase, micro_batch)
            events.append(mark("F" if phase == "forward" else "B", micro_batch))
        if node.type == NodeType.COMM_COLL:
            events.append(_event(node, phase, tuple(groups[str(node.get("pg_name"))]), micro_batch))
    return events


def _event(node: TraceNode, phase: str, group: tuple[int, ...], micro_batch: int) -> Event:
    dtype, op = str(node.get("dtype")), str(node.get("op"))
    return Event(phase, op, group, _number(node, "comm_size"), dtype, node.name, micro_batch)


def _number(node: TraceNode, name: str) -> int:
    value = node.get(name, -1)
    assert isinstance(value, int)
    return value
