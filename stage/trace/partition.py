"""The partition of ranks into classes: by the coordinates that a rank's program depends on.

That is the stage of the pipeline, and where ranks of a stage do unequal work, the coordinates that say how much. All
ranks with the same coordinates over these **class axes** are one class, whatever their other coordinates are.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stage.mesh import Mesh

__all__ = ["STAGES", "Partition"]

Ints = NDArray[np.int64]

STAGES = "pp"
"""The atom of the pipeline's stages, over which programs always differ."""


@dataclass(frozen=True)
class Partition:
    """The classes of the ranks of a mesh, by its atoms `axes`, in the order of the mesh.

    A class's number is the mixed-radix number of its coordinates over them, the last one fastest.

    >>> from stage.mesh import build_mesh
    >>> classes = Partition.of(build_mesh(pp=2, dp=2, cp=2), ["cp"])
    >>> classes.axes, classes.count, classes.positions(1).tolist()
    (('pp', 'cp'), 4, [1, 3])
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @staticmethod
    def of(mesh: Mesh, variants: Collection[str] = ()) -> "Partition":
        """The classes of stages whose ranks differ by their coordinates over the atoms `variants`."""
        return Partition(mesh, tuple(name for name in mesh.names if name == STAGES or name in variants))

    @property
    def sound(self) -> bool:
        """Whether the axes are atoms of the mesh in its order, with its stages."""
        return self.axes == Partition.of(self.mesh, self.axes).axes

    @cached_property
    def count(self) -> int:
        """How many classes there are."""
        return self.mesh.degree(self.axes)

    @cached_property
    def ranks_per_class(self) -> int:
        """How many ranks each class has."""
        return self.mesh.world // self.count

    @cached_property
    def _digits(self) -> tuple[tuple[int, int], ...]:
        """Stride and degree of each axis."""
        return tuple((self.mesh.stride(axis), self.mesh.degree(axis)) for axis in self.axes)

    def number(self, position: int) -> int:
        """The class of the rank at a position of the mesh."""
        number = 0
        for stride, degree in self._digits:
            number = number * degree + position // stride % degree
        return number

    def numbers(self, positions: Ints) -> Ints:
        """The classes of the ranks at these positions of the mesh."""
        numbers = np.zeros_like(positions)
        for stride, degree in self._digits:
            numbers = numbers * degree + positions // stride % degree
        return numbers

    def coordinates(self, number: int) -> dict[str, int]:
        """The coordinate of a class over each axis."""
        found = {}
        for axis, (_, degree) in zip(reversed(self.axes), reversed(self._digits), strict=True):
            number, found[axis] = divmod(number, degree)
        return dict(reversed(found.items()))

    def first(self, number: int) -> int:
        """The first of the positions of a class."""
        return sum(self.mesh.stride(axis) * at for axis, at in self.coordinates(number).items())

    def positions(self, number: int) -> Ints:
        """The positions of the ranks of a class, ascending."""
        others = [name for name in self.mesh.names if name not in self.axes]
        own: Ints = self.mesh.groups(others)[number]
        return own
