"""Blocks in 8 bits compute what unsharded ones in full precision do, where copies are exact.

Quantising is the identity here: rounding is not modelled, and what is shown is that every copy is of the right tensor,
lives on the right devices and is gathered, transposed and dispatched to where its product needs it. Blocks of scales
are shortened so that the small models have several on every device.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stage.passes.backward import Differentiated
from stage.precision import FP8, RECIPES
from stage.synthesis import sharded_block, symbol_values
from tests.executor import Executor, execute
from tests.legality import Checker
from tests.small import MESHES, fits, name_of, request
from tests.test_numerics import check_backward, unsharded

MODELS = ("llama3-8b", "gpt-oss-20b", "deepseek-v3")
DEGREES = [mesh for mesh in MESHES if mesh.keys() & {"tp", "ep"}]
CASES = [
    (model, strategy, mesh)
    for model in MODELS
    for strategy in ("megatron", "megatron_sp")
    for mesh in DEGREES
    if fits(model, strategy, mesh)
]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recipe in RECIPES.items():
        monkeypatch.setitem(RECIPES, name, replace(recipe, block=min(recipe.block, 2), rows=1, columns=1))


def compare(model: str, strategy: str, mesh: dict[str, int], **options: Any) -> dict[str, int]:
    """Compare every block's values; how many nodes of each op its layers have."""
    job = request(model, strategy, **mesh, **options)
    sizes, ops = symbol_values(job), dict[str, int]()
    for block in dict.fromkeys(job.model.blocks):
        vocab = (("vocab_multiple", 8 * job.degrees["tp"]),)
        both, ahead, behind, given, seed = unsharded(model, block.kind, job.sizes["batch"], vocab)
        shard = sharded_block(job, block)
        checker = Checker(job.mesh, Executor(job.mesh, sizes, np.random.default_rng(0)))
        assert not [*checker.defects(shard.forward), *checker.defects(shard.backward)]
        ahead_on, behind_on = execute(shard, job.mesh, sizes, given, seed)
        check_values(both, ahead, shard, ahead_on)
        check_backward(block, both, behind, shard, behind_on)
        for node in (*shard.forward.nodes, *shard.backward.nodes):
            ops[node.op] = ops.get(node.op, 0) + 1
    return ops


def check_values(both: Differentiated, ahead: Executor, shard: Differentiated, on: Executor) -> None:
    """Every forward tensor that both have, and every copy in 8 bits of one."""
    checked = 0
    for name in on.values:
        plain = name.removesuffix(".fp8").removesuffix(".fp8_t").removesuffix(".all_gather")
        if plain in ahead.values and both.forward.tensors[plain].role != "index":
            found, expected = on.get(shard.forward, name), ahead.get(both.forward, plain)
            np.testing.assert_allclose(found, expected, 1e-6, 1e-9, err_msg=name)
            checked += name.endswith((".fp8", ".fp8_t"))
    covered = any(t.dtype == FP8 for t in shard.forward.tensors.values())
    assert bool(checked) == covered


@pytest.mark.parametrize(("model", "strategy", "mesh"), CASES, ids=name_of)
def test_blocks_of_scales_compute_the_same(model: str, strategy: str, mesh: dict[str, int]) -> None:
    dispatch = model != "llama3-8b"
    ops = compare(model, strategy, mesh, fp8="mxfp8", fp8_dispatch=dispatch)
    assert ops["quantize"]
    assert ("requantize" in ops) == dispatch, "column copies of tokens are made at their expert"


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("mesh", [{"tp": 2, "dp": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}], ids=name_of)
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "ops:norm,act", "ops:moe"])
def test_every_recipe_computes_the_same(recipe: str, mesh: dict[str, int], recompute: str) -> None:
    ops = compare("gpt-oss-20b", "megatron_sp", mesh, fp8=recipe, recompute=recompute)
    assert ("amax" in ops) == (recipe == "tensorwise")
    assert ("requantize" in ops) == (recipe != "blockwise"), (
        "copies under one scale are transposed behind a gather"
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_context_parallel_blocks_compute_the_same(recipe: str, context: str) -> None:
    compare("llama3-8b", "megatron_sp", {"cp": 2, "tp": 2}, fp8=recipe, context=context)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_tensor_parallelism_in_two_dims_computes_the_same(recipe: str) -> None:
    compare("llama3-8b", "tp_2d", {"tp": 4}, fp8=recipe, tp_x=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "megatron_sp"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_stored_weights_compute_the_same(strategy: str, recipe: str) -> None:
    compare(
        "gpt-oss-20b",
        strategy,
        {"dp": 2},
        fp8=recipe,
        fp8_param_gather=True,
        zero=3 if strategy == "fsdp" else 1,
    )
