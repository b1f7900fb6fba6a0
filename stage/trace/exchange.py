"""Exchanges: what each member of a group sends to each other one when a tensor moves between two layouts.

A device holds a block of the tensor before and another one after; what it sends to a member is what its block before
has in common with that member's block after. This is so for every all-to-all and every permute, whatever dims they
move; where experts have unequal loads the blocks are unequal, and so is what is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from stage.errors import LayoutError
from stage.layout import Layout
from stage.mesh import Mesh
from stage.passes.shard import UNORDERED
from stage.tensor import Tensor
from stage.trace.routing import Place, Routing, holds_tokens, place_index

__all__ = ["EXCHANGES", "Exchange", "Moved", "group_places"]

Ints = NDArray[np.int64]

Block = tuple[Sequence[str], Place]
"""A shard of a dim: the atoms that shard it, and the coordinates of the devices that hold it."""

EXCHANGES = frozenset({"all_to_all", "permute"})
"""Steps of a reshard in which members send each other parts of their blocks."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Elements that one device sends to and receives from each member of its group, itself included, in group order.

    `own` is its number in the group.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    own: int

    def scaled(self, width: int | Fraction) -> "Exchange":
        """The same in bytes, of elements of this width, whose bytes are whole for a token."""
        sent, received = (tuple(int(n * width) for n in part) for part in (self.sent, self.received))
        return Exchange(sent, received, self.own)


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor of whole sizes that changes its layout within groups over `axes`.

    Where there is a `routing` it says how many tokens the experts have. Shards of an unordered dim are told apart by
    their order only if the step is `ordered`.
    """

    tensor: Tensor
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    mesh: Mesh
    routing: Routing | None
    ordered: bool

    def exchange(self, place: Place) -> Exchange:
        """What the device at a place sends and receives; a `LayoutError` where elements do not divide."""
        members, own = (
            group_places(self.axes, place, self.mesh),
            int(place_index(self.axes, place, self.mesh)),
        )
        sent, received = self._common(place, members), self._common(members, place)
        return Exchange(sent, received, own)

    def largest(self, place: Place, *, exchange: bool) -> int:
        """Elements that the member with most of them holds before or, of an `exchange`, before or after."""
        members = group_places(self.axes, place, self.mesh)
        layouts = (self.before, self.after) if exchange else (self.before,)
        return self._whole(max(self._held(layout, members) for layout in layouts))

    def _held(self, layout: Layout, places: Place) -> Fraction:
        """Elements of the largest block of those at these places."""
        names, found = self.tensor.dim_names, Fraction(1)
        counted = self._counted()
        if counted:
            experts, slots = (layout.dims[names.index(name)] for name in ("experts", "slots"))
            assert self.routing is not None
            found *= int(self.routing.tokens(experts, slots, places, self.mesh).max())
        for dim, atoms in zip(self.tensor.dims, layout.dims, strict=True):
            if dim.name not in counted:
                found *= Fraction(dim.size, self.mesh.degree(atoms))
        return found

    def _counted(self) -> frozenset[str]:
        """The dims whose sizes the routing says."""
        routed = self.routing is not None and holds_tokens(self.tensor)
        return frozenset({"experts", "slots"}) if routed else frozenset()

    def _common(self, sender: Place, receiver: Place) -> tuple[int, ...]:
        """Elements that the senders' blocks before have in common with the receivers' blocks after."""
        counted, scale = self._counted(), Fraction(1)
        found: Ints = np.ones(self.mesh.degree(self.axes), np.int64)
        for dim, one, other in zip(self.tensor.dims, self.before.dims, self.after.dims, strict=True):
            if dim.name == "experts" and counted:
                assert self.routing is not None
                found = found * self._tokens(self.routing, (one, sender), (other, receiver))
                continue
            ordered = self.ordered or dim.name not in UNORDERED
            above, below = (self._in_order if ordered else self._by_source)((one, sender), (other, receiver))
            found, scale = found * above, scale / below
            scale *= self.routing.sources if dim.name in counted and self.routing is not None else dim.size
        return tuple(self._whole(value * scale) for value in found.tolist())

    def _tokens(self, routing: Routing, one: Block, other: Block) -> Ints:
        """Slots of a source for the experts that are in both blocks."""
        ends = np.concatenate([[0], np.cumsum(routing.slots)])
        bounds = []
        for atoms, place in (one, other):
            width = len(routing.slots) // self.mesh.degree(atoms)
            first = place_index(atoms, place, self.mesh) * width
            bounds.append((first, first + width))
        (a, b), (c, d) = bounds
        low, high = np.maximum(a, c), np.minimum(b, d)
        return np.asarray(ends[np.maximum(low, high)] - ends[low])

    def _in_order(self, one: Block, other: Block) -> tuple[Ints, int]:
        """The part of a dim that two shards have in common, which are told by their order: above and below the bar."""
        (a, m), (b, n) = (
            (place_index(*block, self.mesh), self.mesh.degree(block[0])) for block in (one, other)
        )
        common = np.minimum((a + 1) * n, (b + 1) * m) - np.maximum(a * n, b * m)
        return np.maximum(common, 0), m * n

    def _by_source(self, one: Block, other: Block) -> tuple[Ints, int]:
        """The same of shards that are told by their coordinates: all that agree in those that both have."""
        (first, sender), (second, receiver) = one, other
        same: Ints = np.ones((), np.int64)
        for atom in first:
            if atom in second:
                same = same * np.equal(sender.get(atom, 0), receiver.get(atom, 0))
        return same, self.mesh.degree(tuple(dict.fromkeys((*first, *second))))

    def _whole(self, elements: Fraction) -> int:
        if elements.denominator != 1:
            raise LayoutError(
                f"{self.tensor.name} has {elements} elements for a device: its tokens do not divide by the ranks that "
                "share them; choose a batch or seq that does"
            )
        return elements.numerator


def group_places(axes: Sequence[str], place: Place, mesh: Mesh) -> dict[str, Ints]:
    """Coordinates of all members of the group over `axes` that the device at a place belongs to, in group order."""
    number = np.arange(mesh.degree(axes), dtype=np.int64)
    found = {atom: np.asarray(own, np.int64) for atom, own in place.items()}
    for atom in reversed(axes):
        degree = mesh.degree(atom)
        found[atom] = number % degree
        number = number // degree
    return found
