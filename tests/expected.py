"""What all ranks of a job must come to, from the graphs of one device, the table of the strategy and the mesh alone.

Nothing here asks the passes that shard, lower or schedule: a dim takes its axes by the rule of docs/strategies.md, a
share is the whole divided by degrees, and what is replicated is what no axis divides.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

from stage.counting import closed_forms
from stage.graph import Graph
from stage.mesh import Mesh
from stage.model import Block
from stage.ops import get_op
from stage.passes.backward import differentiate
from stage.passes.ring import circulate
from stage.passes.shard import Table
from stage.passes.unfuse import unfuse
from stage.request import Request
from stage.symbols import dtype_bytes, evaluate, exact
from stage.synthesis import sharded_block, symbol_values
from stage.tensor import Tensor
from tests.small import request as small


def taken(names: frozenset[str], table: Table, mesh: Mesh, name: str) -> dict[str, tuple[str, ...]]:
    """The axes of each dim of an op of this name that has these dims: down the table, those that no dim above has taken.

    A row `scope.dim` is one of `dim` for ops within that scope.
    """
    free, found = set(mesh.names), dict[str, tuple[str, ...]]()
    for row, axes in table:
        scope, _, dim = row.rpartition(".")
        if dim in names and dim not in found and (not scope or scope in name.split(".")):
            found[dim] = tuple(atom for atom in mesh.expand(axes) if atom in free)
            free -= {*found[dim]}
    return found


def dims_of(graph: Graph, node: Any) -> tuple[frozenset[str], tuple[tuple[Any, ...], ...]]:
    """The dims by which an op can be split, and those of each operand."""
    factors = get_op(node.op).factors(node.attrs, graph.operands(node), graph.results(node))
    each = [f for names in (*factors.operands, *factors.results) for f in names if f]
    flat = {part for f in each for part in ((f,) if isinstance(f, str) else f)}
    return frozenset(flat - factors.fixed), factors.operands


# ---------------------------------------------------------------- work

Work = tuple[str, str, Any, frozenset[str]]


@cache
def contractions(model: str, attention: str, mask: str, mtp: bool) -> dict[str, list[Work]]:
    """Phase, name, executed work and dims of each matrix multiplication of each kind of block."""
    asked = small(model, "ddp", attention=attention, mask=mask, mtp=mtp)
    found: dict[str, list[Work]] = {}
    for block in dict.fromkeys(asked.model.blocks):
        both = differentiate(asked.model.graph(block))
        found[block.kind] = [
            (phase, node.name, form, dims_of(graph, node)[0])
            for phase, graph in (("forward", both.forward), ("backward", both.backward))
            for node, form in closed_forms(graph, executed=True)
        ]
    return found


def recomputed(asked: Request, name: str) -> bool:
    """Whether a forward node of a layer runs again."""
    return {"none": False, "full": True, "selective": "core" in name.split(".")}[
        str(asked.strategy.recompute)
    ]


def work(asked: Request) -> int:
    """Operations of the matrix multiplications of all ranks in all steps.

    Those of one device, once more where recomputed, times the ranks among which no axis divides them.
    """
    options, mesh = asked.model.options, asked.mesh
    table = contractions(
        asked.model.name, options.attention, options.mask, bool(asked.model.sizes.get("mtp"))
    )
    ranks, total = mesh.world // asked.degrees["pp"], 0
    for block in asked.model.blocks:
        for phase, name, form, dims in table[block.kind]:
            axes = taken(dims, asked.table, mesh, name)
            split = prod(mesh.degree(divisible(asked, dim, atoms)) for dim, atoms in axes.items())
            layer = block in asked.model.layers and recomputed(asked, name)
            runs = 1 + (layer and phase == "forward")
            total += evaluate(form, {**asked.sizes, "sources": 1}) * runs * (ranks // split)
    return total * asked.micro_batches * asked.steps


def divisible(asked: Request, dim: str, atoms: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that divide a dim: of KV heads the leading ones, of all others all."""
    while dim == "kv_heads" and asked.sizes["kv_heads"] % asked.mesh.degree(atoms):
        atoms = atoms[:-1]
    return atoms


# ---------------------------------------------------------------- parameters


@dataclass(frozen=True)
class Weight:
    """A parameter: its elements on one device as rows x columns, and the axes over which its gradient is partial.

    These are the axes by which the op that reads it splits its work, but for those that shard the parameter.
    """

    name: str
    whole: int
    rows: int
    columns: int
    shared: bool
    data: tuple[str, ...]
    model: tuple[str, ...]

    @property
    def elements(self) -> int:
        return self.rows * self.columns


def weights(asked: Request, block: Block) -> Iterator[Weight]:
    """The parameters of a block."""
    mesh, table = asked.mesh, asked.table
    graph = unfuse(asked.model.graph(block), table, mesh)
    readers = graph.consumers()
    apart = mesh.degree("ep") > 1 or {*mesh.expand("edp")} != {*mesh.expand(["dp", "cp"])}
    for tensor in graph.parameters:
        node = readers[tensor.name][0]
        dims, operands = dims_of(graph, node)
        axes = taken(dims, table, mesh, "")
        own = operands[node.inputs.index(tensor.name)]
        shards = [
            divisible(asked, dim.name, axes.get(f, ())) for dim, f in zip(tensor.dims, own, strict=True)
        ]
        sizes = [
            evaluate(dim.size, asked.sizes) // mesh.degree(atoms)
            for dim, atoms in zip(tensor.dims, shards, strict=True)
        ]
        partial = {atom for atoms in axes.values() for atom in atoms} - {
            atom for atoms in shards for atom in atoms
        }
        data = mesh.expand("edp") if apart and "experts" in tensor.dim_names else mesh.expand(["dp", "cp"])
        yield Weight(
            tensor.name, evaluate(tensor.elements, asked.sizes), prod(sizes[: tensor.rows]),
            prod(sizes[tensor.rows :]), tensor.shared, tuple(a for a in mesh.names if a in partial & {*data}),
            tuple(a for a in mesh.names if a in partial - {*data}),
        )  # fmt: skip


def units(asked: Request, rank: int) -> list[Block]:
    """The blocks that a pipeline rank holds, by `stage_layers` or evenly."""
    pipeline, model = asked.pipeline, asked.model
    stages = pipeline.stages
    counts = asked.stage_layers or (len(model.layers) // stages,) * stages
    first = [sum(counts[:i]) for i in range(stages)]
    held: list[Block] = []
    for chunk in range(pipeline.chunks):
        stage = pipeline.stage(rank, chunk)
        held += [model.embedding] if stage == 0 else []
        held += model.layers[first[stage] : first[stage] + counts[stage]]
        held += [model.head] if stage == stages - 1 else []
    return held


def stored(asked: Request, rank: int) -> list[Weight]:
    """The parameters that a pipeline rank holds, each once."""
    kinds = {block: list(weights(asked, block)) for block in dict.fromkeys(asked.model.blocks)}
    found, seen = list[Weight](), set[str]()
    for block in units(asked, rank):
        found += [w for w in kinds[block] if not (w.shared and w.name in seen)]
        seen |= {w.name for w in kinds[block] if w.shared}
    return found


def states(asked: Request, rank: int) -> tuple[int, int]:
    """Elements whose optimizer state a rank holds, without padding, and the most that padding may add.

    A sharded optimizer starts a parameter (of a matrix multiplication, or of an expert) at a multiple of 64 elements.
    """
    zero, mesh, total, padding = asked.strategy.zero, asked.mesh, 0, 0
    replicate = mesh.expand("dp_replicate") if asked.strategy.dp_shard is not None else ()
    for w in stored(asked, rank):
        shards = mesh.degree([atom for atom in w.data if atom not in replicate]) if zero else 1
        if zero == 3:
            total += -(-w.rows // shards) * w.columns
            continue
        assert zero or shards == 1
        total += w.elements // shards if w.elements % shards == 0 else w.elements // shards + 1
        padding += 0 if shards == 1 else 64 * asked.sizes.get("experts", 1) + 128
    return total, padding


# ---------------------------------------------------------------- communication

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
    size = elements * width / asked.mesh.degree([atom for atoms in layout.dims for atom in atoms])
    assert size.denominator == 1
    return size.numerator


def activations(asked: Request, rank: int) -> Counter[Key]:
    """(phase, kind, axes, bytes) -> collectives of activations on a pipeline rank, read off the layouts of its blocks.

    The kind is what a change of layout is, whatever the node is called; the bytes are the device's part before it.
    """
    sizes, found = symbol_values(asked), Counter[Key]()
    for block, times in Counter(units(asked, rank)).items():
        both = sharded_block(asked, block)
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
    for block in units(asked, rank):
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
            again = block in asked.model.layers and recomputed(asked, node.name)
            for op in ("send", "recv"):
                found["forward", op] += moved
                found["backward", op] += moved + elements * 4 * n * asked.micro_batches * asked.steps
                if again:
                    found["recompute", op] += moved
    return found
