"""Making a block concrete: symbols become the exact sizes that one device holds of each tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from stage.layout import Layout
from stage.mesh import Mesh
from stage.symbols import dtype_bytes, exact
from stage.tensor import Dim, Tensor, resolve_dtypes
from stage.trace.routing import Routing

__all__ = ["Concrete"]


@dataclass(frozen=True)
class Concrete:
    """What turns symbols into numbers: sizes by name, the mesh, and what the dtypes `compute` and `gradient` are.

    The numbers are those of the device at a `place`, its coordinates over the atoms that they depend on: with
    `consecutive` queries those of attention, with a `routing` of tokens those of experts. With `pairwise` an all-to-all
    is made of messages.
    """

    sizes: Mapping[str, int]
    mesh: Mesh
    dtypes: Mapping[str, str]
    consecutive: bool = False
    place: Mapping[str, int] = field(default_factory=dict)
    routing: Routing | None = None
    pairwise: bool = False

    def width(self, dtype: str) -> int:
        """Bytes an element."""
        return dtype_bytes(resolve_dtypes(dtype, self.dtypes))

    def scaled_width(self, tensor: Tensor) -> int | Fraction:
        """Bytes of an element of a tensor, with its share of the scales where it is quantised."""
        if tensor.scales is None:
            return self.width(tensor.dtype)
        whole = self.whole(tensor)
        return Fraction(int(whole.bytes(self.width)), int(whole.elements))

    def local(self, tensor: Tensor, layout: Layout, *, filled: bool = False) -> Tensor:
        """The tensor with the sizes that one device holds of it; with `filled` without slots that hold no token."""
        routed: dict[str, Any] = {}
        if self.routing is not None:
            routed = self.routing.local_sizes(tensor, layout, self.place, self.mesh, filled=filled)
        dims = []
        for dim, axes in zip(tensor.dims, layout.dims, strict=True):
            if dim.name in routed:
                dims.append(Dim(dim.name, routed[dim.name]))
                continue
            whole = exact(dim.size, self.sizes)
            dims.append(Dim(dim.name, _integer(Fraction(whole, self.mesh.degree(axes)) if axes else whole)))
        return replace(tensor, dims=tuple(dims))

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor with the sizes that all devices together hold of it."""
        return replace(tensor, dims=tuple(Dim(dim.name, exact(dim.size, self.sizes)) for dim in tensor.dims))


def _integer(value: int | Fraction) -> int | Fraction:
    """The value as an int where it is one; slots of an expert may be a fraction, whose products are whole again."""
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value
