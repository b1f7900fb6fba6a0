"""Closed forms of what data parallelism sends for one block, and of the parameters that a device stores.

The same rules as `stage.trace.data_parallel`, on expressions: parameters are taken together by the axes over which
their gradients are pending; ZeRO shards over the inner of these axes; FSDP pads each parameter by rows.
"""

from typing import Any

import sympy

from stage.graph import Graph
from stage.model import Block
from stage.request import Request
from stage.summary.symbolic import Local, tidy
from stage.symbols import dtype_bytes
from stage.synthesis import symbol_values
from stage.tensor import Size
from stage.trace.concrete import Concrete
from stage.trace.parameters import STORED, Parameter, Sharding, unit_parameters

__all__ = ["data_parallel", "stored_parameters"]

Axes = tuple[str, ...]
Members = list[tuple[Parameter, Size]]
"""Parameters, each with the expression of the elements that one device computes with."""


def sharding(request: Request) -> Sharding:
    """What data parallelism shards in this job."""
    split = request.strategy.dp_shard is not None
    return Sharding(
        request.strategy.zero, frozenset(request.mesh.expand(["dp_replicate"])) if split else frozenset()
    )


def stored_parameters(
    request: Request, graph: Graph, local: Local, skip: frozenset[str] = frozenset()
) -> Size:
    """Parameters of a block that one device stores between steps, but for those to `skip`, as an expression."""
    found = _elements(request, graph, local, skip)
    shards = sharding(request)
    return sum((size for p, size in found if _is_whole(p, shards)), sympy.Integer(0)) + sum(
        _shard(p, size, request, shards, local) for p, size in found if not _is_whole(p, shards)
    )


def _is_whole(p: Parameter, shards: Sharding) -> bool:
    return shards.zero < 3 or not shards.split(p.data)[0]


def _elements(request: Request, graph: Graph, local: Local, skip: frozenset[str]) -> Members:
    """Each parameter of a block with the expression of the elements that one device computes with."""
    dtypes = {"compute": request.dtype, "gradient": request.grad_dtype}
    concrete = Concrete(symbol_values(request), request.mesh, dtypes)
    numbers = {p.name: p for p in unit_parameters(graph, concrete)}
    return [
        (numbers[t.name], local.tensor(t, graph.layouts[t.name]).elements)
        for t in graph.parameters
        if t.name not in skip
    ]


def _shard(p: Parameter, size: Size, request: Request, shards: Sharding, local: Local) -> Size:
    """Elements of a parameter that one device stores under FSDP; padding shows where rows do not divide."""
    axes = shards.split(p.data)[0]
    if p.rows % request.mesh.degree(axes) == 0:
        return size / local.degree(axes)
    return sympy.ceiling(p.rows / local.degree(axes)) * p.columns


def data_parallel(
    request: Request, block: Block, graph: Graph, local: Local, skip: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """The collectives that one block's parameters and gradients add to a step.

    Without FSDP the gradients of several blocks share the collective of a bucket, to which a block adds this much.
    Gradients of parameters to `skip` are reduced with those of another block.
    """
    members = _elements(request, graph, local, frozenset())
    own = [(p, size) for p, size in members if p.name not in skip]
    entries = _gathers(request, block, members, local) if request.strategy.zero == 3 else []
    for (expert, data), group in _by_axes(own):
        entries += _reductions(
            request, local, "expert " if expert else "", sharding(request).split(data), group
        )
    return entries + _replicated(request, own, local)


def _width(p: Parameter, request: Request) -> int:
    """Bytes of an element of a parameter as it is stored and gathered."""
    return dtype_bytes(request.param_dtype if p.dtype == STORED else p.dtype)


def _by_axes(members: Members) -> list[tuple[tuple[bool, Axes], Members]]:
    """Parameters whose gradients are reduced over the same axes."""
    groups: dict[tuple[bool, Axes], Members] = {}
    for p, size in members:
        groups.setdefault((p.expert, p.data), []).append((p, size))
    return sorted(groups.items(), key=lambda item: item[0])


def _gathers(request: Request, block: Block, members: Members, local: Local) -> list[dict[str, Any]]:
    """The all-gathers of FSDP before a block's forward and, but for the head, before its backward."""
    shards, keep = sharding(request), request.strategy.reshard_after_forward
    found = []
    for (expert, data), group in _by_axes(members):
        inner, name = shards.split(data)[0], "expert parameters" if expert else "parameters"
        if not inner:
            continue
        part = sum(_shard(p, size, request, shards, local) * _width(p, request) for p, size in group)
        again = inner if keep is True else () if keep is False else request.mesh.expand(["dp_shard"])
        again = tuple(axis for axis in inner if axis in again) if block != request.model.head else ()
        twice = again == inner
        found.append(_entry(name, "all_gather", inner, 1 + twice, "micro-batch", part, local))
        if again and not twice:
            larger = part * local.degree(inner) / local.degree(again)
            found.append(_entry(f"{name} again", "all_gather", again, 1, "micro-batch", larger, local))
    return found


def _reductions(
    request: Request, local: Local, prefix: str, axes: tuple[Axes, Axes], group: Members
) -> list[dict[str, Any]]:
    """The reduction of gradients over these axes, and the gather of parameters that a sharded optimizer updated."""
    (inner, outer), zero, shards = axes, request.strategy.zero, sharding(request)
    gradient = dtype_bytes(request.grad_dtype)
    degree = local.degree(inner)
    if zero == 3 and inner:
        part = sum(_shard(p, size, request, shards, local) for p, size in group)
    else:
        part = sum(size for _, size in group) / degree
    per = "micro-batch" if request.grad_reduce == "microbatch" else "step"
    found = []
    if inner:
        found.append(
            _entry(f"{prefix}gradients", "reduce_scatter", inner, 1, per, part * degree * gradient, local)
        )
    if outer:
        found.append(_entry(f"{prefix}gradients", "all_reduce", outer, 1, per, part * gradient, local))
    if 0 < zero < 3 and inner:
        stored = sum(size * _width(p, request) for p, size in group) / degree
        found.append(_entry(f"{prefix}parameters", "all_gather", inner, 1, "step", stored, local))
    return found


def _replicated(request: Request, members: Members, local: Local) -> list[dict[str, Any]]:
    """Sums of the gradients of parameters that several devices of one model replica hold alike."""
    shards, width = sharding(request), dtype_bytes(request.grad_dtype)
    sums: dict[Axes, Size] = {}
    for p, size in members:
        if p.model:
            held = size if _is_whole(p, shards) else _shard(p, size, request, shards, local)
            sums[p.model] = sums.get(p.model, sympy.Integer(0)) + held
    return [
        _entry("replicated gradients", "all_reduce", axes, 1, "step", size * width, local)
        for axes, size in sorted(sums.items())
    ]


def _entry(
    tensor: str, kind: str, axes: Axes, count: int, per: str, size: Size, local: Local
) -> dict[str, Any]:
    return {
        "tensors": tensor,
        "kind": kind,
        "axes": " x ".join(local.words(axes)),
        "count": count,
        "per": per,
        "bytes": str(tidy(size)),
        "bytes_value": local.value(size),
    }
