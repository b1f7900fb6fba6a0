"""What all ranks of a job must come to, from the graphs of one device, the table of the strategy and the mesh alone.

Nothing here asks the passes that shard, lower or schedule: a dim takes its axes by the rule of docs/strategies.md, a
share is the whole divided by degrees, and what is replicated is what no axis divides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from stage.counting import closed_forms
from stage.graph import Graph
from stage.mesh import Mesh
from stage.model import Block
from stage.ops import get_op
from stage.passes.backward import differentiate
from stage.passes.shard import Table
from stage.passes.unfuse import unfuse
from stage.request import Request
from stage.symbols import evaluate
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


AGAIN: dict[str, Callable[[list[str]], bool]] = {
    "attention": lambda path: "core" in path,
    "norm": lambda _: False,
    "act": lambda _: False,
    "up_proj": lambda path: path[-1] in ("up_proj", "gate_proj"),
    "mlp": lambda path: "mlp" in path,
    "moe": lambda path: "moe" in path,
}
"""Which matrix multiplications run again, by the op of a policy."""


def chosen(asked: Request, position: int) -> bool:
    """Whether anything runs again of the layer at this position of its stage (-1 for embedding and head)."""
    head, _, rest = str(asked.strategy.recompute).partition(":")
    return position >= 0 and head != "none" and (head != "every" or (position + 1) % int(rest) == 0)


def recomputed(asked: Request, position: int, name: str) -> bool:
    """Whether a matrix multiplication of a layer runs again."""
    head, _, rest = str(asked.strategy.recompute).partition(":")
    modules = {"selective": ["attention"], "ops": rest.split(",")}.get(head)
    every = modules is None or any(AGAIN[module](name.split(".")) for module in modules)
    return chosen(asked, position) and every


def work(asked: Request) -> int:
    """Operations of the matrix multiplications of all ranks in all steps.

    Those of one device, once more where recomputed, times the ranks among which no axis divides them.
    """
    options, mesh = asked.model.options, asked.mesh
    table = contractions(
        asked.model.name, options.attention, options.mask, bool(asked.model.sizes.get("mtp"))
    )
    ranks, total = mesh.world // asked.degrees["pp"], 0
    held = [unit for rank in range(asked.pipeline.ranks) for unit in units(asked, rank)]
    for block, position in held:
        for phase, name, form, dims in table[block.kind]:
            axes = taken(dims, asked.table, mesh, name)
            split = prod(mesh.degree(divisible(asked, dim, atoms)) for dim, atoms in axes.items())
            runs = 1 + (phase == "forward" and recomputed(asked, position, name))
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


def units(asked: Request, rank: int) -> list[tuple[Block, int]]:
    """The blocks that a pipeline rank holds, by `stage_layers` or evenly, and the position in its stage of a layer.

    Embedding and head have the position -1.
    """
    pipeline, model = asked.pipeline, asked.model
    stages = pipeline.stages
    counts = asked.stage_layers or (len(model.layers) // stages,) * stages
    first = [sum(counts[:i]) for i in range(stages)]
    held: list[tuple[Block, int]] = []
    for chunk in range(pipeline.chunks):
        stage = pipeline.stage(rank, chunk)
        held += [(model.embedding, -1)] if stage == 0 else []
        held += [(model.layers[first[stage] + i], i) for i in range(counts[stage])]
        held += [(model.head, -1)] if stage == stages - 1 else []
    return held


def stored(asked: Request, rank: int) -> list[Weight]:
    """The parameters that a pipeline rank holds, each once."""
    kinds = {block: list(weights(asked, block)) for block in dict.fromkeys(asked.model.blocks)}
    found, seen = list[Weight](), set[str]()
    for block, _ in units(asked, rank):
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
