"""Parameters of a stage and how their gradients are brought together.

Over the axes that replicate a parameter its gradient is pending. Those that carry data (dp and cp; for experts `edp`,
the axes that replicate an expert) are reduced in buckets by the data-parallel plan; what remains are parts of `tp`
(norms, routers and row-parallel biases under sequence parallelism, keys and values of replicated KV heads), summed
once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from stage.graph import Graph
from stage.mesh import Mesh
from stage.precision import FP8
from stage.tensor import Tensor
from stage.trace.concrete import Concrete

__all__ = ["Parameter", "Sharding", "unit_parameters"]


STORED = "parameter"
"""The dtype that parameters are stored and gathered in, where none is said."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter on one device: `elements` after sharding for compute, of which `rows` x `columns`.

    `data` are the axes of its data-parallel reduction, `model` those of the other one; `expert` says which buffer it
    belongs to, `fused` names the operation whose weights are stored as one. Weights of experts are stored apart,
    so they are in `parts`. Those stored in 8 bits have that `dtype`, and so many `scales` of their own.
    """

    name: str
    rows: int
    columns: int
    data: tuple[str, ...]
    model: tuple[str, ...]
    expert: bool
    fused: str
    parts: int = 1
    dtype: str = STORED
    scales: int = 0

    @property
    def elements(self) -> int:
        """Elements on one device."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Sharding:
    """What data parallelism shards: over which part of a parameter's data axes, and from which ZeRO stage on."""

    zero: int
    replicate: frozenset[str]

    def split(self, data: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that shard and those that replicate (HSDP's outer ones, or all without ZeRO)."""
        if self.zero == 0:
            return (), tuple(data)
        inner = tuple(axis for axis in data if axis not in self.replicate)
        return inner, tuple(axis for axis in data if axis in self.replicate)


def unit_parameters(graph: Graph, concrete: Concrete) -> list[Parameter]:
    """The parameters of a block on one device, in the order in which the model declares them."""
    readers = graph.consumers()
    apart = _experts_apart(concrete.mesh)
    found: list[Parameter] = []
    for tensor in graph.parameters:
        layout = graph.layouts[tensor.name]
        local = concrete.local(tensor, layout)
        sizes = [int(dim.size) for dim in local.dims]
        pending = layout.dual([name for name, _ in concrete.mesh.atoms]).pending
        expert = apart and "experts" in tensor.dim_names
        data = _in_order(pending & _data_axes(concrete.mesh, expert), concrete.mesh)
        model = _in_order(pending - _data_axes(concrete.mesh, expert) - {"pp"}, concrete.mesh)
        fused = readers[tensor.name][0].name if tensor.name in readers else tensor.name
        rows, columns = prod(sizes[: tensor.rows]), prod(sizes[tensor.rows :])
        parts = next((int(dim.size) for dim in local.dims if dim.name == "experts"), 1)
        dtype = FP8 if tensor.dtype == FP8 else STORED
        scales = _scales(local, parts, fused not in {p.fused for p in found})
        found.append(
            Parameter(
                tensor.name, rows, columns, data, model, expert, fused, parts, dtype, scales
            )
        )  # fmt: skip
    return found


def _scales(local: Tensor, parts: int, first: bool) -> int:
    """Scales of a parameter in 8 bits; one of a whole tensor counts with the `first` of those stored as one."""
    if local.dtype != FP8:
        return 0
    return parts * first if local.scales is None else int(local.scales.count(local))


def _experts_apart(mesh: Mesh) -> bool:
    """Whether experts' gradients are reduced apart from all others: where experts are split, or over other ranks."""
    return mesh.degree("ep") > 1 or _data_axes(mesh, True) != _data_axes(mesh, False)


def _data_axes(mesh: Mesh, expert: bool) -> frozenset[str]:
    return frozenset(mesh.expand(("edp",) if expert else ("dp", "cp")))


def _in_order(axes: frozenset[str], mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name, _ in mesh.atoms if name in axes)
