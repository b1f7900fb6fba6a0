"""What ranks of a job must send: activations by their layouts, rings and messages between stages by closed forms."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any

from stage.passes.ring import circulate
from stage.request import Request
from stage.symbols import dtype_bytes, evaluate, exact
from stage.synthesis import differentiated_block, sharded_block, symbol_values
from stage.tensor import Tensor
from tests.expected import chosen, dims_of, divisible, recomputed, taken, units

SCALES = {"blockwise": Fraction(4, 128), "mxfp8": Fraction(1, 32)}
"""Bytes of scales that travel with an element of 8 bits: fp32 for each 128, or 8 bits for each 32."""

Key = tuple[str, str, str, int]


def state_change(before: Any, after: Any, atoms: tuple[str, ...]) -> str | None:
    """What moves a tensor from one layout to another over these axes; None where no rank needs what another has."""
    (src, dst), *more = {(_word(before.state(atom)), _word(after.state(atom))) for atom in atoms}
    if more:
        return "permute"
    if (src, dst) == ("shard", "shard"):
        moved = any(before.state(atom) != after.state(atom) for atom in atoms)
        return "all_to_all" if moved else "permute"
    table = {
        ("P", "shard"): "reduce_scatter", ("P", "whole"): "all_reduce", ("shard", "whole"): "all_gather",
    }  # fmt: skip
    return table.get((src, dst))


def _word(state: Any) -> str:
    return "shard" if isinstance(state, int) else "P" if state == "P" else "whole"


def local_bytes(asked: Request, tensor: Tensor, layout: Any, sizes: Any) -> int:
    """Bytes of a device's part of a tensor."""
    names = {"compute": asked.dtype, "gradient": asked.grad_dtype}
    width = dtype_bytes(names.get(tensor.dtype, tensor.dtype))
    elements = Fraction(1)
    for dim in tensor.dims:
        elements *= exact(dim.size, sizes)
    if tensor.dtype.startswith("fp8"):
        elements += elements * SCALES.get(asked.strategy.fp8, 0)
    size = elements * width / asked.mesh.degree([atom for atoms in layout.dims for atom in atoms])
    assert size.denominator == 1
    return size.numerator


def activations(asked: Request, rank: int) -> Counter[Key]:
    """(phase, kind, axes, bytes) -> collectives of activations on a pipeline rank, read off the layouts of its blocks.

    The kind is what a change of layout is, whatever the node is called; the bytes are the device's part before it.
    """
    sizes, found = symbol_values(asked), Counter[Key]()
    held = Counter((block, chosen(asked, position)) for block, position in units(asked, rank))
    for (block, again), times in held.items():
        both = sharded_block(asked, block) if again else differentiated_block(asked, block)
        for graph in (both.forward, both.backward):
            for node in graph.nodes:
                if "step" not in node.attrs:
                    continue
                (source,), (result,), axes = node.inputs, node.outputs, node.attrs["step"].axes
                kind = state_change(graph.layouts[source], graph.layouts[result], axes)
                if kind is not None:
                    size = local_bytes(asked, graph.tensors[source], graph.layouts[source], sizes)
                    found[node.phase, kind, " ".join(axes), size] += times * asked.micro_batches * asked.steps
    return found


def messages(asked: Request, rank: int) -> Counter[tuple[str, int]]:
    """(op, peer's pipeline rank) -> messages of all micro-batches and steps."""
    found: Counter[tuple[str, int]] = Counter()
    places = [asked.pipeline.place(stage)[0] for stage in range(asked.pipeline.stages)]
    for a, b in pairwise(places):
        for own, other in ((a, b), (b, a)):
            if a != b and own == rank:
                found["send", other] += asked.micro_batches * asked.steps
                found["recv", other] += asked.micro_batches * asked.steps
    return found


def circulated(asked: Request, rank: int) -> Counter[tuple[str, str]]:
    """(phase, op) -> bytes that a rank sends and receives in rings of keys and values (Liu et al. 2023).

    Of n ranks each passes its keys and values on n - 1 times; backward once more so, and their gradients n times in
    fp32, the last turn bringing them home.
    """
    mesh, found = asked.mesh, Counter[tuple[str, str]]()
    if not asked.strategy.contexts.circulates:
        return found
    n = asked.degrees["cp"] // asked.strategy.contexts.ulysses(asked.degrees["cp"])
    for block, position in units(asked, rank):
        graph = circulate(asked.model.graph(block))
        for node in (node for node in graph.nodes if node.op == "attention") if n > 1 else ():
            dims, operands = dims_of(graph, node)
            axes, elements = taken(dims, asked.table, mesh, node.name), 0
            for tensor, own in zip(graph.operands(node)[1:3], operands[1:3], strict=True):
                shards = [
                    divisible(asked, d.name, axes.get(f, ())) for d, f in zip(tensor.dims, own, strict=True)
                ]
                elements += evaluate(tensor.elements, asked.sizes) // prod(
                    mesh.degree(atoms) for atoms in shards
                )
            moved = elements * dtype_bytes(asked.dtype) * (n - 1) * asked.micro_batches * asked.steps
            for op in ("send", "recv"):
                found["forward", op] += moved
                found["backward", op] += moved + elements * 4 * n * asked.micro_batches * asked.steps
                if recomputed(asked, position, node.name):
                    found["recompute", op] += moved
    return found
