"""What a trace set holds: its ranks, groups, work and communication, and one rank in detail.

A set with a manifest says most of this itself, once for each class of ranks that run one program. For the sets of
other producers all ranks are read, and ranks whose traces have equal totals are taken for a class.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stage.io.chakra import open_directory
from stage.trace.node import CommType, NodeType, TraceNode, Value

__all__ = ["Source", "trace_summary"]

COMPUTE = (int(NodeType.COMP), int(NodeType.MEM_LOAD), int(NodeType.MEM_STORE))
COMMUNICATION = ("kind", "axes", "group", "count", "bytes")
FIRST, TOP = 16, 12
NUMBERS = re.compile(r"(?<=[a-z])[0-9]+(?=\.)|/(mb|step)[0-9]+")
"""What tells the instances of one node of a program apart: its layer, its micro-batch, its step."""

INPUTS = (
    *("model", "strategy", "mesh", "batch", "micro_batch", "micro_batches", "seq", "steps"),
    *("schedule", "vpp", "recompute", "zero", "stage_layers", "dtype", "grad_dtype"),
)


class Source(Protocol):
    """A trace set in memory or in a folder."""

    @property
    def world(self) -> int:
        """Ranks of the job."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """Those whose traces are there."""
        ...

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        """Process groups by name."""
        ...

    @property
    def manifest(self) -> Mapping[str, Any] | None:
        """What the producer says of the set."""
        ...

    def nodes(self, rank: int, /) -> Iterable[TraceNode]:
        """The nodes of a rank in the order of its file."""
        ...


@dataclass(slots=True)
class Totals:
    """Nodes, work and communication of one rank."""

    nodes: int = 0
    num_ops: int = 0
    memory_bytes: int = 0
    communication: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def add(self, node: TraceNode, source: Source) -> None:
        """Count one more node."""
        self.nodes += 1
        if node.type in COMPUTE:
            self.num_ops += number(node, "num_ops")
            self.memory_bytes += number(node, "tensor_size")
        elif (kind := kind_of(node)) is not None:
            entry = self.communication.setdefault((kind, group_size(node, source)), [0, 0])
            entry[0] += 1
            entry[1] += number(node, "comm_size")

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for two ranks of a class."""
        communication = tuple(sorted((key, *entry) for key, entry in self.communication.items()))
        return self.nodes, self.num_ops, self.memory_bytes, communication


def trace_summary(source: str | Path | Source, rank: int | None = None) -> dict[str, Any]:
    """What a trace set holds, or with a `rank` what that rank's trace holds, as plain values.

    A `TraceError` says what is wrong with a folder, or that it has no such rank.
    """
    traces: Source = open_directory(source) if isinstance(source, str | Path) else source
    if rank is not None:
        return rank_summary(traces, rank)
    manifest = traces.manifest
    report: dict[str, Any] = {}
    if manifest is not None and "classes" in manifest:
        report |= {"name": manifest.get("model", "")}
        report["inputs"] = {key: _plain(manifest[key]) for key in INPUTS if key in manifest}
        classes = [_own_class(entry) for entry in manifest["classes"]]
    else:
        classes = _foreign_classes(traces)
    report |= {"ranks": traces.world, "available": len(traces.ranks)}
    report |= {"nodes": sum(c["ranks"] * c["nodes"] for c in classes), "classes": classes}
    report["communication"] = [
        {"class": c["class"], **entry} for c in classes for entry in c.pop("communication")
    ]
    sizes = Counter(len(members) for members in traces.groups.values())
    report["groups"] = [{"ranks": size, "groups": count} for size, count in sorted(sizes.items())]
    return report


def _plain(value: Any) -> Any:
    """A value of the manifest; of the mesh only the degrees above 1."""
    if not isinstance(value, Mapping):
        return value
    return {key: degree for key, degree in value.items() if isinstance(degree, int) and degree > 1}


def _own_class(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A class as the manifest describes it."""
    kept = ("class", "ranks", "nodes", "num_ops", "matmul_ops", "memory_bytes")
    named = [{key: one[key] for key in COMMUNICATION} for one in entry.get("communication", ())]
    return {**{key: entry[key] for key in kept if key in entry}, "communication": named}


def _foreign_classes(source: Source) -> list[dict[str, Any]]:
    """Ranks with equal totals, in the order of their first rank."""
    found: dict[tuple[Any, ...], tuple[Totals, list[int]]] = {}
    for rank in source.ranks:
        totals = _totals(source, rank)
        found.setdefault(totals.key, (totals, []))[1].append(rank)
    return [
        {
            "class": index, "ranks": len(ranks), "first_rank": ranks[0], "nodes": totals.nodes,
            "num_ops": totals.num_ops, "memory_bytes": totals.memory_bytes, "communication": _communication(totals),
        }
        for index, (totals, ranks) in enumerate(found.values())
    ]  # fmt: skip


def _totals(source: Source, rank: int) -> Totals:
    totals = Totals()
    for node in source.nodes(rank):
        totals.add(node, source)
    return totals


def _communication(totals: Totals) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "group": size, "count": count, "bytes": sent}
        for (kind, size), (count, sent) in sorted(totals.communication.items())
    ]


def rank_summary(source: Source, rank: int) -> dict[str, Any]:
    """One rank: totals, nodes by phase and by op, the kernels with the most work, and the first nodes."""
    nodes = list(source.nodes(rank))
    totals = Totals()
    for node in nodes:
        totals.add(node, source)
    return {
        "rank": rank,
        "nodes": totals.nodes,
        "num_ops": totals.num_ops,
        "memory_bytes": totals.memory_bytes,
        "types": dict(Counter(_type(node) for node in nodes)),
        "phases": dict(Counter(str(node.get("phase", "-")) for node in nodes)),
        "ops": _most_work(nodes, lambda node: str(node.get("op", "-"))),
        "communication": _communication(totals),
        **_uneven(nodes),
        "largest": _most_work(nodes, lambda node: NUMBERS.sub("", node.name), "name")[:TOP],
        "first": [_line(node) for node in nodes[:FIRST]],
    }


def _most_work(
    nodes: Iterable[TraceNode], label: Callable[[TraceNode], str], title: str = "op"
) -> list[dict[str, Any]]:
    """Count, work and traffic of the compute nodes of each label, those with the most work first."""
    found: dict[str, list[int]] = {}
    for node in nodes:
        if node.type in COMPUTE:
            entry = found.setdefault(label(node), [0, 0, 0])
            entry[0] += 1
            entry[1] += number(node, "num_ops")
            entry[2] += number(node, "tensor_size")
    ranked = sorted(found.items(), key=lambda item: -item[1][1])
    return [
        {title: name, "count": count, "num_ops": work, "memory_bytes": moved}
        for name, (count, work, moved) in ranked
    ]


def _uneven(nodes: Iterable[TraceNode]) -> dict[str, list[dict[str, Any]]]:
    """Of a rank with uneven all-to-alls what it sends to and receives from each member of their groups."""
    found: Counter[tuple[str, Value, Value]] = Counter()
    for node in nodes:
        if "in_splits" in node.attrs and "out_splits" in node.attrs:
            found[NUMBERS.sub("", node.name), node.get("in_splits"), node.get("out_splits")] += 1
    rows = [
        {"name": name, "count": count, "in_splits": sent, "out_splits": received}
        for (name, sent, received), count in found.items()
    ]
    return {"splits": rows} if rows else {}


def _line(node: TraceNode) -> dict[str, Any]:
    """A node in one line: what it is, what it does and what it waits for."""
    return {"id": node.id, "name": node.name, "type": _type(node), "waits_for": list(node.data_deps)}


def _type(node: TraceNode) -> str:
    try:
        return NodeType(node.type).name
    except ValueError:
        return str(node.type)


def number(node: TraceNode, name: str) -> int:
    """A numeric attribute of a node; 0 where it has none, or something else by that name."""
    value = node.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def kind_of(node: TraceNode) -> str | None:
    """Which communication a node is, or None for a node that is none."""
    if node.type == NodeType.COMM_COLL:
        kind = number(node, "comm_type")
        return CommType(kind).name.lower() if kind in list(CommType) else f"collective {kind}"
    return {int(NodeType.COMM_SEND): "send", int(NodeType.COMM_RECV): "recv"}.get(node.type)


def group_size(node: TraceNode, source: Source) -> int:
    """Ranks that take part: 2 for a message, all for a collective that names no group."""
    if node.type != NodeType.COMM_COLL:
        return 2
    name = str(node.get("pg_name", "") or "")
    return len(source.groups.get(name, ())) or source.world
