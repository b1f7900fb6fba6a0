"""Whatever the mesh, all ranks together do the work of the unsharded model, and what replication adds is known exactly."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from stage.counting import closed_forms, count_parameters
from stage.errors import StageError
from stage.layout import Layout
from stage.model import Model
from stage.ops import get_op, registered
from stage.passes.backward import differentiate
from stage.request import Request
from stage.symbols import evaluate
from stage.synthesis import job, sharded_block, symbol_values
from stage.trace.concrete import Concrete
from stage.trace.parameters import unit_parameters
from stage.traceset import TraceSet
from tests.small import MODELS, fits, name_of, request

MATMULS = frozenset(name for name in registered() if get_op(name).is_matmul)
ADAM_FLOPS = 14


def meshes(world: int) -> Iterator[dict[str, int]]:
    """Every mesh of a world of 2^n ranks in which pp and etp are at most 2."""
    powers = [2**i for i in range(world.bit_length())]
    for pp, cp, tp, ep, etp in product(powers[:2], powers, powers, powers, powers[:2]):
        if pp * cp * tp <= world and world % (pp * cp * tp) == 0:
            degrees = {"pp": pp, "dp": world // (pp * cp * tp), "cp": cp, "tp": tp, "ep": ep, "etp": etp}
            if degrees["dp"] * cp * tp % (ep * etp) == 0:
                yield {axis: degree for axis, degree in degrees.items() if degree > 1}


def traced(request: Request) -> int:
    """Operations of matrix multiplications of all ranks together, read off the traces."""
    traces = TraceSet.of(job(request))
    total = 0
    for number in range(traces.classes.count):
        rank = number * traces.classes.ranks_per_class
        work = sum(int(str(n.get("num_ops"))) for n in traces.nodes(rank) if n.get("op") in MATMULS)
        total += work * traces.classes.ranks_per_class
    return total


Forms = dict[str, list[tuple[str, str, Any]]]


@cache
def forms(name: str, attention: str) -> Forms:
    """Phase, name and executed work of each matrix multiplication of each kind of block of the unsharded model."""
    model = request(name, "ddp", attention=attention).model
    found: Forms = {}
    for block in dict.fromkeys(model.blocks):
        both = differentiate(model.graph(block))
        graphs = (("forward", both.forward), ("backward", both.backward))
        found[block.kind] = [(p, n.name, e) for p, g in graphs for n, e in closed_forms(g, executed=True)]
    return found


def expected(job: Request) -> int:
    """The unsharded model's executed work, recomputation, and replication."""
    table, sizes = forms(job.model.name, job.model.options.attention), {**job.sizes, "sources": 1}
    total = 0
    for block in job.model.blocks:
        for phase, name, form in table[block.kind]:
            again = phase == "forward" and block in job.model.layers and runs_again(name, job)
            total += evaluate(form, sizes) * copies(name, job) * (1 + again)
    return total * job.micro_batches


PRODUCTS = {
    "full": ("",),
    "selective": (".core",),
    "ops:attention": (".core",),
    "ops:norm,act": (),
    "ops:up_proj": (".gate_proj", ".up_proj"),
    "ops:core_attn,up_proj,act": (".core", ".gate_proj", ".up_proj"),
    "ops:mlp": ("mlp.",),
    "ops:mla_up_proj,norm": ("q_b_proj", "kv_b_proj"),
    "ops:moe": ("moe.",),
    "ops:moe,mlp,moe_act": ("moe.", "mlp."),
    "ops:shared_experts": (".shared",),
    "ops:dispatch,moe_act": (),
}
"""Matrix multiplications that each policy runs again, by parts of their names."""


def runs_again(name: str, job: Request) -> bool:
    policy = str(job.strategy.recompute)
    return policy != "none" and any(part in name for part in PRODUCTS[policy])


def copies(name: str, job: Request) -> int:
    """How many devices do the same: KV projections beyond kv_heads, and without SP what tp does not shard."""
    tp = job.degrees["tp"]
    if "k_proj" in name or "v_proj" in name:
        return max(1, tp // job.sizes["kv_heads"])
    alike = any(part in name for part in (".router", "q_a_proj", "kv_a_proj", "eh_proj"))
    return tp if alike and "tp" not in job.strategy.axes("seq") else 1


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *(("llama3-8b", strategy) for strategy in ("ddp", "fsdp", "megatron", "megatron_sp")),
        ("mixtral-8x7b", "megatron"),
        ("mixtral-8x7b", "megatron_moe"),
        ("deepseek-v3", "megatron_sp"),
    ],
)
def test_ranks_together_do_the_work_of_the_model(model: str, strategy: str) -> None:
    checked = 0
    for mesh in meshes(8):
        if fits(model, strategy, mesh):
            asked = request_or_none(model, strategy, mesh)
            if asked is not None:
                assert traced(asked) == expected(asked), mesh
                checked += 1
    assert checked >= 5


def request_or_none(model: str, strategy: str, mesh: dict[str, int]) -> Request | None:
    """The job, unless some size does not divide by the mesh."""
    try:
        asked = request(model, strategy, **mesh, batch=16)
        for block in asked.model.blocks:
            sharded_block(asked, block)
    except StageError as refused:
        if "divide" in str(refused):
            return None
        raise
    return asked


MODULES_OF = {
    "llama3-8b": ("ops:attention", "ops:norm,act", "ops:up_proj", "ops:core_attn,up_proj,act", "ops:mlp"),
    "mixtral-8x7b": ("ops:up_proj", "ops:moe", "ops:dispatch,moe_act"),
    "deepseek-v3": ("ops:mla_up_proj,norm", "ops:mlp", "ops:moe,mlp,moe_act", "ops:shared_experts"),
}


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        *((model, policy) for model in sorted(MODELS) for policy in ("full", "selective")),
        *((model, policy) for model, policies in MODULES_OF.items() for policy in policies),
    ],
)
@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_recomputed_and_unfused_work_is_added_exactly(model: str, attention: str, recompute: str) -> None:
    for strategy, mesh in (("megatron", {"tp": 4, "dp": 2}), ("megatron_sp", {"tp": 2, "cp": 2, "pp": 2})):
        asked = request(model, strategy, **mesh, batch=8, attention=attention, recompute=recompute)
        assert traced(asked) == expected(asked)


def test_a_fused_backward_executes_two_and_a_half_times_its_forward() -> None:
    traces = TraceSet.of(job(request("llama3-8b", "megatron_sp", tp=2, dp=2)))
    work = {
        op: sum(int(str(n.get("num_ops"))) for n in traces.nodes(0) if n.get("op") == op) for op in MATMULS
    }
    assert 2 * work["attention_backward"] == 5 * work["attention"] > 0


def test_a_padded_vocabulary_costs_what_it_adds_and_no_more() -> None:
    asked = request("llama3-8b", "megatron", tp=2, dp=2, batch=4, sizes={"vocab": 60}, vocab_multiple=32)
    assert asked.sizes["vocab"] == 64
    plain = request("llama3-8b", "megatron", tp=2, dp=2, batch=4, sizes={"vocab": 60}, vocab_multiple=1)
    assert plain.sizes["vocab"] == 60
    tokens, extra = asked.batch * asked.seq, 64 - 60
    assert traced(asked) - traced(plain) == 3 * 2 * tokens * asked.sizes["d_model"] * extra


@pytest.mark.parametrize("strategy", ["megatron", "megatron_moe"])
def test_expert_degrees_never_multiply_work(strategy: str) -> None:
    whole = traced(request("mixtral-8x7b", strategy, dp=2, tp=2, cp=2, batch=4))
    for ep, etp in ((2, 1), (4, 1), (1, 2), (2, 2), (4, 2)):
        assert traced(request("mixtral-8x7b", strategy, dp=2, tp=2, cp=2, ep=ep, etp=etp, batch=4)) == whole


def test_all_ranks_of_a_class_do_the_same() -> None:
    traces = TraceSet.of(job(request("mixtral-8x7b", "megatron_moe", pp=2, dp=2, tp=2, ep=2, batch=4)))
    work = [[n.get("num_ops") for n in traces.nodes(rank)] for rank in traces.ranks]
    per_class = traces.classes.ranks_per_class
    for rank in traces.ranks:
        assert work[rank] == work[rank // per_class * per_class]


def elements(job_: Request) -> tuple[int, int]:
    """Parameters of the job's model with its vocabulary padded, and those that a second stage has too."""
    padded = build_padded(job_)
    shared = padded.tied and job_.degrees["pp"] > 1
    return count_parameters(padded), (job_.sizes["vocab"] * job_.sizes["d_model"] if shared else 0)


def build_padded(job_: Request) -> Model:
    return replace(job_.model, sizes={**job_.model.sizes, "vocab": job_.sizes["vocab"]})


PARAMETER_MESHES = [
    {"pp": 2, "dp": 2, "tp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"dp": 2, "tp": 4},
    {"pp": 2, "dp": 4, "ep": 2},
    {"dp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"dp": 4, "tp": 2, "ep": 4},
]


PARAMETER_CASES = [
    (model, strategy, mesh)
    for model in sorted(MODELS)
    for strategy in ("ddp", "megatron", "megatron_sp")
    for mesh in PARAMETER_MESHES
    if fits(model, strategy, mesh)
]


@pytest.mark.parametrize(("model", "strategy", "mesh"), PARAMETER_CASES, ids=name_of)
def test_parameters_of_all_ranks_without_copies_are_the_models(
    model: str, strategy: str, mesh: dict[str, int]
) -> None:
    asked = request(model, strategy, **mesh, batch=8)
    total = 0
    for block in asked.model.blocks:
        graph = sharded_block(asked, block).forward
        for p in unit_parameters(graph, concrete(asked)):
            copies_of = asked.mesh.degree((*p.data, *p.model)) * alike(asked, graph.layouts[p.name])
            ranks = asked.mesh.world // asked.degrees["pp"]
            assert p.elements * ranks % copies_of == 0
            total += p.elements * ranks // copies_of
    table = asked.sizes["vocab"] * asked.sizes["d_model"] if asked.model.tied else 0
    assert total == elements(asked)[0] + table, "a tied table stands in both of its blocks"


def alike(job_: Request, layout: Layout) -> int:
    """Devices of a stage that hold an invariant parameter, whose gradients are equal without any sum."""
    return job_.mesh.degree([atom for atom in layout.invariant if job_.mesh.parent(atom) != "pp"])


def concrete(job_: Request) -> Concrete:
    return Concrete(symbol_values(job_), job_.mesh, {"compute": job_.dtype, "gradient": job_.grad_dtype})


def updated(job_: Request) -> int:
    """Elements that all ranks together update, by the work of their optimizer nodes."""
    traces = TraceSet.of(job(job_))
    per_class = traces.classes.ranks_per_class
    work = sum(
        int(str(n.get("num_ops")))
        for c in range(traces.classes.count)
        for n in traces.nodes(c * per_class)
        if n.get("op") == "adam"
    )
    assert work % ADAM_FLOPS == 0
    return work // ADAM_FLOPS * per_class


@pytest.mark.parametrize("model", ["llama3-8b", "gpt3-125m", "mixtral-8x7b"])
def test_optimizer_states_are_sharded_as_the_strategy_says(model: str) -> None:
    ddp = request(model, "ddp", dp=2, cp=2, pp=2, batch=8)
    once, again = elements(ddp)
    positions = ddp.sizes.get("positions", 0) * ddp.sizes["d_model"]
    assert updated(ddp) == (once + again) * 4 - positions * 2, "a table of positions is sliced over cp"
    fsdp = request(model, "fsdp", dp=2, cp=2, pp=2, batch=8)
    assert updated(fsdp) == once + again
    hsdp = request(model, "hsdp", dp=4, dp_shard=2, batch=8)
    assert updated(hsdp) == elements(hsdp)[0] * 2
    zero = request(model, "ddp", dp=2, cp=2, zero=1, batch=8, bucket_size=0)
    count = sum(len(zero.model.graph(block).parameters) for block in zero.model.blocks)
    assert 0 <= updated(zero) - elements(zero)[0] < 64 * count + 128 * 4


@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "ep": 2}, {"dp": 4, "ep": 2}], ids=name_of
)
def test_every_device_updates_what_it_holds_without_a_sharded_optimizer(mesh: dict[str, int]) -> None:
    asked = request("mixtral-8x7b", "megatron", **mesh, batch=8)
    held = 0
    for block in asked.model.blocks:
        graph = sharded_block(asked, block).forward
        held += sum(p.elements for p in unit_parameters(graph, concrete(asked)))
    assert updated(asked) == held * asked.mesh.world
