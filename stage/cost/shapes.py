"""Sizes of a kernel's products of matrices, from the shapes of what it reads and makes and its number of operations."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Attention", "Product", "attention_of", "elements_of", "product_of"]

Shape = tuple[float, ...]

SIDE_BY_SIDE = ("contract_group", "contract_group_dgrad", "contract_group_wgrad")


class Product(NamedTuple):
    """Sizes of a matrix multiplication: `groups` products of m x k by k x n; fractions under uneven loads."""

    groups: float
    m: float
    n: float
    k: float


class Attention(NamedTuple):
    """Sizes of a fused attention: each of batch x heads meets `share` of its queries x keys.

    `qk_dim` is the length of a query and a key, `v_dim` of a value. With fewer `kv_heads` several heads share keys.
    """

    batch: float
    heads: float
    kv_heads: float
    queries: float
    keys: float
    qk_dim: float
    v_dim: float
    share: float

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that meet."""
        return self.batch * self.heads * self.queries * self.keys * self.share


def elements_of(shape: Sequence[float]) -> float:
    """Elements of a tensor."""
    return math.prod(shape)


def product_of(op: str, flops: float, operands: Sequence[Shape], results: Sequence[Shape]) -> Product | None:
    """The sizes of a product of two operands, None where shapes do not say them.

    With a, b, c elements of operands and result and f multiply-adds, m = f/b, n = f/a, k = f/c, groups = abc/f^2.
    Operands side by side, q, k and v or gate and up, are one. Where a mask leaves some of the pairs of a score matrix
    out, the product still computes all of them, so f counts all.

    >>> product_of("contract", 2 * 4 * 5 * 6, [(2, 2, 6), (6, 5)], [(2, 2, 5)])
    Product(groups=1.0, m=4.0, n=5.0, k=6.0)
    """
    if len(operands) < 2 or not results or not flops:
        return None
    grouped = op in SIDE_BY_SIDE
    first = len(operands) // 2 if op == "contract_group_dgrad" else 1
    second = first if op == "contract_group_dgrad" else len(results) if grouped else 1
    sides = operands[:first], operands[first : first + second], results if grouped else results[:1]
    a, b, c = (sum(map(elements_of, side)) for side in sides)
    f = flops / 2 if grouped else max(flops / 2, _scores((*operands[:2], results[0])))
    return Product(a * b * c / f**2, f / b, f / a, f / c)


def _scores(shapes: Sequence[Shape]) -> float:
    """Multiply-adds of a product with scores[batch, heads, queries, keys] and two tensors[batch, seq, heads, dim]."""
    if any(len(shape) != 4 for shape in shapes):
        return 0
    for at, (batch, heads, queries, keys) in enumerate(shapes):
        one, two = (shape for i, shape in enumerate(shapes) if i != at)
        lengths = Counter((one[1], two[1])) == Counter((queries, keys))
        if lengths and one[0] == two[0] == batch and max(one[2], two[2]) == heads and one[3] == two[3]:
            return batch * heads * queries * keys * one[3]
    return 0


def attention_of(op: str, flops: float, operands: Sequence[Shape]) -> Attention | None:
    """The sizes of a fused attention, forward or backward, None for another op or without shapes.

    Forward reads q, k, v[batch, seq, heads, dim] and multiplies twice, backward dy, q, k, v and five times, three of
    which are as long as a query and two as a value (`stage.ops.attention`); what is left of all pairs is the share.

    >>> attention_of("attention", 2 * 8 * 8 / 2 * (4 + 2), [(1, 8, 1, 4), (1, 8, 1, 4), (1, 8, 1, 2)])
    Attention(batch=1, heads=1, kv_heads=1, queries=8, keys=8, qk_dim=4, v_dim=2, share=0.5)
    """
    if op not in {"attention", "attention_backward"}:
        return None
    backward = op == "attention_backward"
    shapes = operands[backward : backward + 3]
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
        return None
    (batch, queries, heads, dim), (_, keys, kv_heads, _), (*_, v_dim) = shapes
    work = 2 * (3 * dim + 2 * v_dim if backward else dim + v_dim)
    share = flops / (work * batch * heads * queries * keys)
    return Attention(batch, heads, kv_heads, queries, keys, dim, v_dim, share)
