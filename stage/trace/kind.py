"""A kind of block on a mesh: sharded and differentiated once, lowered once for each kind of device."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from stage.passes.backward import Differentiated
from stage.trace.lower import Concrete, Lowered, lower
from stage.trace.parameters import Parameter, unit_parameters
from stage.trace.queries import query_atoms

__all__ = ["BlockKind"]


@dataclass(frozen=True)
class BlockKind:
    """A kind of block, with what `stage.trace.lower` needs to know of it."""

    both: Differentiated
    concrete: Concrete
    numbers: tuple[str, ...]
    gathered: bool
    split: bool
    streams: str
    _known: dict[tuple[int, ...], Lowered] = field(default_factory=dict, compare=False)
    _alike: dict[Lowered, Lowered] = field(default_factory=dict, compare=False)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters on one device."""
        return tuple(unit_parameters(self.both.forward, self.concrete))

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """The atoms of the mesh over which devices do unequal work, in its order."""
        graphs = (self.both.forward, self.both.backward)
        found = query_atoms(graphs) if self.concrete.consecutive else frozenset()
        return tuple(name for name in self.concrete.mesh.names if name in found)

    def templates(self, place: Mapping[str, int]) -> Lowered:
        """The templates on the devices at a place; the same object for equal ones."""
        key = tuple(place[atom] for atom in self.variants)
        if key not in self._known:
            made = lower(
                self.both,
                replace(self.concrete, place=dict(zip(self.variants, key, strict=True))),
                gathered=self.gathered,
                numbers=self.numbers,
                split=self.split,
                streams=self.streams,
            )
            self._known[key] = self._alike.setdefault(made, made)
        return self._known[key]
