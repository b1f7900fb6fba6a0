"""Rules that the file of one rank keeps or breaks alone, and what the checks across ranks need to know of it.

A file is read node by node; what is kept of it are compact arrays, and those are shared between ranks that
run the same program. Messages that recur from rank to rank are decoded and examined once.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from stage.trace.decode import AttributeCache, decode_node, open_trace
from stage.trace.node import VERSIONS
from stage.trace.report import Findings, short
from stage.trace.verify_groups import Groups
from stage.trace.verify_messages import check_ends
from stage.trace.verify_node import RECV, SEND, Facts, Splits, examine
from stage.trace.verify_order import Structure, check_order, reaches
from stage.trace.verify_record import ROWS, Columns, RankRecord

__all__ = ["RankReader"]

CACHE_BYTES: Final = 1 << 25
MANY_FREE: Final = 2000


@dataclass(slots=True)
class MessageCache:
    """Facts by message, in two generations: what was not used during the last one is dropped."""

    young: dict[bytes, Facts] = field(default_factory=dict)
    old: dict[bytes, Facts] = field(default_factory=dict)
    size: int = 0

    def get(self, message: bytes) -> Facts | None:
        """Return the facts of a message that is not in the young generation, or None; keep them young."""
        found = self.old.get(message)
        if found is not None:
            self.put(message, found)
        return found

    def put(self, message: bytes, facts: Facts) -> None:
        """Keep the facts of a message."""
        self.size += len(message)
        if self.size > CACHE_BYTES:
            self.old, self.young, self.size = self.young, {}, len(message)
        self.young[message] = facts


@dataclass(slots=True)
class Reading:
    """A file being read: positions by id, and the dependencies as positions of parents."""

    positions: dict[int, int] = field(default_factory=dict)
    ids: "array[int]" = field(default_factory=lambda: array("Q"))
    kinds: bytearray = field(default_factory=bytearray)
    parents: "array[int]" = field(default_factory=lambda: array("q"))
    starts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    unresolved: list[tuple[int, int]] = field(default_factory=list)
    communication: list[Facts] = field(default_factory=list)
    streams: dict[int, str] = field(default_factory=dict)
    flawed: list[tuple[int, Facts]] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    free: int = 0

    def take(self, nodes: Iterable[Facts]) -> None:
        """Read nodes to the end; dependencies on nodes not seen before are left to be resolved."""
        positions, parents, starts = self.positions, self.parents, self.starts
        for at, facts in enumerate(nodes):
            ident = facts.id
            if ident in positions:
                self.repeated.append(at)
            else:
                positions[ident] = at
            self.ids.append(ident)
            self.kinds.append(facts.kind)
            for dep in facts.deps:
                parent = positions.get(dep, -1)
                if parent < 0 or parent == at:
                    self.unresolved.append((at, dep))
                else:
                    parents.append(parent)
            starts.append(len(parents))
            if not facts.deps:
                self.free += 1
            if facts.kind >= SEND:
                self.communication.append(facts)
                if facts.stream and facts.kind != RECV:
                    self.streams[at] = facts.stream
            if facts.problems or facts.ctrl_only:
                self.flawed.append((at, facts))


@dataclass(slots=True)
class RankReader:
    """Reads ranks one after the other and shares between them what is equal; `splits` are numbered from 1."""

    world: int
    groups: Groups
    findings: Findings
    attributes: AttributeCache = field(default_factory=dict)
    messages: MessageCache = field(default_factory=MessageCache)
    structures: dict[bytes, Structure] = field(default_factory=dict)
    shared: dict[bytes, Columns] = field(default_factory=dict)
    splits: dict[Splits, int] = field(default_factory=dict)

    def read(self, rank: int, data: bytes) -> RankRecord:
        """Return the record of a rank; raise TraceError where its file is malformed."""
        metadata, bounds = open_trace(data)
        self.check_version(rank, metadata.version)
        reading = Reading()
        reading.take(self.facts(data, bounds))
        self.check_start(rank, reading)
        structure = self.share_structure(reading)
        runnable = self.check_nodes(rank, reading) and bool(reading.ids)
        runnable &= check_order(rank, structure, reading.positions, reading.unresolved, self.findings)
        self.check_ctrl(rank, structure, reading)
        communication = reading.communication
        comparable = all(facts.usable for facts in communication)
        comparable &= check_ends(rank, self.world, communication, self.findings)
        comparable &= self.groups.check_use(rank, communication, self.findings)
        return RankRecord(rank, structure, self.share_columns(communication), comparable, runnable)

    def share_structure(self, reading: Reading) -> Structure:
        """Return the structure of what was read, the same object for equal ones."""
        parts = (
            reading.ids.tobytes(),
            bytes(reading.kinds),
            reading.parents.tobytes(),
            reading.starts.tobytes(),
            repr(reading.streams).encode(),
        )
        digest = hashlib.blake2b(b"".join(parts), digest_size=16).digest()
        found = self.structures.get(digest)
        if found is None:
            ids, parents, starts = (
                np.frombuffer(parts[at], kind) for at, kind in ((0, "u8"), (2, "i8"), (3, "i8"))
            )
            found = Structure(
                ids, parts[1], parents.astype(np.int32), starts.astype(np.int32), reading.streams
            )
            self.structures[digest] = found
        return found

    def share_columns(self, communication: list[Facts]) -> Columns:
        """Return the columns of communication nodes, the same object for equal ones."""
        known, numbers = self.splits, [0] * len(communication)
        for at, facts in enumerate(communication):
            if facts.splits is not None:
                numbers[at] = known.setdefault(facts.splits, len(known) + 1)
        rows = [
            (
                facts.kind,
                facts.comm_type,
                facts.size,
                facts.group,
                facts.peer,
                facts.tag,
                facts.peer,
                0,
                number,
            )
            for facts, number in zip(communication, numbers, strict=True)
        ]
        columns = np.array(rows, np.int64).reshape(len(rows), ROWS).T.copy()
        return self.shared.setdefault(columns.tobytes(), columns)

    def facts(self, data: bytes, bounds: Iterator[tuple[int, int]]) -> Iterator[Facts]:
        """Yield the facts of each node."""
        messages, attributes = self.messages, self.attributes
        for pos, end in bounds:
            message = data[pos:end]
            found = messages.young.get(message) or messages.get(message)
            if found is None:
                found = examine(decode_node(data, pos, end, attributes))
                messages.put(message, found)
            yield found

    def check_version(self, rank: int, version: str) -> None:
        """Check the schema version in the metadata."""
        known = " or ".join(VERSIONS)
        if not version:
            self.findings.add(rank, None, "metadata-version", f"the metadata has no version: write {known}")
        elif version not in VERSIONS:
            text = f"the metadata has version {short(version)}, which is none that is known: write {known}"
            self.findings.warn(rank, None, "metadata-version", text)

    def check_start(self, rank: int, reading: Reading) -> None:
        """Check that the rank has something to start with, and not too much."""
        if not reading.ids:
            self.findings.add(rank, None, "no-nodes", "the trace has no node: every rank needs one")
        elif not reading.free:
            self.findings.add(
                rank, None, "no-start", "every node waits for another: let one have no data_deps"
            )
        elif reading.free >= MANY_FREE:
            text = f"{reading.free} nodes are free at the start, quadratic time in ASTRA-sim: chain them"
            self.findings.warn(rank, None, "many-free", text)

    def check_nodes(self, rank: int, reading: Reading) -> bool:
        """Report what nodes break alone; return whether their dependencies are sound so far."""
        for at in reading.repeated:
            ident = reading.ids[at]
            where = f"messages {reading.positions[ident] + 1} and {at + 1} behind the metadata"
            self.findings.add(rank, ident, "id-repeated", f"{where} have this id: give every node its own")
        sound = bool(reading.free) and not reading.repeated
        for _, facts in reading.flawed:
            for rule, message in facts.problems:
                self.findings.add(rank, facts.id, rule, message)
                sound &= rule not in {"dep-self", "dep-repeated"}
        return sound

    def check_ctrl(self, rank: int, structure: Structure, reading: Reading) -> None:
        """Check that what ctrl_deps order is ordered by data_deps as well."""
        for at, facts in reading.flawed:
            others = [reading.positions.get(dep, at) for dep in facts.deps if dep not in facts.ctrl_only]
            for dep in facts.ctrl_only:
                parent = reading.positions.get(dep, at)
                if parent < at and not reaches(structure, at, others, parent):
                    text = f"runs behind node {dep} by ctrl_deps only, which some ignore: add it to data_deps"
                    self.findings.add(rank, facts.id, "ctrl-only", text)
