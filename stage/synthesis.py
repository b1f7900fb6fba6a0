"""Synthesis: from a request to a trace set, a chain of pure functions.

model -> graph of each kind of block -> sharded -> differentiated -> recomputation -> templates
-> stages -> programs -> trace set
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stage.block_graphs import differentiated_block, finished_block, sharded_block, symbol_values
from stage.describe import describe
from stage.errors import StrategyError
from stage.model import Block, Model
from stage.passes.backward import Differentiated
from stage.passes.check_overlap import check_overlap
from stage.passes.shard import rest_layout
from stage.pipeline.schedules import get_schedule
from stage.pipeline.stages import Unit, cut
from stage.precision import FP8
from stage.request import Request, resolve_request
from stage.strategy import Strategy
from stage.symbols import dtype_bytes
from stage.trace.buckets import Bucket, plan_buckets
from stage.trace.capacity import check_capacity, check_tags
from stage.trace.concrete import Concrete
from stage.trace.image import NameStyle
from stage.trace.job import Job
from stage.trace.kind import BlockKind
from stage.trace.parameters import Parameter, Sharding
from stage.trace.partition import STAGES, Partition
from stage.trace.plan import StagePlan, StepPlan, UnitPlan
from stage.trace.queries import query_atoms
from stage.trace.routing import Routing, make_routing
from stage.trace.stage_program import stage_program
from stage.traceset import TraceSet

__all__ = ["differentiated_block", "job", "sharded_block", "symbol_values", "synthesize"]


def synthesize(
    model: str | Path | Model, strategy: str | Path | Strategy | None = None, **options: Any
) -> TraceSet:
    """The trace set of a model under a strategy.

    `options` are those of `stage.request.resolve_request`: degrees (`gpus dp tp pp cp ep etp dp_shard`), the batch
    (`batch micro_batch seq`), and how the step runs (`schedule zero recompute stage_layers grad_reduce dtype ...`).
    A mistake in them is a `StageError`.

    >>> traces = synthesize("llama3-8b", gpus=8, tp=2, pp=2, batch=8, seq=4096, sizes={"layers": 4})
    >>> traces.world, len(traces.groups)
    (8, 9)
    """
    request = resolve_request(model, strategy, **options)
    return TraceSet.of(job(request))


Kinds = dict[tuple[Block, bool], BlockKind]
"""By the block, and whether it is recomputed."""


@dataclass(frozen=True)
class JobPlan:
    """A request with each kind of block lowered, shared out over stages: all that programs are put together from.

    Classes of ranks are those of `classes`, by their numbers.
    """

    request: Request
    stages: list[list[Unit]]
    kinds: Kinds
    step: StepPlan
    classes: Partition

    def place(self, number: int) -> dict[str, int]:
        """Where a class stands: on the pipeline, and on the atoms that its work depends on."""
        return self.classes.coordinates(number)

    def units(self, number: int) -> list[list[Unit]]:
        """The blocks of a class, by its chunks."""
        rank, pipeline = self.place(number).get(STAGES, 0), self.request.pipeline
        return [self.stages[pipeline.stage(rank, chunk)] for chunk in range(pipeline.chunks)]

    def load_row(self, unit: Unit) -> int:
        """Which row of the load of experts is that of a block."""
        load, moe_layers = self.request.expert_load, self.request.model.moe_layers
        many = load is not None and len(load.rows) > 1
        return moe_layers.index(unit.layer) if many and self.kinds[unit.kind].routings else 0

    def stage(self, number: int) -> StagePlan:
        """What the ranks of a class hold."""
        request, step, held = self.request, self.step, self.units(number)
        rank = self.place(number).get(STAGES, 0)
        plans = self._unit_plans([unit for units in held for unit in units], self.place(number))
        shared = [p.name for p in _shared(request, self.kinds)]
        chunks: list[range] = []
        buckets: list[Bucket] = []
        for units in held:
            first = chunks[-1].stop if chunks else 0
            chunks.append(range(first, first + len(units)))
            whole = request.strategy.bucket_first_stage and (rank or first)
            bucket_size = 0 if whole else request.strategy.bucket_size
            parameters = [plans[at].parameters for at in chunks[-1]]
            buckets += plan_buckets(parameters, step.sharding, step.mesh, bucket_size, shared, first)
        return StagePlan(rank, tuple(plans), tuple(chunks), tuple(buckets))

    def _unit_plans(self, units: list[Unit], place: Mapping[str, int]) -> list[UnitPlan]:
        """The blocks of a rank; a parameter that two of them share belongs to the first."""
        seen: set[str] = set()
        plans = []
        for unit in units:
            kind = self.kinds[unit.kind]
            own = tuple(p for p in kind.parameters if unit.layer >= 0 or p.name not in seen)
            seen.update(p.name for p in own if unit.layer < 0)
            head = unit.block == self.request.model.head
            templates = kind.templates(place, self.load_row(unit))
            plans.append(UnitPlan(unit.block.kind, unit.layer, templates, own, kind.parameters, head))
        return plans

    def job(self) -> Job:
        """The program of each class, and what else a trace set needs."""
        request = self.request
        programs = tuple(stage_program(self.stage(number), self.step) for number in range(self.classes.count))
        digits = NameStyle(
            len(str(len(request.model.layers) - 1)),
            len(str(request.micro_batches - 1)),
            len(str(request.steps - 1)) if request.steps > 1 else 0,
        )
        placement = None if request.placement is None else np.array(request.placement, np.int64)
        description = describe(request, self.stages)
        return Job(request.mesh, programs, digits, description, placement, self.classes.axes)


def job(request: Request) -> Job:
    """Everything a trace set needs, computed once for each kind of block and each stage."""
    return plan_job(request).job()


def plan_job(request: Request) -> JobPlan:
    """What the programs of a job are put together from; a job that no trace can hold is refused."""
    model, mesh = request.model, request.mesh
    dtypes = {"compute": request.dtype, "gradient": request.grad_dtype, "parameter": request.param_dtype}
    widths = {name: dtype_bytes(name) for name in (FP8, "uint8")}
    widths |= {use: dtype_bytes(dtype) for use, dtype in dtypes.items()}
    check_capacity(
        ranks=mesh.world,
        layers=len(model.layers),
        micro_batches=request.micro_batches,
        steps=request.steps,
        chunks=request.pipeline.chunks,
    )
    concrete = Concrete(
        symbol_values(request),
        mesh,
        {"compute": request.dtype, "gradient": request.grad_dtype},
        consecutive=request.strategy.context_balance == "none",
        pairwise=request.strategy.alltoall == "p2p",
    )
    stages = cut(model, request.pipeline, request.stage_layers, request.strategy.recompute)
    kinds = _kinds(request, stages, concrete)
    check_overlap(request.strategy, [kind.both for kind in kinds.values()])
    step = _step_plan(request, kinds, widths, concrete)
    classes = Partition.of(mesh, [atom for kind in kinds.values() for atom in kind.variants])
    _check_balance(request, kinds.values())
    first = classes.coordinates(0)
    check_tags(
        micro_batches=request.micro_batches,
        steps=request.steps,
        chunks=request.pipeline.chunks,
        blocks=len(model.blocks),
        messages=max(kind.templates(first).messages for kind in kinds.values()),
    )
    return JobPlan(request, stages, kinds, step, classes)


def _kinds(request: Request, stages: list[list[Unit]], concrete: Concrete) -> Kinds:
    """Each kind of block, lowered; one of which some layers are recomputed and some not is differentiated once."""
    blocks = dict.fromkeys(request.model.blocks)
    plain = {block: differentiated_block(request, block) for block in blocks}
    kinds: Kinds = {}
    for block, again in dict.fromkeys(unit.kind for units in stages for unit in units):
        both = finished_block(request, plain[block], again=again)
        kinds[block, again] = _kind(request, block, both, concrete)
    return kinds


def _kind(request: Request, block: Block, both: Differentiated, concrete: Concrete) -> BlockKind:
    strategy = request.strategy
    own = ("layer", "micro_batch") if block in request.model.layers else ("micro_batch",)
    routings: tuple[Routing, ...] = ()
    if request.expert_load is not None and any("experts" in p.dim_names for p in both.forward.parameters):
        graphs, factor, padded = (
            (both.forward, both.backward),
            strategy.capacity_factor,
            strategy.pad_to_capacity,
        )
        routings = tuple(
            make_routing(row, graphs, concrete.sizes, request.mesh, factor, padded=padded)
            for row in request.expert_load.rows
        )
    return BlockKind(
        both,
        concrete,
        numbers=(*own, *request.pipeline.marks),
        gathered=_gathered(request),
        split=get_schedule(strategy.schedule).splits,
        streams=strategy.streams,
        routings=routings,
    )


def _check_balance(request: Request, kinds: Iterable[BlockKind]) -> None:
    """A `StrategyError` where work is to be left unbalanced that is not uneven."""
    if request.strategy.context_balance != "none":
        return
    if any(query_atoms((kind.both.forward, kind.both.backward)) for kind in kinds):
        return
    why = (
        "attention has no causal mask"
        if request.model.options.mask == "full"
        else f"no axis shards the sequence of attention (cp = {request.degrees['cp']})"
    )
    raise StrategyError(
        f"context_balance = none leaves ranks unequal work under a causal mask, but {why}; leave it out, "
        "or take a causal mask and a cp above 1"
    )


def _gathered(request: Request) -> bool:
    """Whether parameters are gathered before use: always under ZeRO 3, between steps with a sharded optimizer."""
    zero = request.strategy.zero
    return zero == 3 or (zero > 0 and request.steps > 1)


def _step_plan(request: Request, kinds: Kinds, widths: Mapping[str, int], concrete: Concrete) -> StepPlan:
    model, strategy, mesh = request.model, request.strategy, request.mesh
    x = model.graph(model.layers[0]).tensors["x"]
    message = (
        concrete.local(x, rest_layout(x, request.table, mesh, concrete.sizes)).elements * widths["compute"]
    )
    replicate = frozenset(mesh.expand(["dp_replicate"])) if strategy.dp_shard is not None else frozenset()
    sharding = Sharding(strategy.zero, replicate)
    keep = strategy.reshard_after_forward
    reshard = None if keep is True else () if keep is False else mesh.expand(["dp_shard"])
    shared = _shared(request, kinds)
    tied = sum(
        -(-p.rows // (mesh.degree(sharding.split(p.data)[0]) if strategy.zero == 3 else 1)) * p.columns
        for p in shared
    )
    return StepPlan(
        pipeline=request.pipeline,
        schedule=strategy.schedule,
        steps=request.steps,
        message=message,
        dtype=request.dtype,
        grad_dtype=request.grad_dtype,
        param_dtype=request.param_dtype,
        per_micro_batch=request.grad_reduce == "microbatch",
        overlap=strategy.overlap_grad,
        clip=request.clip,
        tied_elements=tied,
        experts=any(p.expert for kind in kinds.values() for p in kind.parameters),
        sharding=sharding,
        prefetch=strategy.prefetch,
        reshard=reshard,
        data=tuple(sorted({p.data for kind in kinds.values() for p in kind.parameters})),
        streams=strategy.streams,
        delayed_scaling=strategy.fp8 == "delayed",
        mesh=mesh,
        widths=widths,
    )


def _shared(request: Request, kinds: Kinds) -> list[Parameter]:
    """Parameters that first and last block both have on different ranks.

    They are a tied token table, or that of a prediction module.
    """
    pipeline, model = request.pipeline, request.model
    if pipeline.place(0)[0] == pipeline.place(pipeline.stages - 1)[0]:
        return []
    names = {p.name for p in kinds[model.head, False].parameters}
    return [p for p in kinds[model.embedding, False].parameters if p.name in names]
