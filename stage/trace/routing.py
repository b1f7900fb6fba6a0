"""Routing: how many tokens the experts of a device get, where the load of the experts is given.

Tokens of one micro-batch come from `sources` equal parts, and each source sends `slots[e]` of them to expert e. A
tensor over `experts` and `slots` then holds, on the device that has certain experts and a share of their slots, the
tokens of these experts from all sources, divided by the devices that share the slots. Experts without tokens take no
part: no kernel reads their weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from stage.errors import StrategyError
from stage.expert_load import token_capacity, token_counts
from stage.graph import Graph
from stage.layout import Layout
from stage.mesh import Mesh
from stage.tensor import Size, Tensor

__all__ = ["Place", "Routing", "holds_tokens", "make_routing", "place_index", "variant_atoms"]

Ints = NDArray[np.int64]

Place = Mapping[str, int] | Mapping[str, Ints]
"""Coordinates on the mesh by atom, of one device or of several at once; one that is missing is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Slots of a source for each expert, int64[experts], and those of them that hold a token; the rest are padding."""

    slots: Ints
    filled: Ints
    sources: int

    @property
    def padded(self) -> bool:
        """Whether some slots hold no token."""
        return not np.array_equal(self.slots, self.filled)

    def tokens(
        self, experts: Sequence[str], slots: Sequence[str], place: Place, mesh: Mesh, *, filled: bool = False
    ) -> Ints:
        """Slots on the devices at a place, if `experts` shard the experts and `slots` the slots of each.

        With `filled` only those that hold a token. Of one device the array has no dimension.
        """
        ends = np.concatenate([[0], np.cumsum(self.filled if filled else self.slots)])
        width = len(self.slots) // mesh.degree(experts)
        first = place_index(experts, place, mesh) * width
        found: Ints = (ends[first + width] - ends[first]) * self.share(slots, mesh)
        return found

    def share(self, slots: Sequence[str], mesh: Mesh) -> int:
        """From how many sources a device has slots that are sharded over these atoms."""
        assert self.sources % mesh.degree(slots) == 0, f"{slots} shard the slots of {self.sources} sources"
        return self.sources // mesh.degree(slots)

    def local_sizes(
        self, tensor: Tensor, layout: Layout, place: Place, mesh: Mesh, *, filled: bool = False
    ) -> dict[str, Size]:
        """Sizes of a tensor's dims on the device at a place that its layout does not say.

        They are the experts that have tokens and, of a tensor with slots, the mean of these experts' slots: the
        product of both is the number of tokens exactly.
        """
        names = tensor.dim_names
        if "experts" not in names:
            return {}
        experts = layout.dims[names.index("experts")]
        width = len(self.slots) // mesh.degree(experts)
        first = int(place_index(experts, place, mesh)) * width
        busy = int(np.count_nonzero(self.slots[first : first + width]))
        if "slots" not in names:
            return {"experts": busy}
        slots = layout.dims[names.index("slots")]
        mean = Fraction(int(self.tokens(experts, slots, place, mesh, filled=filled)), max(busy, 1))
        return {"experts": busy, "slots": mean.numerator if mean.denominator == 1 else mean}


def make_routing(
    popularity: Sequence[int],
    graphs: Iterable[Graph],
    sizes: Mapping[str, int],
    mesh: Mesh,
    capacity_factor: float | None,
    *,
    padded: bool,
) -> Routing:
    """The routing of a block with experts, of whose graphs these are all, by the popularities of the experts.

    A `StrategyError` if the tokens of a micro-batch do not divide by the sources.
    """
    sources = mesh.degree(slot_atoms(graphs))
    tokens, top_k, experts = sizes["batch"] * sizes["seq"], sizes["top_k"], len(popularity)
    if tokens % sources:
        raise StrategyError(
            f"{tokens} tokens of a micro-batch do not divide by the {sources} ranks that route their own; "
            "choose a batch or seq that does, or a balanced expert_load"
        )
    filled = token_counts(popularity, tokens // sources, top_k)
    if capacity_factor is None:
        return Routing(filled, filled, sources)
    capacity = token_capacity(capacity_factor, tokens // sources, top_k, experts)
    filled = np.minimum(filled, capacity)
    return Routing(np.full_like(filled, capacity) if padded else filled, filled, sources)


def place_index(atoms: Iterable[str], place: Place, mesh: Mesh) -> Ints:
    """The number of a place along flattened atoms, the last one varying fastest.

    >>> from stage.mesh import build_mesh
    >>> int(place_index(("dp", "tp"), {"dp": 1, "tp": 2}, build_mesh(dp=2, tp=4)))
    6
    """
    found = np.zeros((), np.int64)
    for atom in atoms:
        found = found * mesh.degree(atom) + np.asarray(place.get(atom, 0), np.int64)
    return np.asarray(found)


def holds_tokens(tensor: Tensor) -> bool:
    """Whether the size of a tensor on a device depends on the load of its experts."""
    return {"experts", "slots"} <= set(tensor.dim_names)


def slot_atoms(graphs: Iterable[Graph]) -> frozenset[str]:
    """The atoms that shard the slots of some tensor: as many sources have their own slots at least."""
    return frozenset(
        atom
        for graph in graphs
        for name, layout in graph.layouts.items()
        if holds_tokens(graph.tensors[name])
        for atom in layout.dims[graph.tensors[name].dim_names.index("slots")]
    )


def variant_atoms(graphs: Iterable[Graph], routing: Routing | None, *, pairwise: bool) -> frozenset[str]:
    """The atoms over which devices differ: those that shard experts with unequal loads, and those of a permute.

    A permute sends to a rank that depends on the own one, which its splits say and its messages do.
    """
    found: set[str] = set()
    unequal = routing is not None and len(np.unique(routing.slots)) > 1
    for graph in graphs:
        for name, layout in graph.layouts.items():
            tensor = graph.tensors[name]
            if unequal and holds_tokens(tensor):
                found.update(layout.dims[tensor.dim_names.index("experts")])
        for node in graph.nodes:
            if node.op == "permute" and (
                pairwise or (routing is not None and holds_tokens(graph.tensors[node.inputs[0]]))
            ):
                found.update(node.attrs["step"].axes)
    return frozenset(found)
