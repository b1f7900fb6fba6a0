"""A brute-force mesh in numpy: every device holds its local array, collectives run as rings and count what is sent.

A distributed tensor is one array whose first axes are the coordinates of the devices, in the order of the mesh, and
whose last axes are the dims of the local tensor. Everything is exact: use integers.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from stage.layout import Layout
from stage.mesh import Mesh
from stage.step import Step

Array = npt.NDArray[np.int64]
Rng = np.random.Generator


def place(x: Array, layout: Layout, mesh: Mesh, rng: Rng) -> Array:
    """The local tensors of `x`; where it is pending, random parts that reduce to `x`."""
    pending = [atom for atom in mesh.names if atom in layout.pending]
    parts = _parts(x, [mesh.degree(atom) for atom in pending], layout.reduction, rng)
    labels: list[str | int] = [*pending]
    shape = list(parts.shape[: len(pending)])
    for dim, atoms in enumerate(layout.dims):
        degrees = [mesh.degree(atom) for atom in atoms]
        labels += [*atoms, dim]
        shape += [*degrees, x.shape[dim] // math.prod(degrees)]
    split = parts.reshape(shape)
    order = [labels.index(label) for label in [*mesh.names, *range(x.ndim)] if label in labels]
    full = [1 if atom not in labels else mesh.degree(atom) for atom in mesh.names]
    local = [shape[labels.index(dim)] for dim in range(x.ndim)]
    result = split.transpose(order).reshape([*full, *local])
    return np.broadcast_to(result, [*(degree for _, degree in mesh.atoms), *local]).copy()


def _parts(x: Array, degrees: list[int], reduction: str, rng: Rng) -> Array:
    count = math.prod(degrees)
    parts = rng.integers(-99, 99, (count, *x.shape))
    if reduction == "sum":
        parts[-1] = x - parts[:-1].sum(axis=0)
    else:
        parts = x - np.abs(parts)
        np.put_along_axis(parts, rng.integers(0, count, (1, *x.shape)), x[None], axis=0)
    return parts.reshape([*degrees, *x.shape])


def collect(local: Array, layout: Layout, mesh: Mesh) -> Array:
    """The whole tensor; AssertionError where copies that should be equal are not."""
    names = list(mesh.names)
    for axis, atom in enumerate(names):
        if layout.state(atom) in ("R", "I"):
            first = local.take([0], axis=axis)
            assert (local == first).all(), f"copies over {atom} differ"
            local = first
        elif layout.state(atom) == "P":
            reduce = np.sum if layout.reduction == "sum" else np.max
            local = reduce(local, axis=axis, keepdims=True)
    order: list[int] = [axis for axis, atom in enumerate(names) if atom not in layout.sharding]
    for dim, atoms in enumerate(layout.dims):
        order += [names.index(atom) for atom in atoms] + [len(names) + dim]
    sizes = [
        local.shape[len(names) + dim] * math.prod(mesh.degree(atom) for atom in atoms)
        for dim, atoms in enumerate(layout.dims)
    ]
    return local.transpose(order).reshape(sizes)


def run(local: Array, step: Step, mesh: Mesh) -> tuple[Array, int]:
    """The local tensors after a step, and the elements sent by the device that sends most."""
    names = list(mesh.names)
    front = [names.index(atom) for atom in step.axes]
    rest = [axis for axis in range(local.ndim) if axis not in front]
    moved = local.transpose(front + rest)
    head, ranks = moved.shape[: len(front)], len(names) - len(front)
    n = math.prod(head)
    grouped = moved.reshape([n, -1, *moved.shape[len(front) + ranks :]])
    result, sent = _collective(grouped, step, mesh, n)
    result = result.reshape([*head, *moved.shape[len(front) : len(front) + ranks], *result.shape[2:]])
    return result.transpose(np.argsort(front + rest)), sent


def _collective(x: Array, step: Step, mesh: Mesh, n: int) -> tuple[Array, int]:
    """One step on an array of shape (rank in group, group, *local)."""
    src = step.src + 2 if isinstance(step.src, int) else 0
    dst = step.dst + 2 if isinstance(step.dst, int) else 0
    kind = step.kind
    if kind in ("vary", "slice", "pad"):
        return _locally(x, kind, src, dst), 0
    if kind == "all_gather":
        return ring_all_gather(x, src)
    if kind == "reduce_scatter":
        return ring_reduce_scatter(x, dst, step.reduction)
    if kind == "all_reduce":
        flat = x.reshape(n, x.shape[1], -1)
        size = flat.shape[2]
        flat = np.pad(
            flat, ((0, 0), (0, 0), (0, n - size if size < n else 0))
        )  # a number or two go round padded
        part, first = ring_reduce_scatter(flat, 2, step.reduction)
        whole, second = ring_all_gather(part, 2)
        return whole[:, :, :size].reshape(x.shape), first + second
    if kind == "all_to_all":
        return _all_to_all(x, step, mesh, src, dst)
    return _permute(x, step, mesh)


def _locally(x: Array, kind: str, src: int, dst: int) -> Array:
    n = len(x)
    if kind == "slice":
        return np.stack([np.split(x[rank], n, axis=dst - 1)[rank] for rank in range(n)])
    if kind == "pad":
        return np.stack([_padded(x[rank], rank, n, src - 1) for rank in range(n)])
    return x


def _padded(x: Array, rank: int, n: int, axis: int) -> Array:
    pieces = [np.zeros_like(x)] * n
    pieces[rank] = x
    return np.concatenate(pieces, axis=axis)


def _elements(x: Array) -> int:
    """Elements of one device's message in an array (rank, group, *message)."""
    return math.prod(x.shape[2:])


def ring_all_gather(x: Array, axis: int) -> tuple[Array, int]:
    """Each device passes on, n - 1 times, the piece it received last."""
    n, sent = len(x), 0
    ranks = np.arange(n)
    held = np.zeros((n, *x.shape), x.dtype)
    held[ranks, ranks] = x
    for turn in range(n - 1):
        message = held[ranks, (ranks - turn) % n]
        sent += _elements(message)
        held[(ranks + 1) % n, (ranks - turn) % n] = message
    return np.concatenate([held[:, piece] for piece in range(n)], axis=axis), sent


def ring_reduce_scatter(x: Array, axis: int, reduction: str) -> tuple[Array, int]:
    """Each device adds its part to the chunk it received last and passes it on, n - 1 times."""
    n, sent = len(x), 0
    ranks = np.arange(n)
    assert x.shape[axis] % n == 0, "choose sizes that divide"
    held = np.stack(np.split(x, n, axis=axis), axis=1)
    combine = np.add if reduction == "sum" else np.maximum
    for turn in range(n - 1):
        chunk = (ranks - turn - 1) % n
        message = held[ranks, chunk]
        sent += _elements(message)
        held[(ranks + 1) % n, chunk] = combine(held[(ranks + 1) % n, chunk], message)
    return held[ranks, ranks], sent


def _index(coordinate: dict[str, int], atoms: Iterable[str], mesh: Mesh) -> int:
    index = 0
    for atom in atoms:
        index = index * mesh.degree(atom) + coordinate[atom]
    return index


def _coordinates(step: Step, mesh: Mesh) -> list[dict[str, int]]:
    ranges = (range(mesh.degree(atom)) for atom in step.axes)
    return [dict(zip(step.axes, at, strict=True)) for at in itertools.product(*ranges)]


def _all_to_all(x: Array, step: Step, mesh: Mesh, src: int, dst: int) -> tuple[Array, int]:
    order = next((before for dim, before, _ in step.permutes if dim == step.src), step.axes)
    place_of = [_index(at, order, mesh) for at in _coordinates(step, mesh)]
    n, by_place = len(x), np.argsort(place_of)
    pieces = np.stack(np.split(x, n, axis=dst), axis=1)
    sent = (n - 1) * _elements(pieces[:, 0])
    return np.stack([np.concatenate([pieces[q, r] for q in by_place], axis=src - 1) for r in range(n)]), sent


def _permute(x: Array, step: Step, mesh: Mesh) -> tuple[Array, int]:
    devices = _coordinates(step, mesh)
    before = [tuple(_index(at, atoms, mesh) for _, atoms, _ in step.permutes) for at in devices]
    after = [tuple(_index(at, atoms, mesh) for _, _, atoms in step.permutes) for at in devices]
    source = [before.index(block) for block in after]
    assert sorted(source) == list(range(len(x))), "a permute sends each block to one device"
    moves = any(rank != origin for rank, origin in enumerate(source))
    return x[source], _elements(x) if moves else 0


def run_plan(local: Array, plan: Iterable[Step], mesh: Mesh) -> tuple[Array, list[int]]:
    """The local tensors after a plan, and what the busiest device sent in each step."""
    sent = []
    for step in plan:
        local, count = run(local, step, mesh)
        sent.append(count)
    return local, sent


def local_einsum(equation: str, *operands: Array, mesh: Mesh) -> Array:
    """The einsum of each device on its own local tensors."""
    device = "ABCDEFGH"[: len(mesh.atoms)]
    terms, result = equation.split("->")
    inputs = ",".join(device + term for term in terms.split(","))
    value: Array = np.einsum(f"{inputs}->{device}{result}", *operands)
    return value


def layouts(atoms: Iterable[str], rank: int, states: str = "RIP") -> list[Layout]:
    """Every layout of a tensor of `rank` dims over the atoms, in every order of atoms within a dim."""
    names = tuple(atoms)
    found: dict[Layout, None] = {}
    for order in itertools.permutations(names):
        for choice in itertools.product([*states, *range(rank)], repeat=len(names)):
            dims = tuple(
                tuple(a for a, s in zip(order, choice, strict=True) if s == dim) for dim in range(rank)
            )
            pending = frozenset(a for a, s in zip(order, choice, strict=True) if s == "P")
            invariant = frozenset(a for a, s in zip(order, choice, strict=True) if s == "I")
            found[Layout(dims, pending, invariant)] = None
    return list(found)


def reachable(src: Layout, dst: Layout) -> bool:
    """Whether a reshard may exist: nothing becomes pending, and R never becomes I."""
    free = all(src.state(atom) != "R" for atom in dst.invariant)
    return free and dst.pending <= src.pending
