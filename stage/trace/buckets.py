"""Gradient buckets: which parameters are reduced together, and when they are complete.

As in Megatron-LM parameters are taken in reverse order of their declaration and a bucket is closed once it has its
size; experts have buckets of their own. With a sharded optimizer a parameter starts at a multiple of 64 elements and a
bucket is padded to a multiple of lcm(shards, 128).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from stage.mesh import Mesh
from stage.trace.parameters import Parameter, Sharding

__all__ = ["Bucket", "plan_buckets"]

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients reduced by one collective: `elements` with padding, of which `used` are parameters'.

    `unit` is the position on the stage of the block after whose backward the bucket is complete. `shard` are the axes
    over which it is scattered, `replicate` those over which it is all-reduced.
    """

    expert: bool
    unit: int
    elements: int
    used: int
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def owned(self, mesh: Mesh) -> int:
        """Elements whose optimizer state one device holds."""
        return self.elements // mesh.degree(self.shard)


def plan_buckets(
    units: Sequence[Sequence[Parameter]], sharding: Sharding, mesh: Mesh, bucket_size: int
) -> list[Bucket]:
    """The buckets of a stage whose blocks have these parameters: dense ones, then experts', each from last to first.

    `bucket_size` is in elements; 0 makes one bucket of each kind.
    """
    buckets: list[Bucket] = []
    kinds = dict.fromkeys((p.expert, p.data) for unit in units for p in unit)
    for expert, data in sorted(kinds):
        shard, replicate = sharding.split(data)
        buckets += _cut(units, expert, data, shard, replicate, mesh, bucket_size)
    return buckets


def _cut(
    units: Sequence[Sequence[Parameter]],
    expert: bool,
    data: tuple[str, ...],
    shard: tuple[str, ...],
    replicate: tuple[str, ...],
    mesh: Mesh,
    bucket_size: int,
) -> list[Bucket]:
    """The buckets of one kind of parameters."""
    buckets: list[Bucket] = []
    filled, unit = 0, 0

    def close(unit: int) -> None:
        alignment = lcm(mesh.degree(shard), BUCKET_ALIGNMENT) if shard else 1
        buckets.append(Bucket(expert, unit, -(-filled // alignment) * alignment, filled, shard, replicate))

    for current, tensors in _reversed(units, expert, data):
        if shard:
            filled = -(-filled // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        filled, unit = filled + sum(p.elements for p in tensors), current
        if bucket_size and filled >= bucket_size:
            close(unit)
            filled = 0
    if filled:
        close(unit)
    return buckets


def _reversed(
    units: Sequence[Sequence[Parameter]], expert: bool, data: tuple[str, ...]
) -> list[tuple[int, list[Parameter]]]:
    """Parameters of one kind from the last to the first; those of a fused operation are one."""
    found: list[tuple[int, list[Parameter]]] = []
    for i in reversed(range(len(units))):
        last = ""
        for p in reversed(units[i]):
            if p.expert != expert or p.data != data:
                continue
            if found and found[-1][0] == i and p.fused == last:
                found[-1][1].append(p)
            else:
                found.append((i, [p]))
            last = p.fused
    return found
