"""Sizes of one device as expressions: a global size divided by the degrees of the axes that shard it.

Degrees are symbols named like the axes of the mesh (`tp`, `dp`, ...), so that a cost formula applied to local sizes is
a closed form in model and mesh. An axis of degree 1 shards nothing and does not appear.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import sympy

from stage.layout import Layout
from stage.mesh import Mesh
from stage.symbols import exact, size
from stage.tensor import Dim, Size, Tensor

__all__ = ["Local", "tidy"]

DENSE, SPARSE = ("dp", "cp", "tp"), ("ep", "etp")


@dataclass(frozen=True)
class Local:
    """What one device holds, in symbols; `values` are the numbers that sizes stand for, degrees are added to them.

    `sources` is what the size of that name is: the axes along which tokens are spread.
    """

    mesh: Mesh
    values: Mapping[str, int]
    sources: tuple[str, ...] = ()
    _degrees: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def words(self, atoms: Iterable[str]) -> list[str]:
        """Atoms by the names of the axes that they make up."""
        text = self.mesh.describe(atoms)
        return text.split(" x ") if text else []

    def degree(self, atoms: tuple[str, ...]) -> Size:
        """The number of devices along these atoms, as a product of symbols.

        `edp`, which nobody gives, is written as what is left of dp x cp x tp beside the experts' axes.
        """
        if atoms not in self._degrees:
            self._degrees[atoms] = prod(
                (self._symbol(word) for word in self.words(atoms)), start=sympy.Integer(1)
            )
        return self._degrees[atoms]

    def used(self) -> dict[str, int]:
        """The axes and parts of axes that expressions have named so far, with their degrees."""
        words = sorted({word for atoms in self._degrees for word in self.words(atoms)} - {"edp"})
        return {word: self.mesh.degree(word) for word in words}

    def _symbol(self, word: str) -> Size:
        if word != "edp":
            return size(word)
        dense, sparse = (self._present(axes) for axes in (DENSE, SPARSE))
        return prod(dense, start=sympy.Integer(1)) / prod(sparse, start=sympy.Integer(1))

    def _present(self, axes: Iterable[str]) -> list[Size]:
        return [size(axis) for axis in axes if self.mesh.degree(axis) > 1]

    def tensor(self, tensor: Tensor, layout: Layout) -> Tensor:
        """The part of a tensor that one device holds."""
        known = {size("sources"): self.degree(self.sources)}
        dims = [
            Dim(dim.name, sympy.sympify(dim.size).xreplace(known) / self.degree(axes))
            for dim, axes in zip(tensor.dims, layout.dims, strict=True)
        ]
        return replace(tensor, dims=tuple(dims))

    def value(self, expr: Size) -> int:
        """What an expression comes to at the mesh's degrees; a fraction, as of an expert's slots, is rounded."""
        known = dict(self.values)
        known |= {
            s.name: self.mesh.degree(s.name) for s in sympy.sympify(expr).free_symbols if s.name not in known
        }
        return round(exact(expr, known))


def tidy(expr: Size) -> Size:
    """An expression in a form that is short to read: common factors outside, one denominator, blocks rounded up.

    >>> a, b, c = size("a"), size("b"), size("c")
    >>> tidy(2 * a * b / c + 4 * a / c), tidy(-(-a // 32))
    (2*a*(b + 2)/c, ceiling(a/32))
    """
    rounded = sympy.sympify(expr).replace(
        lambda part: isinstance(part, sympy.floor) and part.args[0].could_extract_minus_sign(),
        lambda part: -sympy.ceiling(-part.args[0]),
    )
    return sympy.factor_terms(rounded)
