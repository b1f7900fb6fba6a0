"""Chunks of collectives and matrix multiplications: golden text, the same numbers, the same work, and what waits for what."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from stage.catalog import load_strategy
from stage.errors import LayoutError, StrategyError
from stage.graph import Graph, format_graph
from stage.model import Block
from stage.ops import get_op
from stage.passes.backward import Differentiated
from stage.passes.split import split_backward
from stage.request import Request
from stage.synthesis import job, sharded_block, symbol_values
from stage.trace.lower import Concrete, lower
from stage.trace.template import Template
from stage.traceset import TraceSet
from stage.verification import verify_set
from tests.small import MODELS, name_of, request
from tests.test_numerics import compare
from tests.test_passes_legality import checker

REDUCTIONS = ("reduce_scatter", "all_reduce")


def layer(job: Request) -> Differentiated:
    return sharded_block(job, job.model.layers[-1])


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if get_op(node.op).kernel]


@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
def test_a_layer_is_chunked_as_written_down(strategy: str, golden: Callable[[str, str], None]) -> None:
    both = layer(request("llama3-8b", strategy, tp=2, tp_overlap_chunks=2))
    golden(f"chunk/llama-{strategy}.txt", f"{format_graph(both.forward)}\n\n{format_graph(both.backward)}\n")


MESHES: list[dict[str, int]] = [
    {"tp": 2, "dp": 2},
    {"tp": 4},
    {"tp": 2, "cp": 2},
    {"tp": 2, "dp": 2, "ep": 4},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
]
CASES = [
    (model, strategy, mesh)
    for model in ("gpt3-125m", "llama3-8b", "gpt-oss-20b", "deepseek-v3")
    for strategy in ("megatron", "megatron_sp", "megatron_moe")
    for mesh in MESHES
    if "experts" in MODELS[model] or "ep" not in mesh
    if (strategy == "megatron_moe") == ("ep" in mesh) and not (strategy == "megatron" and "cp" in mesh)
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"attention": "unfused", "recompute": "selective"},
]


@pytest.mark.parametrize(("model", "strategy", "mesh"), CASES, ids=name_of)
def test_chunked_blocks_compute_what_unsharded_ones_do(
    model: str, strategy: str, mesh: dict[str, int]
) -> None:
    options = OPTIONS[CASES.index((model, strategy, mesh)) % len(OPTIONS)]
    done = compare(model, strategy, mesh, tp_overlap_chunks=2, **options)
    check, split = checker(done), 0
    for block in dict.fromkeys(done.model.blocks):
        both = sharded_block(done, block)
        assert [*check.defects(both.forward), *check.defects(both.backward)] == []
        split += sum(".chunk1" in name for name in (*names(both.forward), *names(both.backward)))
    assert split >= 10


def test_two_dimensions_of_tensor_parallelism_are_chunked_too() -> None:
    """Here a gather along the hidden size and the reduction after it stand next to one product."""
    done = compare("llama3-8b", "tp_2d", {"tp": 4}, tp_x=2, tp_overlap_chunks=2)
    split = names(layer(done).forward)
    assert {"mlp.norm.all_gather.chunk1", "mlp.gate_proj.reduce_scatter.chunk1"} <= set(split)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("chunks", [2, 4])
def test_weights_that_are_not_fused_are_chunked_too(chunks: int, fuse: bool) -> None:
    compare(
        "llama3-8b", replace(load_strategy("megatron_sp"), fuse=fuse), {"tp": 4}, tp_overlap_chunks=chunks
    )


@pytest.mark.parametrize(("model", "strategy", "mesh"), CASES, ids=name_of)
def test_work_and_bytes_are_those_of_the_whole(model: str, strategy: str, mesh: dict[str, int]) -> None:
    """FLOPs of each product and bytes of each collective, of a device, add up to what they were."""
    plain, split = (request(model, strategy, **mesh, tp_overlap_chunks=n) for n in (1, 2))
    blocks = zip(*(dict.fromkeys(made.model.blocks) for made in (plain, split)), strict=True)
    for one, other in blocks:
        for before, after in zip(templates(plain, one), templates(split, other), strict=True):
            pieces: dict[str, list[int]] = {}
            for node in after.nodes:
                found = pieces.setdefault(node.name.split(".chunk")[0], [])
                found.append(node.flops if node.is_compute else node.bytes)
            whole = {n.name: n.flops if n.is_compute else n.bytes for n in before.nodes}
            assert {name: sum(found) for name, found in pieces.items()} == whole
            assert all(len(set(found)) == 1 and len(found) in (1, 2) for found in pieces.values())
            assert sum(n.model_flops for n in before.nodes) == sum(n.model_flops for n in after.nodes)


def templates(made: Request, block: Block) -> tuple[Template, Template]:
    concrete = Concrete(symbol_values(made), made.mesh, {"compute": "bf16", "gradient": "fp32"})
    found = lower(sharded_block(made, block), concrete)
    return found.forward, found.backward


@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
def test_a_chunk_waits_for_its_own_chunk_alone(strategy: str) -> None:
    """A product's chunk for the one of its gather, a reduction's for the one of its product, and for the chunk before."""
    found = Counter[str]()
    made = request("llama3-8b", strategy, tp=2, tp_overlap_chunks=4)
    for template in templates(made, made.model.layers[0]):
        for node in template.nodes:
            if ".chunk" not in node.name:
                continue
            number = node.name[-1]
            parents = [template.nodes[int(r.target)] for r in node.deps if r.kind == "self"]
            others = [p for p in parents if p.is_compute != node.is_compute and ".chunk" in p.name]
            if node.matmul and others:
                found[f"product {number}"] += 1
                assert [p.kind for p in others] == ["all_gather"]
                assert others[0].name.endswith(f".chunk{number}")
            if node.kind in REDUCTIONS:
                found[f"reduction {number}"] += 1
                assert [p.name[-1] for p in others] == [number]
                assert others[0].matmul
    kinds = {name.split()[0] for name in found}
    assert kinds == ({"product", "reduction"} if strategy == "megatron_sp" else {"reduction"})
    assert len(found) == 4 * len(kinds)
    assert len(set(found.values())) <= len(kinds)


def longest(template: Template, chunks: int) -> Fraction:
    """The time of a template in which each whole node that is chunked takes 1, and others nothing."""
    ends: list[Fraction] = []
    for node in template.nodes:
        start = max((ends[int(r.target)] for r in node.deps if r.kind == "self"), default=Fraction(0))
        ends.append(start + (Fraction(1, chunks) if ".chunk" in node.name or chunks == 1 else 0))
    return max(ends)


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_pair_takes_one_chunk_more_than_the_longer_of_the_two(chunks: int) -> None:
    """Of N chunks of time 1/N each, a gather and a product end after 1 + 1/N, not 2 (Wang et al. 2023, figure 5)."""
    made = request("llama3-8b", "megatron_sp", tp=2, tp_overlap_chunks=chunks)
    template, _ = templates(made, made.model.layers[0])
    assert longest(template, chunks) == 4 * (1 + Fraction(1, chunks)), "qkv, o, gate and up, down"


def test_products_that_sum_over_tokens_stay_whole_and_wait_for_all() -> None:
    both = layer(request("llama3-8b", "megatron_sp", tp=2, tp_overlap_chunks=2))
    whole = [node.name for node in both.backward.nodes if "wgrad" in node.name]
    assert whole == [
        "mlp.down_proj.wgrad",
        "mlp.gate_up_proj.wgrad",
        "attn.o_proj.wgrad",
        "attn.qkv_proj.wgrad",
    ]
    again = [node.name for node in both.backward.nodes if ".again" in node.name]
    assert again == ["mlp.norm.all_gather.again", "attn.norm.all_gather.again"], (
        "only weight gradients read these"
    )


def test_a_split_backward_has_each_chunk_once() -> None:
    both = layer(request("llama3-8b", "megatron_sp", tp=2, tp_overlap_chunks=2, recompute="full"))
    parts = split_backward(both)
    assert sorted((*names(parts.input), *names(parts.weight))) == sorted(names(both.backward))
    assert not any(".chunk" in name for name in names(parts.weight))


MIXES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "pp": 2, "batch": 8}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "pp": 2, "batch": 8, "schedule": "zb-h1", "streams": "per-axis"}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "cp": 2, "pp": 2, "batch": 8, "schedule": "interleaved", "vpp": 2,
                                  "sizes": {"layers": 4}}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "zero": 3, "streams": "per-axis"}),
    ("deepseek-v3", "megatron_moe", {"tp": 2, "dp": 2, "ep": 4, "pp": 2, "batch": 8, "schedule": "zb-v",
                                     "sizes": {"layers": 4}}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "strategy", "options"), MIXES, ids=name_of)
def test_mixes_are_proved_and_send_the_same_bytes(model: str, strategy: str, options: dict[str, Any]) -> None:
    whole, split = (
        TraceSet.of(job(request(model, strategy, tp_overlap_chunks=n, **options))) for n in (1, 2)
    )
    report = verify_set(split)
    assert (report.defects, report.unchecked) == ((), ())
    for before, after in zip(whole.summaries, split.summaries, strict=True):
        for total in ("num_ops", "matmul_ops", "model_flops"):
            assert before[total] == after[total]
        sent = [{(c["kind"], *c["axes"]): c["bytes"] for c in s["communication"]} for s in (before, after)]
        assert sent[0] == sent[1]
        assert after["nodes"] > before["nodes"]


def test_one_chunk_is_the_job_itself() -> None:
    one, none = (
        job(request("llama3-8b", "megatron_sp", tp=2, **more)) for more in ({"tp_overlap_chunks": 1}, {})
    )
    assert TraceSet.of(one).rank(0) == TraceSet.of(none).rank(0)


@pytest.mark.parametrize(
    ("strategy", "options", "error", "text"),
    [
        (
            "megatron_sp",
            {"tp": 2, "tp_overlap_chunks": 3},
            LayoutError,
            "seq = 16 of attn.norm leaves shards of 8 tokens, which do not divide into "
            "tp_overlap_chunks = 3; choose a number that divides 8",
        ),
        (
            "megatron",
            {"tp": 2, "cp": 2, "tp_overlap_chunks": 16},
            LayoutError,
            "seq = 16 of attn.core leaves shards of 8 tokens, which do not divide into tp_overlap_chunks = 16; "
            "choose a number that divides 8",
        ),
        (
            "megatron_sp",
            {"dp": 2, "tp_overlap_chunks": 2},
            StrategyError,
            "tp_overlap_chunks = 2 splits nothing: no collective stands next to a matrix multiplication; leave it at 1, "
            "or shard heads or d_ff over tp above 1",
        ),
        (
            "megatron_sp",
            {"tp": 2, "tp_overlap_chunks": 0},
            StrategyError,
            "strategy megatron_sp: tp_overlap_chunks is 0; an integer from 1 to 256 is expected",
        ),
    ],
)
def test_what_can_not_be_chunked_is_refused(
    strategy: str, options: dict[str, int], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        job(request("llama3-8b", strategy, **options))
    assert str(caught.value) == text
