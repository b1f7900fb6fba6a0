"""Gradient buckets: which parameters are reduced together, and when they are complete.

As in Megatron-LM parameters are taken in reverse order of their declaration and a bucket is closed once it has its
size; experts have buckets of their own, and so have weights stored in 8 bits, and a table that two ranks share where
gradients are scattered. With a
sharded optimizer a parameter starts at a multiple of 64 elements and a bucket is padded to a multiple of
lcm(shards, 128).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

from stage.mesh import Mesh
from stage.trace.parameters import STORED, Parameter, Sharding

__all__ = ["Bucket", "plan_buckets"]

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients reduced by one collective: `elements` with padding, of which `used` are parameters'.

    `unit` is the position on the rank of the block after whose backward the bucket is complete. `shard` are the axes
    over which it is scattered, `replicate` those over which it is all-reduced. Its parameters are stored in `dtype`.
    """

    expert: bool
    unit: int
    elements: int
    used: int
    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    dtype: str = STORED

    def owned(self, mesh: Mesh) -> int:
        """Elements whose optimizer state one device holds."""
        return self.elements // mesh.degree(self.shard)


def plan_buckets(
    units: Sequence[Sequence[Parameter]],
    sharding: Sharding,
    mesh: Mesh,
    bucket_size: int,
    shared: Collection[str] = (),
    first: int = 0,
) -> list[Bucket]:
    """The buckets of a chunk whose blocks have these parameters: dense ones, then experts', each from last to first.

    `bucket_size` is in elements; 0 makes one bucket of each kind. `shared` names parameters of several ranks. `first`
    is the position on the rank of the chunk's first block.
    """
    buckets: list[Bucket] = []
    kinds = dict.fromkeys((p.expert, p.data, p.dtype) for unit in units for p in unit)
    for expert, data, dtype in sorted(kinds):
        shard, replicate = sharding.split(data)
        same = [[p for p in unit if (p.expert, p.data, p.dtype) == (expert, data, dtype)] for unit in units]
        tensors = _reversed(same, frozenset(shared) if shard else frozenset())
        cut = _cut(tensors, expert, shard, replicate, mesh, bucket_size)
        buckets += [replace(bucket, unit=first + bucket.unit, dtype=dtype) for bucket in cut]
    return buckets


def _cut(
    tensors: Sequence[tuple[int, int, bool]],
    expert: bool,
    shard: tuple[str, ...],
    replicate: tuple[str, ...],
    mesh: Mesh,
    bucket_size: int,
) -> list[Bucket]:
    """The buckets of tensors of one kind: (block, elements, whether it stands alone)."""
    buckets: list[Bucket] = []
    filled, unit = 0, 0

    def close(unit: int) -> None:
        alignment = lcm(mesh.degree(shard), BUCKET_ALIGNMENT) if shard else 1
        buckets.append(Bucket(expert, unit, -(-filled // alignment) * alignment, filled, shard, replicate))

    for current, elements, alone in tensors:
        if alone and filled:
            close(unit)
            filled = 0
        if shard:
            filled = -(-filled // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        filled, unit = filled + elements, current
        if alone or (bucket_size and filled >= bucket_size):
            close(unit)
            filled = 0
    if filled:
        close(unit)
    return buckets


def _reversed(units: Sequence[Sequence[Parameter]], shared: frozenset[str]) -> list[tuple[int, int, bool]]:
    """Block, elements and whether it is shared of each tensor of one kind, from the last to the first.

    Weights of a fused operation are one tensor. Those of experts are one for each expert, whose tensors stand together.
    """
    found: list[tuple[int, int, bool]] = []
    for i in reversed(range(len(units))):
        for parts, group in groupby(reversed(units[i]), key=lambda p: p.parts):
            tensors = [list(same) for _, same in groupby(group, key=lambda p: p.fused)]
            sizes = [(i, sum(p.elements for p in same) // parts, same[0].name in shared) for same in tensors]
            found += sizes * parts
    return found
