"""A kind of block on a mesh: sharded and differentiated once, lowered once for each kind of device and load."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from stage.passes.backward import Differentiated
from stage.trace.concrete import Concrete
from stage.trace.lower import Lowered, lower
from stage.trace.parameters import Parameter, unit_parameters
from stage.trace.queries import query_atoms
from stage.trace.routing import Routing, variant_atoms

__all__ = ["BlockKind"]


@dataclass(frozen=True)
class BlockKind:
    """A kind of block, with what `stage.trace.lower` needs to know of it.

    Where the load of its experts is given, `routings` has one for each of its rows.
    """

    both: Differentiated
    concrete: Concrete
    numbers: tuple[str, ...]
    gathered: bool
    split: bool
    streams: str
    routings: tuple[Routing, ...] = ()
    _known: dict[tuple[int, tuple[int, ...]], Lowered] = field(default_factory=dict, compare=False)
    _alike: dict[Lowered, Lowered] = field(default_factory=dict, compare=False)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters on one device, which do not depend on the load."""
        return tuple(unit_parameters(self.both.forward, self.concrete))

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """The atoms of the mesh over which devices do unequal work, in its order."""
        graphs, pairwise = (self.both.forward, self.both.backward), self.concrete.pairwise
        found = set(query_atoms(graphs)) if self.concrete.consecutive else set()
        for routing in self.routings or (None,):
            found |= variant_atoms(graphs, routing, pairwise=pairwise)
        return tuple(name for name in self.concrete.mesh.names if name in found)

    def at(self, place: Mapping[str, int], row: int = 0) -> Concrete:
        """What turns symbols into the numbers of the devices at a place, under a row of the load."""
        concrete = replace(self.concrete, place={atom: place[atom] for atom in self.variants})
        return replace(concrete, routing=self.routings[row]) if self.routings else concrete

    def templates(self, place: Mapping[str, int], row: int = 0) -> Lowered:
        """The templates on the devices at a place, under a row of the load; the same object for equal ones."""
        key = row, tuple(place[atom] for atom in self.variants)
        if key not in self._known:
            made = lower(
                self.both,
                self.at(place, row),
                gathered=self.gathered,
                numbers=self.numbers,
                split=self.split,
                streams=self.streams,
            )
            self._known[key] = self._alike.setdefault(made, made)
        return self._known[key]
