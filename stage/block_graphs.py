"""The graphs of a block on the mesh of a job: sharded, differentiated, and as they are run."""

from dataclasses import replace

from stage.model import Block
from stage.passes.backward import Differentiated, differentiate
from stage.passes.chunk import chunk_both
from stage.passes.fuse import fuse
from stage.passes.overlap import overlap
from stage.passes.precision import Precision, quantize
from stage.passes.recompute import recompute
from stage.passes.ring import circulate, expand_ring
from stage.passes.shard import rest_layout, shard
from stage.passes.unfuse import unfuse
from stage.precision import RECIPES
from stage.request import Request
from stage.strategy import Strategy
from stage.symbols import size
from stage.tensor import Dim, Tensor

__all__ = ["differentiated_block", "finished_block", "precision", "sharded_block", "symbol_values"]


def sharded_block(request: Request, block: Block) -> Differentiated:
    """A block's forward and backward graphs on the request's mesh; a layer's with recomputation as asked."""
    return finished_block(request, differentiated_block(request, block), again=block in request.model.layers)


def differentiated_block(request: Request, block: Block) -> Differentiated:
    """A block's forward and backward graphs on the request's mesh, where nothing is recomputed."""
    mesh, strategy = request.mesh, request.strategy
    sizes = symbol_values(request)
    whole = unfuse(request.model.graph(block), request.table, mesh)
    if strategy.contexts.circulates:
        whole = circulate(whole)
    graph = shard(fuse(whole) if strategy.fuse else whole, request.table, mesh, sizes)
    graph = overlap(graph) if strategy.moe_shared_expert_overlap else graph
    both = differentiate(graph, [name for name, _ in mesh.atoms], frozenset(mesh.expand(strategy.regather)))
    if strategy.moe_shared_expert_overlap:
        both = replace(both, backward=overlap(both.backward))
    both = expand_ring(both, mesh, sizes, consecutive=strategy.context_balance == "none")
    return both if strategy.fp8 == "none" else quantize(both, precision(strategy), mesh, sizes)


def precision(strategy: Strategy) -> Precision:
    """How blocks are quantised: whole weights are kept over a step, but for those of FSDP."""
    return Precision(
        RECIPES[strategy.fp8],
        cached=strategy.zero < 3,
        stored=strategy.fp8_param_gather,
        dispatch=strategy.fp8_dispatch,
    )


def finished_block(request: Request, both: Differentiated, *, again: bool) -> Differentiated:
    """A block's graphs as they are run: in chunks as asked, and recomputed if `again`."""
    strategy = request.strategy
    both = recompute(both, strategy.recompute) if again else both
    return chunk_both(both, strategy.tp_overlap_chunks, request.mesh, symbol_values(request))


def symbol_values(request: Request) -> dict[str, int]:
    """A value for every size symbol; `sources` is how many parts the slots of an expert come from."""
    tokens = Tensor("tokens", (Dim("batch", size("batch")), Dim("seq", size("seq"))))
    values, mesh = dict(request.sizes), request.mesh
    rest = rest_layout(tokens, request.table, mesh, values)
    parts = {*rest.sharding, *mesh.expand(request.strategy.axes("slots"))}
    return values | {"sources": mesh.degree(parts)}
