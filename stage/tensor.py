"""Tensors of a symbolic program: named dimensions, a dtype and a role.

A tensor says nothing of where it lives; that is its layout. Its sizes are sympy expressions in the named
sizes of a model, or plain integers once a program has been made concrete: everything that computes with
sizes works on both.

Invariants
----------
* The names of the dimensions of one tensor are distinct.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

__all__ = ["DTYPES", "Dim", "Size", "Tensor", "resolve_dtypes"]

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
class Tensor:
    """A tensor of a symbolic program.

    `role` is one of `activation`, `parameter`, `gradient` (of a parameter) and `index` (integers that take
    no part in differentiation). `dtype` is a dtype's name, or one of `DTYPES`. The first `rows` dimensions of a
    parameter are the rows of its matrix, by which FSDP shards it; a `shared` parameter is one and the same in every
    block that names it.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: str = "compute"
    role: str = "activation"
    rows: int = 1
    shared: bool = False

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

    def size(self, dim: str) -> Size:
        """The size of the dimension called `dim`."""
        return next(d.size for d in self.dims if d.name == dim)

    def named(self, name: str, **changes: Any) -> "Tensor":
        """The same tensor under another name (and with other fields, if given)."""
        return replace(self, name=name, **changes)


def resolve_dtypes(dtype: str, names: Mapping[str, str]) -> str:
    """The dtype that a tensor's dtype stands for, given what `compute` and `gradient` mean."""
    return names.get(dtype, dtype)
