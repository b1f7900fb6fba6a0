"""Recipes of 8-bit training: what shares a scale, and what that asks of shapes and of communication.

Names and rules are those of Transformer Engine and of Megatron-LM's `--fp8-recipe`:

* `delayed` (Micikevicius et al. 2022, FP8 Formats for Deep Learning): one fp32 scale a tensor, from the largest values
  of steps before, which the ranks agree on once for all tensors;
* `tensorwise` (current scaling): one fp32 scale a tensor, from the tensor itself, which is therefore read twice; where
  shards are gathered their ranks agree on it first;
* `blockwise` (DeepSeek-V3 report, 2024, section 3.3.2): one fp32 scale for 128 elements along a product's sum, of
  weights for 128 x 128;
* `mxfp8` (OCP Microscaling Formats specification 1.0, 2023, table 1): one power of two, E8M0, for 32 elements along
  a product's sum.

E4M3 and E5M2 are of one size, so which of them gradients have changes nothing here.
"""

from dataclasses import dataclass
from typing import Literal

from stage.errors import StrategyError
from stage.tensor import Scales

__all__ = [
    "COLUMN",
    "FP8",
    "FP8_RECIPES",
    "RECIPES",
    "ROW",
    "Matrix",
    "Recipe",
    "check_precision",
    "check_use",
]

FP8 = "fp8"
"""The dtype of quantised tensors, and of what multiplies them."""

ROW, COLUMN = "row", "column"

Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor as the matrix that a product takes it for: its dims of rows and those of columns.

    Tokens x features, or for weights results x features; dims in neither count products of their own (experts).
    """

    rows: Dims
    columns: Dims


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors are quantised.

    `block` elements share a scale of `width` bytes, 0 for all of a tensor; with `square` those of weights are blocks in
    both dims. Rows and columns of a matrix on one device must be multiples of `rows` and `columns`; where they are
    shards of a longer row, or will be gathered, also of `block`. `amax` says when the largest value is found.
    """

    name: str
    block: int
    width: int
    rows: int
    columns: int
    square: bool = False
    amax: Literal["block", "current", "delayed"] = "block"

    def scales(self, matrix: Matrix, copy: str, weight: bool) -> Scales | None:
        """The scales of the `row` or `column` copy of a matrix; None for one of the whole tensor, which is not counted.

        A row copy has blocks along its rows, for a product that sums over columns; a column copy is the reverse.
        """
        if not self.block:
            return None
        along = [matrix.columns if copy == ROW else matrix.rows]
        if weight and self.square:
            along = [matrix.rows, matrix.columns]
        return Scales(tuple((dims, self.block) for dims in along), self.width)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("delayed", 0, 4, 16, 16, amax="delayed"),
        Recipe("tensorwise", 0, 4, 16, 16, amax="current"),
        Recipe("blockwise", 128, 4, 16, 16, square=True),
        Recipe("mxfp8", 32, 1, 32, 32),
    )
}
"""Multiples are those to which Transformer Engine pads tokens of experts, and to which it restricts features."""

FP8_RECIPES = ("none", *RECIPES)
"""What can be asked for."""

STORED = ("delayed", "tensorwise", "blockwise")
"""Recipes whose weights can be gathered in 8 bits; MXFP8's two copies are made behind the gather."""

SENT = ("blockwise", "mxfp8")
"""Recipes whose tokens can be sent in 8 bits, for they carry scales of their own."""


def check_precision(where: str, fp8: str, zero: int, *, stored: bool, sent: bool) -> None:
    """A `StrategyError`, of `where`, for weights `stored` or tokens `sent` in 8 bits that a recipe does not allow."""
    if stored and fp8 not in STORED:
        raise StrategyError(
            f"{where}: fp8_param_gather is not possible with fp8 = {fp8!r}, whose weights are gathered as they are; "
            f"leave it out or choose fp8 from {', '.join(STORED)}"
        )
    if stored and not zero:
        raise StrategyError(
            f"{where}: fp8_param_gather needs zero = 1, 2 or 3, for with zero = 0 nothing is gathered"
        )
    if sent and fp8 not in SENT:
        raise StrategyError(
            f"{where}: fp8_dispatch is not possible with fp8 = {fp8!r}, for scales must travel with their tokens; "
            f"leave it out or choose fp8 from {', '.join(SENT)}"
        )


def check_use(fp8: str, dtype: str, model: str, *, dispatch: bool) -> None:
    """A `StrategyError` where there is nothing to make 8 bits of, or for the `dispatch` of a model without experts."""
    if fp8 != "none" and dtype == FP8:
        raise StrategyError(
            f"dtype = {dtype} leaves nothing to the recipe fp8 = {fp8}; choose dtype bf16, fp16 or fp32"
        )
    if dispatch:
        raise StrategyError(f"fp8_dispatch sends tokens to experts, but {model} has none; leave it out")
