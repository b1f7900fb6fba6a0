"""Sharded graphs compute what unsharded ones do, forward and backward; unsharded ones differentiate correctly."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from stage.catalog import load_strategy
from stage.graph import Graph
from stage.mesh import build_mesh
from stage.model import Block
from stage.passes.backward import Differentiated, differentiate
from stage.request import Request
from stage.strategy import Strategy
from stage.synthesis import sharded_block, symbol_values
from tests.executor import Executor, Floats, execute
from tests.small import CASES, MESHES, MODELS, fits, name_of, request, uses

ONE = build_mesh()
BLOCKS = ("embedding", "layer", "head")


def draw(graph: Graph, sizes: Mapping[str, int]) -> dict[str, Floats]:
    """Values for the inputs and parameters of a graph."""
    rng, shapes = np.random.default_rng(7), Executor(ONE, sizes, np.random.default_rng(0))
    found: dict[str, Floats] = {}
    for name in (*graph.inputs, *(t.name for t in graph.parameters)):
        tensor = graph.tensors[name]
        shape = shapes.shape(tensor)
        found[name] = (
            rng.integers(0, sizes["vocab"], shape) if tensor.role == "index" else rng.normal(0, 0.5, shape)
        )
    return found


def zigzag(seq: int, ring: int) -> Floats:
    """The positions of a sequence laid so that rank i of n has the chunks i and 2n-1-i of 2n."""
    chunks = np.split(np.arange(seq), 2 * ring)
    return np.concatenate([part for i in range(ring) for part in (chunks[i], chunks[-1 - i])])


@cache
def unsharded(
    model: str, kind: str, batch: int, options: tuple[tuple[str, Any], ...], ring: int = 1
) -> tuple[Any, ...]:
    """A block on one device: its derivative, its values forward and backward, what it was given."""
    known = dict(options)
    changed = dict(known.pop("sizes", ()))
    job = request(model, "ddp", batch=batch, micro_batch=batch, sizes=changed, **known)
    block = next(b for b in job.model.blocks if b.kind == kind)
    sizes = symbol_values(job)
    both = differentiate(job.model.graph(block))
    given = draw(both.forward, sizes)
    out = both.forward.tensors[both.forward.outputs[0]]
    shape = Executor(ONE, sizes, np.random.default_rng(0)).shape(out)
    seed = np.random.default_rng(8).normal(size=shape)
    ahead, behind = execute(both, ONE, sizes, given, seed, zigzag(job.seq, ring))
    return both, ahead, behind, given, seed


def compare(model: str, strategy: str | Strategy, mesh: dict[str, int], **options: Any) -> Request:
    job = request(model, strategy, **mesh, **options)
    sizes = symbol_values(job)
    circulates, cp = job.strategy.contexts.circulates, job.degrees["cp"]
    laid = circulates and job.strategy.context_balance == "zigzag"
    ring = cp // job.strategy.contexts.ulysses(cp) if laid else 1
    plain = {key: value for key, value in options.items() if key in ("attention", "mask", "dropout")}
    plain |= {"sizes": tuple(sorted(options.get("sizes", {}).items()))}
    for block in dict.fromkeys(job.model.blocks):
        batch = job.sizes["batch"]
        both, ahead, behind, given, seed = unsharded(
            model,
            block.kind,
            batch,
            (("vocab_multiple", 8 * job.degrees["tp"]), *sorted(plain.items())),
            ring,
        )
        shard = sharded_block(job, block)
        ahead_on, behind_on = execute(shard, job.mesh, sizes, given, seed, zigzag(job.seq, ring))
        check_forward(block, both, ahead, shard, ahead_on)
        check_backward(block, both, behind, shard, behind_on)
    return job


def check_forward(
    block: Block, both: Differentiated, ahead: Executor, shard: Differentiated, on: Executor
) -> None:
    for name, tensor in both.forward.tensors.items():
        if name in ahead.values and name in shard.forward.tensors and tensor.role != "index":
            expected, found = ahead.get(both.forward, name), on.get(shard.forward, name)
            np.testing.assert_allclose(found, expected, 1e-6, 1e-9, err_msg=f"{block.kind}: {name}")


def check_backward(
    block: Block, both: Differentiated, behind: Executor, shard: Differentiated, on: Executor
) -> None:
    assert both.gradients.keys() == shard.gradients.keys() == {t.name for t in both.forward.parameters}
    pairs = [(name, shard.gradients[parameter]) for parameter, name in both.gradients.items()]
    for name, other in [*pairs, *zip(both.cotangents, shard.cotangents, strict=True)]:
        assert (name is None) == (other is None)
        if name is not None and other is not None:
            expected, found = behind.get(both.backward, name), on.get(shard.backward, other)
            np.testing.assert_allclose(found, expected, 1e-6, 1e-9, err_msg=f"{block.kind}: {name}")


@pytest.mark.parametrize(
    "options", [{}, {"attention": "unfused"}, {"dropout": True}, {"mask": "full"}], ids=name_of
)
@pytest.mark.parametrize("model", MODELS)
def test_derivatives_are_those_of_finite_differences(model: str, options: dict[str, Any]) -> None:
    job = request(model, "ddp", batch=2, micro_batch=2, **options)
    sizes, rng, step = symbol_values(job), np.random.default_rng(9), 1e-6
    for block in dict.fromkeys(job.model.blocks):
        both, _, behind, given, seed = unsharded(model, block.kind, 2, tuple(sorted(options.items())))
        cotangents = dict(zip(both.forward.inputs, both.cotangents, strict=True)) | both.gradients
        for name, cotangent in cotangents.items():
            if cotangent is None:
                assert both.forward.tensors[name].role == "index"
                continue
            way = rng.normal(size=given[name].shape)
            ends = [
                value(both.forward, sizes, given | {name: given[name] + s * way}, seed) for s in (step, -step)
            ]
            expected = (ends[0] - ends[1]) / (2 * step)
            assert (behind.values[cotangent] * way).sum() == pytest.approx(expected, rel=1e-5, abs=1e-5), name


def value(graph: Graph, sizes: Mapping[str, int], given: Mapping[str, Floats], seed: Floats) -> float:
    """The output, weighted by the seed."""
    one = Executor(ONE, sizes, np.random.default_rng(0))
    for name, x in given.items():
        one.put(graph, name, x)
    one.run(graph)
    return float((one.values[graph.outputs[0]] * seed).sum())


@pytest.mark.parametrize("model", [model for model in MODELS if model != "deepseek-v3"])
def test_unfused_attention_computes_what_fused_does(model: str) -> None:
    kind = request(model, "ddp").model.layers[0].kind
    both, fused, fused_back, _, _ = unsharded(model, kind, 2, ())
    parts, unfused, unfused_back, _, _ = unsharded(model, kind, 2, (("attention", "unfused"),))
    out = both.forward.outputs[0]
    np.testing.assert_allclose(unfused.values[out], fused.values[out], 1e-6, 1e-9)
    for name, gradient in both.gradients.items():
        found, expected = unfused_back.values[parts.gradients[name]], fused_back.values[gradient]
        np.testing.assert_allclose(found, expected, 1e-6, 1e-9, err_msg=name)


REPRESENTATIVE = ("gpt3-125m", "llama3-8b", "gpt-oss-20b", "deepseek-v3")


DISTINCT = ("ddp", "megatron", "megatron_sp")
"""Strategies that shard activations differently; the others shard them as one of these does."""


@pytest.mark.parametrize(
    ("model", "strategy", "mesh"),
    [c for c in CASES if c[0] in REPRESENTATIVE and c[1] in DISTINCT],
    ids=name_of,
)
def test_sharded_blocks_compute_what_unsharded_ones_do(
    model: str, strategy: str, mesh: dict[str, int]
) -> None:
    compare(model, strategy, mesh)


@pytest.mark.parametrize("model", sorted(set(MODELS) - set(REPRESENTATIVE)))
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
def test_every_family_does_on_its_widest_mesh(model: str, strategy: str) -> None:
    compare(model, strategy, [mesh for mesh in MESHES if fits(model, strategy, mesh)][-1])


@pytest.mark.parametrize("strategy", DISTINCT)
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_recomputed_blocks_compute_the_same(strategy: str, recompute: str, attention: str) -> None:
    mesh = {"dp": 2, "tp": 2, "ep": 2} if uses(strategy, {"tp": 2}) else {"dp": 2, "cp": 2}
    compare("gpt-oss-20b", strategy, mesh, recompute=recompute, attention=attention)
    compare("deepseek-v3", strategy, mesh, recompute=recompute, attention=attention)


OPS = (
    ("llama3-8b", "ops:norm"),
    ("llama3-8b", "ops:up_proj,act"),
    ("llama3-8b", "ops:mlp,norm,attention"),
    ("qwen3-30b-a3b", "ops:norm,dispatch,moe_act"),
    ("gpt-oss-20b", "ops:moe"),
    ("deepseek-v3", "ops:norm,mla_up_proj,act"),
    ("deepseek-v3", "ops:core_attn,mlp,shared_experts,layernorm,up_proj"),
)


@pytest.mark.parametrize("strategy", DISTINCT)
@pytest.mark.parametrize(("model", "recompute"), OPS)
def test_parts_that_are_recomputed_compute_the_same(model: str, recompute: str, strategy: str) -> None:
    mesh = {"dp": 2, "tp": 2, "ep": 2} if uses(strategy, {"tp": 2}) else {"dp": 2, "cp": 2}
    compare(model, strategy, {k: n for k, n in mesh.items() if k != "ep" or "experts" in MODELS[model]},
            recompute=recompute)  # fmt: skip


@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
@pytest.mark.parametrize("options", [{"attention": "unfused"}, {"dropout": True}], ids=name_of)
def test_kv_heads_fewer_than_tp_are_replicated(strategy: str, options: dict[str, Any]) -> None:
    for model in ("llama3-8b", "qwen3-8b", "qwen2-7b"):
        compare(model, strategy, {"tp": 4}, **options)


@pytest.mark.parametrize(
    "mesh", [{"tp": 4, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "tp": 2, "ep": 4}], ids=name_of
)
def test_a_table_without_slots_repeats_work_but_computes_the_same(mesh: dict[str, int]) -> None:
    table = load_strategy("megatron_moe")
    less = replace(table, shard=tuple(row for row in table.shard if row[0] != "slots"))
    job = compare("mixtral-8x7b", less, mesh)
    weight = sharded_block(job, job.model.layers[0]).forward.layouts["moe.experts.down_proj.weight"]
    (atom,) = job.mesh.expand("edp")
    assert weight.state(atom) == "R", "a part of an axis whose other part shards the op"
