"""A job: the programs of its rank classes on a mesh, and what is said of it; all that a trace set is made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stage.mesh import Mesh
from stage.trace.classes import RankClasses
from stage.trace.expand import ClassImage, Encoded, expand
from stage.trace.groups import GroupTable
from stage.trace.image import NameStyle, Widths
from stage.trace.partition import Partition
from stage.trace.program import Program
from stage.trace.wire import encode_metadata, frame

__all__ = ["SCHEMA_VERSION", "Job"]

SCHEMA_VERSION = "1.0.0"


@dataclass(frozen=True)
class Job:
    """What a trace set is made from: the mesh, a program for each class, and a description for the manifest.

    `placement[position]` is the rank at a position of the mesh, None where they are the same. Classes are stages, and
    of these the ranks with the same coordinates over the atoms `variants` (`stage.trace.partition`).
    """

    mesh: Mesh
    programs: tuple[Program, ...]
    style: NameStyle
    description: Mapping[str, Any]
    placement: NDArray[np.int64] | None = None
    variants: tuple[str, ...] = ()

    def axes(self) -> set[tuple[str, ...]]:
        """All sets of axes with collectives."""
        nodes = (n for p in self.programs for t in p.templates for n in t.nodes)
        return {node.axes for node in nodes if node.axes and node.peer is None}

    def classes(self) -> RankClasses:
        """The rank classes, whose images are made on demand."""
        axes = self.axes()
        groups = GroupTable(self.mesh, axes)
        ids = max(4, -(-max(p.nodes for p in self.programs).bit_length() // 7))
        widths = Widths(ids, {key: groups.width(key) for key in axes})
        header = frame(encode_metadata(SCHEMA_VERSION))

        encoded: Encoded = {}

        def image(number: int) -> ClassImage:
            return expand(self.programs[number], self.style, widths, header, encoded)

        partition = Partition.of(self.mesh, self.variants)
        assert partition.count == len(self.programs), f"{len(self.programs)} programs for {partition.axes}"
        return RankClasses(partition, axes, image, self.placement)
