"""Tensors of a symbolic program: named dimensions, a dtype and a role.

A tensor says nothing of where it lives; that is its layout. Its sizes are sympy expressions in the named
sizes of a model, or plain integers once a program has been made concrete: everything that computes with
sizes works on both.

Invariants
----------
* The names of the dimensions of one tensor are distinct.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

__all__ = ["DTYPES", "Dim", "Scales", "Size", "Tensor", "resolve_dtypes"]

Size = Any
"""A sympy expression or an int; sympy has no types to say it better."""

DTYPES = ("compute", "gradient")
"""Names that stand for a dtype chosen later: the model's own, and the one its gradients are kept in."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: its name (`seq`, `d_model`, ...) and its number of elements."""

    name: str
    size: Size


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a quantised tensor: one of `width` bytes for each block.

    `blocks` are runs of dimensions, taken as one, with the elements of a block along them; along any other dimension
    a block has one element. A last block may be shorter.
    """

    blocks: tuple[tuple[tuple[str, ...], int], ...]
    width: int

    def count(self, tensor: "Tensor") -> Size:
        """How many scales a tensor has.

        >>> x = Tensor("x", (Dim("seq", 4), Dim("d_model", 576)))
        >>> Scales(((("d_model",), 128),), 4).count(x), Scales(((("seq",), 4), (("d_model",), 128)), 4).count(x)
        (20, 5)
        """
        merged = {name for names, _ in self.blocks for name in names}
        alone = prod((dim.size for dim in tensor.dims if dim.name not in merged), start=1)
        runs = (
            (prod((tensor.size(name) for name in names), start=1), length) for names, length in self.blocks
        )
        return alone * prod((-(-size // length) for size, length in runs), start=1)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a symbolic program.

    `role` is one of `activation`, `parameter`, `gradient` (of a parameter), `weight` (a quantised copy of a parameter,
    made once a step) and `index` (integers that take no part in differentiation). `dtype` is a dtype's name, or one of
    `DTYPES`; a quantised tensor has `scales`. The first `rows` dimensions of a parameter are the rows of its matrix, by
    which FSDP shards it; a `shared` parameter is one and the same in every block that names it.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: str = "compute"
    role: str = "activation"
    rows: int = 1
    shared: bool = False
    scales: Scales | None = None

    def __post_init__(self) -> None:
        names = [dim.name for dim in self.dims]
        assert len(set(names)) == len(names), f"{self.name} repeats a dimension: {names}"

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The names of the dimensions, in order."""
        return tuple(dim.name for dim in self.dims)

    @property
    def elements(self) -> Size:
        """The number of elements, as a product of the sizes."""
        return prod((dim.size for dim in self.dims), start=1)

    def bytes(self, width: Callable[[str], int]) -> Size:
        """The bytes of all elements, of which one has the `width` of the dtype, and of the scales."""
        scales = 0 if self.scales is None else self.scales.width * self.scales.count(self)
        return self.elements * width(self.dtype) + scales

    def size(self, dim: str) -> Size:
        """The size of the dimension called `dim`."""
        return next(d.size for d in self.dims if d.name == dim)

    def named(self, name: str, **changes: Any) -> "Tensor":
        """The same tensor under another name (and with other fields, if given)."""
        return replace(self, name=name, **changes)


def resolve_dtypes(dtype: str, names: Mapping[str, str]) -> str:
    """The dtype that a tensor's dtype stands for, given what `compute` and `gradient` mean."""
    return names.get(dtype, dtype)
