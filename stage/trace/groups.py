"""Process groups: every set of axes that communicates cuts the ranks into groups, numbered compactly from 1.

The number of a rank's group is a formula of its coordinates; the table is made only to be written out. Besides the
axes of the mesh there is `pp_ends`, the first and last stage of each pipeline, which share a tied embedding.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from stage.mesh import Mesh

__all__ = ["PIPELINE_ENDS", "GroupTable"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

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

    def numbers(self, axes: tuple[str, ...], positions: Ints) -> Ints:
        """The numbers of the groups over `axes` that the ranks at these positions of the mesh belong to."""
        if axes == PIPELINE_ENDS:
            return self.first[axes] + positions % (self.mesh.world // self.mesh.degree("pp"))
        row = np.zeros_like(positions)
        used = set(axes)
        for atom, degree in self.mesh.atoms:
            if atom not in used:
                row = row * degree + positions // self.mesh.stride(atom) % degree
        return self.first[axes] + row

    def names(self, axes: tuple[str, ...], positions: Ints) -> Bytes:
        """The names of these groups as strings in a trace: a length padded to make up for missing digits, digits.

        >>> from stage.mesh import build_mesh
        >>> table = GroupTable(build_mesh(dp=2, tp=16), [("dp",)])
        >>> table.names(("dp",), np.array([0, 15])).tolist()
        [[129, 128, 128, 128, 0, 49], [130, 128, 128, 0, 49, 54]]
        """
        numbers, width = self.numbers(axes, positions), self.width(axes)
        counts = 1 + (numbers[:, None] >= 10 ** np.arange(1, width)).sum(axis=1)
        names = np.empty((len(positions), width), np.uint8)
        for count in np.unique(counts).tolist():
            rows, room = counts == count, width - count
            names[rows, :room] = [count | 0x80 if room > 1 else count, *[0x80] * (room - 2), 0][:room]
            names[rows, room:] = numbers[rows, None] // 10 ** np.arange(count - 1, -1, -1) % 10 + ord("0")
        return names

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
