"""Process groups: every set of axes that communicates cuts the ranks into groups, numbered compactly from 1.

The number of a rank's group is a formula of its coordinates; the table is made only to be written out. Besides the
axes of the mesh there is `pp_ends`, the first and last stage of each pipeline, which share a tied embedding.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from stage.mesh import Mesh

__all__ = ["PIPELINE_ENDS", "GroupTable"]

PIPELINE_ENDS = ("pp_ends",)


class GroupTable:
    """The groups of a job: `axes` are the sets of axes (as atoms) that communicate.

    `placement[position]` is the rank at a position of the mesh; without it they are the same.
    """

    def __init__(
        self, mesh: Mesh, axes: Iterable[Sequence[str]], placement: NDArray[np.int64] | None = None
    ) -> None:
        self.mesh = mesh
        self.placement = placement
        order = {name: i for i, (name, _) in enumerate(mesh.atoms)}
        self.axes = sorted({tuple(a) for a in axes}, key=lambda a: [order.get(x, -1) for x in a])
        self.first: dict[tuple[str, ...], int] = {}
        number = 1
        for key in self.axes:
            self.first[key] = number
            number += self.groups(key)
        self.count = number - 1

    def size(self, axes: tuple[str, ...]) -> int:
        """Ranks in each group over these axes."""
        return 2 if axes == PIPELINE_ENDS else self.mesh.degree(axes)

    def groups(self, axes: tuple[str, ...]) -> int:
        """How many groups there are over these axes."""
        return self.mesh.world // (self.mesh.degree("pp") if axes == PIPELINE_ENDS else self.size(axes))

    def number(self, axes: tuple[str, ...], position: int) -> int:
        """The number of the group over `axes` that the rank at a position of the mesh belongs to."""
        if axes == PIPELINE_ENDS:
            rest = [name for name, _ in self.mesh.atoms if name != "pp"]
            return self.first[axes] + position % self.mesh.degree(rest)
        return self.first[axes] + self.mesh.group_index(axes, position)

    def width(self, axes: tuple[str, ...]) -> int:
        """Bytes that hold any of these groups' names with a length of 1 to 5 bytes before it."""
        last = self.first[axes] + self.groups(axes) - 1
        return max(6, len(str(last)) + 1)

    def members(self, axes: tuple[str, ...]) -> NDArray[np.int64]:
        """Ranks of each group over `axes`, in ring order."""
        if axes == PIPELINE_ENDS:
            per_stage = self.mesh.world // self.mesh.degree("pp")
            first = np.arange(per_stage, dtype=np.int64)
            rows = np.stack([first, first + self.mesh.world - per_stage], axis=1)
        else:
            rows = self.mesh.groups(axes)
        return rows if self.placement is None else self.placement[rows]

    def table(self) -> dict[str, list[int]]:
        """Every group's name and ranks, as consumers read them."""
        found = {}
        for axes in self.axes:
            for i, row in enumerate(self.members(axes).tolist()):
                found[str(self.first[axes] + i)] = row
        return found
