"""Runs a graph on a simulated mesh: every device works on its own shards, reshards run as the oracle's rings.

An unsharded graph is one on a mesh of one device. A distributed tensor is one array whose first axes are the
coordinates of the devices, in the order of the mesh.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stage.graph import Graph, Node
from stage.layout import Layout
from stage.mesh import Mesh
from stage.ops import get_op
from stage.ops.ring import EXCHANGE
from stage.passes.backward import Differentiated
from stage.passes.shard import UNORDERED
from stage.symbols import evaluate
from stage.tensor import Tensor
from tests import functions, kernels, oracle
from tests.kernels import Call, Local

Floats = npt.NDArray[Any]
KERNELS = {**kernels.KERNELS, **functions.KERNELS}


def place(x: Floats, layout: Layout, mesh: Mesh, rng: np.random.Generator) -> Floats:
    """The local tensors of `x`; where it is pending, random parts that sum to `x`."""
    assert layout.reduction == "sum"
    pending = [atom for atom in mesh.names if atom in layout.pending]
    n = mesh.degree(pending)
    parts = rng.normal(size=(n, *x.shape)) if n > 1 else np.zeros((1, *x.shape))
    parts = parts - parts.mean(0) + x / n
    grid = tuple(degree for _, degree in mesh.atoms)
    found = np.zeros((*grid, *local_shape(x.shape, layout, mesh)), x.dtype)
    for at in np.ndindex(grid):
        here = dict(zip(mesh.names, at, strict=True))
        which = tuple(
            slice(start, start + size)
            for start, size in zip(starts(x.shape, layout, mesh, here), found.shape[len(grid) :], strict=True)
        )
        found[at] = parts[index(here, pending, mesh)][which]
    return found


def collect(local: Floats, layout: Layout, mesh: Mesh) -> Floats:
    """The whole tensor; AssertionError where copies that should be equal are not."""
    for axis, atom in enumerate(mesh.names):
        if layout.state(atom) in ("R", "I"):
            first = local.take([0], axis=axis)
            assert np.allclose(local, first), f"copies over {atom} differ"
            local = np.broadcast_to(first, local.shape)
    grid = local.shape[: len(mesh.names)]
    shape = [n * mesh.degree(a) for n, a in zip(local.shape[len(grid) :], layout.dims, strict=True)]
    whole = np.zeros(shape) if layout.reduction == "sum" else np.full(shape, -np.inf)
    for at in np.ndindex(grid):
        if any(at[i] and layout.state(atom) in ("R", "I") for i, atom in enumerate(mesh.names)):
            continue
        here = dict(zip(mesh.names, at, strict=True))
        which = tuple(
            slice(start, start + size)
            for start, size in zip(starts(shape, layout, mesh, here), local.shape[len(grid) :], strict=True)
        )
        combine = np.add if layout.reduction == "sum" else np.maximum
        whole[which] = combine(whole[which], local[at])
    return whole


def index(here: Mapping[str, int], atoms: Any, mesh: Mesh) -> int:
    """The mixed-radix number of a device's coordinates along `atoms`."""
    number = 0
    for atom in atoms:
        number = number * mesh.degree(atom) + here[atom]
    return number


def starts(shape: Any, layout: Layout, mesh: Mesh, here: Mapping[str, int]) -> tuple[int, ...]:
    """Where each dim of a device's shard begins in the whole tensor."""
    parts = zip(shape, layout.dims, strict=True)
    return tuple(index(here, atoms, mesh) * (size // mesh.degree(atoms)) for size, atoms in parts)


def local_shape(shape: Any, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    for size, atoms in zip(shape, layout.dims, strict=True):
        assert size % mesh.degree(atoms) == 0, f"{shape} does not divide as {layout}"
    return tuple(size // mesh.degree(atoms) for size, atoms in zip(shape, layout.dims, strict=True))


@dataclass
class Executor:
    """The values of a graph on a mesh; `sizes` gives every size symbol a value, `slots` the identity of slots.

    `order` are the positions of the tokens of a sequence, where they are not laid in order. `turned` says of a tensor
    how many ranks further along some axes each part of it has come.
    """

    mesh: Mesh
    sizes: Mapping[str, int]
    rng: np.random.Generator
    values: dict[str, Floats] = field(default_factory=dict)
    slots: dict[str, Floats] = field(default_factory=dict)
    order: Floats | None = None
    turned: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(evaluate(dim.size, self.sizes) for dim in tensor.dims)

    def layout(self, graph: Graph, name: str) -> Layout:
        return graph.layouts.get(name) or Layout(((),) * len(graph.tensors[name].dims))

    def put(self, graph: Graph, name: str, value: Floats) -> None:
        """Give an input, a parameter or a seed its value."""
        self.values[name] = place(value, self.layout(graph, name), self.mesh, self.rng)

    def get(self, graph: Graph, name: str) -> Floats:
        """The whole tensor, slots in the order of their tokens."""
        assert name not in self.turned, f"parts of {name} are not at home"
        whole = collect(self.values[name], self.layout(graph, name), self.mesh)
        if name in self.slots:
            layout = self.layout(graph, name)
            order = np.argsort(
                collect(
                    self.slots[name],
                    replace(
                        layout,
                        dims=layout.dims[:2],
                        pending=frozenset(),
                        invariant=layout.invariant | layout.pending,
                    ),
                    self.mesh,
                ),
                axis=1,
            )
            whole = np.take_along_axis(whole, order.reshape((*order.shape, *(1,) * (whole.ndim - 2))), axis=1)
        return whole

    def run(self, graph: Graph) -> None:
        for node in graph.nodes:
            if "step" in node.attrs:
                self._reshard(node)
            elif node.op == EXCHANGE:
                self._exchange(node)
            else:
                self._compute(graph, node)

    def _reshard(self, node: Node) -> None:
        (source,), (result,) = node.inputs, node.outputs
        step = node.attrs["step"]
        assert node.op == step.kind, f"{node.name} is a {step.kind}"
        self.values[result], _ = oracle.run(self.values[source], step, self.mesh)
        if source in self.slots:
            touched = [state for state in (step.src, step.dst) if isinstance(state, int)]
            same = replace(step, reduction="max") if step.src == "P" else step
            moved = all(dim < 2 for dim in touched)
            found = oracle.run(self.slots[source], same, self.mesh)[0] if moved else self.slots[source]
            # a pad adds zeros for slots of other devices, in the order of the tensor whose cotangent it makes
            self.slots[result] = (
                self.slots.get(result.removeprefix("d."), found) if node.op == "pad" else found
            )

    def _exchange(self, node: Node) -> None:
        """Every device takes what the one before it along some axes has."""
        axes = node.attrs["axes"]
        front = [self.mesh.names.index(atom) for atom in axes]
        for name, result in zip(node.inputs, node.outputs, strict=True):
            moved = np.moveaxis(self.values[name], front, range(len(front)))
            flat = moved.reshape((-1, *moved.shape[len(front) :]))
            self.values[result] = np.moveaxis(
                np.roll(flat, 1, axis=0).reshape(moved.shape), range(len(front)), front
            )
            self._turn(result, (self.turned.get(name, (0, axes))[0] + 1) % len(flat), axes)

    def _turn(self, name: str, turns: int, axes: tuple[str, ...]) -> None:
        if turns:
            self.turned[name] = turns, axes

    def _results_turn(self, node: Node) -> None:
        """Parts that have come round stay with their like: gradients of keys and values with these."""
        given = [self.turned.get(name, (0, ())) for name in node.inputs]
        if node.op == "attention_backward":
            pairs = list(zip(node.outputs[1:3], given[2:4], strict=True))
        elif node.op == "attention":
            pairs = []
        else:
            assert len(set(given)) < 2, f"{node.name} joins parts of different devices"
            pairs = [(name, given[0]) for name in node.outputs if given]
        for name, (turns, axes) in pairs:
            self._turn(name, turns, axes)

    def _home(self, name: str, here: Mapping[str, int]) -> Mapping[str, int]:
        """The place of the device whose part of a tensor a device has."""
        turns, axes = self.turned.get(name, (0, ()))
        degrees = [self.mesh.degree(atom) for atom in axes]
        back = (index(here, axes, self.mesh) - turns) % self.mesh.degree(axes)
        at = (int(part) for part in np.unravel_index(back, degrees))
        return {**here, **dict(zip(axes, at, strict=True))} if turns else here

    def _local(self, graph: Graph, name: str, names: Any, here: Mapping[str, int], value: Any) -> Local:
        tensor, layout = graph.tensors[name], self.layout(graph, name)
        shape = self.shape(tensor)
        begin = starts(shape, layout, self.mesh, self._home(name, here))
        own = Local(names, tensor.dim_names, begin, local_shape(shape, layout, self.mesh))
        assert value is None or value.shape == own.shape, (
            f"{name} is {value.shape}, its layout says {own.shape}"
        )
        return own if value is None else replace(own, value=value)

    def _compute(self, graph: Graph, node: Node) -> None:
        factors = get_op(node.op).factors(node.attrs, graph.operands(node), graph.results(node))
        names = [
            tuple(factor or dim for factor, dim in zip(row, graph.tensors[name].dim_names, strict=True))
            for name, row in zip(
                (*node.inputs, *node.outputs), (*factors.operands, *factors.results), strict=True
            )
        ]
        grid = tuple(degree for _, degree in self.mesh.atoms)
        self._results_turn(node)
        values, slots = self._aligned(node)
        found: list[list[Floats]] = []
        fresh: list[Floats] = []
        for at in np.ndindex(grid):
            here = dict(zip(self.mesh.names, at, strict=True))
            ends = zip((*node.inputs, *node.outputs), names, strict=True)
            local = [
                self._local(graph, x, row, here, values[x][at] if x in values else None) for x, row in ends
            ]
            operands, results = local[: len(node.inputs)], local[len(node.inputs) :]
            own = None if slots is None else slots[at]
            call = Call(node.op, node.phase, node.attrs, operands, results, self.sizes, own, self.order)
            found.append(KERNELS[node.op](call))
            if node.op == "permute_tokens":
                fresh.append(functions.slots_of(call))
            for name, result, value in zip(node.outputs, results, found[-1], strict=True):
                assert result.shape == value.shape, f"{name} is {value.shape}, its layout says {result.shape}"
        for i, name in enumerate(node.outputs):
            self.values[name] = np.stack([parts[i] for parts in found]).reshape((*grid, *found[0][i].shape))
            if "slots" in graph.tensors[name].dim_names:
                order = np.stack(fresh).reshape((*grid, *fresh[0].shape)) if fresh else slots
                saved = {
                    x.removesuffix(".again").removesuffix(".recomputed"): x
                    for x in node.inputs
                    if x in self.slots
                }
                primal = saved.get(name.removeprefix("d."))
                self.slots[name] = order if primal is None else self.slots[primal]
                self.values[name] = reordered(self.values[name], order, self.slots[name])

    def _aligned(self, node: Node) -> tuple[dict[str, Floats], Any]:
        """An op's operands, their slots in the order of the first that has slots, and what these are."""
        known = [name for name in node.inputs if name in self.slots]
        values = {name: self.values[name] for name in node.inputs}
        for name in known[1:]:
            values[name] = reordered(values[name], self.slots[name], self.slots[known[0]])
        return values, self.slots[known[0]] if known else None


def reordered(value: Floats, have: Floats, want: Floats) -> Floats:
    """The value with its slots in another order; AssertionError if these are not the same slots."""
    if np.array_equal(have, want):
        return value
    back = np.argsort(np.argsort(want, axis=-1), axis=-1)
    order = np.take_along_axis(np.argsort(have, axis=-1), back, axis=-1)
    assert np.array_equal(np.take_along_axis(have, order, axis=-1), want), (
        "slots of different tokens are joined"
    )
    wide = order.reshape((*order.shape, *(1,) * (value.ndim - order.ndim)))
    return np.take_along_axis(value, wide, axis=order.ndim - 1)


def execute(
    block: Differentiated,
    mesh: Mesh,
    sizes: Mapping[str, int],
    given: Mapping[str, Floats],
    seed: Floats,
    order: Floats | None = None,
) -> tuple[Executor, Executor]:
    """Forward and backward of a block whose inputs and parameters are `given`, from the cotangent `seed`."""
    ahead = Executor(mesh, sizes, np.random.default_rng(1), order=order)
    for name in (*block.forward.inputs, *(t.name for t in block.forward.parameters)):
        ahead.put(block.forward, name, given[name])
    ahead.run(block.forward)
    known = {*block.saved, *(t.name for t in block.backward.parameters)}
    saved = {name: ahead.values[name] for name in known if name in ahead.values}
    assert not ahead.turned.keys() & known, "what is kept for backward is at home"
    behind = Executor(mesh, sizes, np.random.default_rng(2), saved, dict(ahead.slots), order)
    behind.put(block.backward, block.seeds[0], seed)
    behind.run(block.backward)
    return ahead, behind


assert {"slots", "sources"} == UNORDERED, "the executor knows these dims without order"
