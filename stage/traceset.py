"""A trace set: any rank's trace as bytes or as plain values, made when it is asked for.

Ranks on one pipeline stage run one program, so they are a rank class: its bytes are made once, and a rank's are a copy
with its own group names and peers put in.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stage.errors import TraceError
from stage.io.chakra import DirectorySource, open_directory, write_directory
from stage.mesh import Mesh
from stage.trace.expand import ClassImage, expand
from stage.trace.groups import GroupTable
from stage.trace.image import PEER_WIDTH, NameStyle, Widths, put_varints
from stage.trace.node import TraceNode
from stage.trace.program import Program
from stage.trace.wire import encode_metadata, frame, read_trace

__all__ = ["SCHEMA_VERSION", "Job", "TraceSet"]

SCHEMA_VERSION = "1.0.0"


@dataclass(frozen=True)
class Job:
    """What a trace set is made from: the mesh, a program for each stage, and a description for the manifest.

    `placement[position]` is the rank at a position of the mesh, None where they are the same.
    """

    mesh: Mesh
    programs: tuple[Program, ...]
    style: NameStyle
    description: Mapping[str, Any]
    placement: NDArray[np.int64] | None = None


class TraceSet:
    """The traces of all ranks of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.world = job.mesh.world
        self.ranks = range(self.world)
        axes = {node.axes for p in job.programs for t in p.templates for node in t.nodes if node.axes}
        self.group_table = GroupTable(job.mesh, axes, job.placement)
        largest = max(program.nodes for program in job.programs)
        ids = max(4, -(-largest.bit_length() // 7))
        self._widths = Widths(ids, {key: self.group_table.width(key) for key in axes})
        self._images: dict[int, ClassImage] = {}
        self._position = None if job.placement is None else np.argsort(job.placement)

    @staticmethod
    def open(path: str | Path) -> DirectorySource:
        """A trace set on disk, with the same `rank`, `nodes`, `groups` and `manifest`."""
        return open_directory(path)

    def position(self, rank: int) -> int:
        """Where a rank stands on the mesh."""
        if rank not in self.ranks:
            raise TraceError(
                f"rank {rank} is not one of the {self.world} ranks; choose one from 0 to {self.world - 1}"
            )
        return rank if self._position is None else int(self._position[rank])

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank, which is also the number of its class."""
        return self.position(rank) // (self.world // len(self.job.programs))

    def image(self, stage: int) -> ClassImage:
        """The bytes shared by the ranks of a class; made once."""
        if stage not in self._images:
            header = frame(encode_metadata(SCHEMA_VERSION))
            self._images[stage] = expand(self.job.programs[stage], self.job.style, self._widths, header)
        return self._images[stage]

    def rank(self, rank: int) -> bytes:
        """The bytes of a rank's trace file."""
        position = self.position(rank)
        image = self.image(self.stage(rank))
        data = image.data.copy()
        for axes, where in image.groups.items():
            name = str(self.group_table.number(axes, position)).encode()
            width = self._widths.groups[axes]
            length = np.zeros((1, width - len(name)), np.uint8)
            put_varints(length, np.array([0]), np.array([[len(name)]]), width - len(name))
            field = np.concatenate([length[0], np.frombuffer(name, np.uint8)])
            data[where[:, None] + np.arange(width)] = field
        for distance, where in image.peers.items():
            peer = self._neighbour(position, distance)
            put_varints(data[None, :], where, np.full((1, 1), peer, np.int64), PEER_WIDTH)
        return data.tobytes()

    def _neighbour(self, position: int, distance: int) -> int:
        """The rank `distance` stages further at the same place of the other axes."""
        per_stage = self.world // len(self.job.programs)
        there = position + distance * per_stage
        assert 0 <= there < self.world, "a stage at the end has no such neighbour"
        return there if self.job.placement is None else int(self.job.placement[there])

    def nodes(self, rank: int) -> Iterator[TraceNode]:
        """The nodes of a rank's trace as plain values."""
        return read_trace(self.rank(rank))[1]

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """Process groups: name -> ranks in ring order."""
        return self.group_table.table()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Inputs, resolved sizes and mesh, counts, and for each class its totals and the digest of its bytes."""
        per_stage = self.world // len(self.job.programs)
        return {
            **self.job.description,
            "schema": SCHEMA_VERSION,
            "ranks": self.world,
            "groups": self.group_table.count,
            "classes": [self._class_entry(stage, per_stage) for stage in range(len(self.job.programs))],
        }

    def _class_entry(self, stage: int, per_stage: int) -> dict[str, Any]:
        program, image = self.job.programs[stage], self.image(stage)
        digest = hashlib.sha256(image.data.tobytes()).hexdigest()
        return {
            "class": stage,
            "ranks": per_stage,
            "bytes": len(image.data),
            "sha256": digest,
            **totals(program, self.group_table.size),
        }

    def write(
        self,
        path: str | Path,
        ranks: Sequence[int] | None = None,
        *,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, int]:
        """Write a directory of traces, complete or not at all; returns counts of ranks, classes, nodes and bytes.

        `ranks` chooses which are written (all by default). An existing directory is a `TraceError` without `force`.
        """
        chosen = list(self.ranks) if ranks is None else list(dict.fromkeys(ranks))
        stages = [self.stage(rank) for rank in chosen]
        manifest = {**self.manifest, "written": "all" if ranks is None else chosen}
        write_directory(
            path, self.world, chosen, self.rank, self.groups, manifest, force=force, progress=progress
        )
        return {
            "ranks": len(chosen),
            "classes": len(set(stages)),
            "nodes": sum(self.job.programs[s].nodes for s in stages),
            "bytes": sum(len(self.image(s).data) for s in stages),
        }


def totals(program: Program, group_size: Callable[[tuple[str, ...]], int]) -> dict[str, Any]:
    """Nodes of a program, the work they do, and what they hand to each kind of communication over each set of axes."""
    flops = matmul = model = moved = 0
    communication: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for template, count in zip(program.templates, program.counts(), strict=True):
        for node in template.nodes:
            if node.is_compute:
                flops += node.flops * count
                matmul += node.flops * count * node.matmul
                model += node.model_flops * count
                moved += node.bytes * count
            else:
                entry = communication.setdefault((node.kind, node.axes), [0, 0])
                entry[0] += count
                entry[1] += node.bytes * count
    return {
        "nodes": program.nodes,
        "num_ops": flops,
        "matmul_ops": matmul,
        "model_flops": model,
        "memory_bytes": moved,
        "communication": [
            {"kind": kind, "axes": list(axes), "group": group_size(axes) if axes else 2, "count": n, "bytes": size}
            for (kind, axes), (n, size) in sorted(communication.items())
        ],
    }
