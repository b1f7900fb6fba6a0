"""Degrees that make a mesh: each a positive integer, and all blocks of consecutive ranks nested in one another."""

import math
from itertools import pairwise

from stage.errors import MeshError

__all__ = ["check_chain", "check_degrees", "kv_replicas"]


def check_degrees(**degrees: int | None) -> None:
    """MeshError for the first degree that is not a positive integer."""
    for name, degree in degrees.items():
        if degree is not None and (type(degree) is not int or degree < 1):
            raise MeshError(f"{name} = {degree!r} is not a degree; give {name} an integer of at least 1")


def kv_replicas(axes: str, degree: int, kv_heads: int | None) -> int:
    """How many of the ranks that share out the heads hold the same KV head."""
    if kv_heads is None or kv_heads % degree == 0:
        return 1
    if kv_heads < degree and degree % kv_heads == 0:
        return degree // kv_heads
    raise MeshError(
        f"kv_heads = {kv_heads} and {axes} = {degree} do not divide one another; choose a {axes} that divides "
        "kv_heads, or is a multiple of it"
    )


def check_chain(*products: tuple[tuple[str, int], ...]) -> None:
    """MeshError where two products of inner degrees cut the ranks so that neither cut refines the other."""
    cuts = sorted((math.prod(degree for _, degree in product), product) for product in products)
    for (low, inner), (high, outer) in pairwise(cuts):
        if high % low:
            first, second = (" x ".join(f"{n} {d}" for n, d in p if d > 1) for p in (outer, inner))
            raise MeshError(
                f"{first} = {high} ranks and {second} = {low} ranks do not divide one another, but both are "
                "blocks of consecutive ranks; choose degrees so that one is a multiple of the other"
            )
