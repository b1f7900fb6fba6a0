"""Shared experts beside the dispatch: golden text, the same work, the same numbers, and what runs while tokens travel."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from stage.errors import StrategyError
from stage.graph import Graph, format_graph
from stage.ops import get_op
from stage.ops.collective import is_collective
from stage.passes.backward import Differentiated
from stage.passes.overlap import overlap, overlaps
from stage.request import Request
from stage.synthesis import job, sharded_block, symbol_values
from stage.trace.lower import Concrete, lower
from stage.trace.template import Template
from stage.traceset import TraceSet
from stage.verification import verify_set
from tests.small import MODELS, name_of, request
from tests.test_numerics import compare
from tests.test_passes_legality import checker

MESHES: list[dict[str, int]] = [
    {"dp": 4, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 4},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    {"tp": 2, "cp": 2, "dp": 2, "ep": 4},
]


def made(mesh: dict[str, int], *, beside: bool = True, **options: Any) -> Request:
    return request("deepseek-v3", "megatron_moe", **mesh, moe_shared_expert_overlap=beside, **options)


def layer(job: Request) -> Differentiated:
    return sharded_block(job, job.model.layers[-1])


def test_a_layer_is_reordered_as_written_down(golden: Callable[[str, str], None]) -> None:
    both = layer(made({"tp": 2, "dp": 2, "ep": 4}))
    for graph, name in ((both.forward, "forward"), (both.backward, "backward")):
        golden(f"overlap/deepseek-{name}.txt", f"{format_graph(graph)}\n")


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=name_of)
def test_reordered_blocks_compute_what_unsharded_ones_do(
    mesh: dict[str, int], options: dict[str, Any]
) -> None:
    done = compare("deepseek-v3", "megatron_moe", mesh, moe_shared_expert_overlap=True, **options)
    check = checker(done)
    for block in dict.fromkeys(done.model.blocks):
        both = sharded_block(done, block)
        assert [*check.defects(both.forward), *check.defects(both.backward)] == []


def kernels(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes if get_op(node.op).kernel)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_only_the_order_changes(mesh: dict[str, int]) -> None:
    plain, beside = (layer(made(mesh, beside=flag)) for flag in (False, True))
    moved = {name for name in names(plain.forward) if "shared" in name.split(".")}
    assert sorted(names(plain.forward)) == sorted(names(beside.forward))
    for graphs in ((plain.forward, beside.forward), (plain.backward, beside.backward)):
        rest = [[name for name in names(graph) if not others(name, moved)] for graph in graphs]
        assert rest[0] == rest[1]
    more = kernels(beside.backward) - kernels(plain.backward)
    assert more == (Counter() if "tp" in mesh else Counter(add=1)), (
        "a gradient that was added in by a product before"
    )
    assert not kernels(plain.backward) - kernels(beside.backward)


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def others(name: str, moved: set[str]) -> bool:
    """Whether a node is the shared expert's: by name, one that gathers for it alone, or one that adds its gradient."""
    own = ("moe.norm.all_gather", "moe.norm.cotangent_sum")
    return any(name.startswith(known) for known in (*moved, *own))


def templates(job: Request) -> tuple[Template, Template]:
    concrete = Concrete(symbol_values(job), job.mesh, {"compute": "bf16", "gradient": "fp32"})
    found = lower(layer(job), concrete)
    return found.forward, found.backward


def behind(template: Template) -> list[set[int]]:
    """The nodes that each node runs behind, streams included."""
    found: list[set[int]] = []
    for node in template.nodes:
        parents = {int(ref.target) for ref in node.deps if ref.kind == "self"}
        found.append(parents.union(*(found[at] for at in parents)))
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_shared_experts_run_while_tokens_are_dispatched(mesh: dict[str, int]) -> None:
    """No kernel of a shared expert waits for the all-to-all, and what does wait for it stands behind all of them."""
    for template in templates(made(mesh)):
        ancestors = behind(template)
        flight = next(at for at, node in enumerate(template.nodes) if node.kind == "all_to_all")
        shared = [at for at, n in enumerate(template.nodes) if n.is_compute and "shared" in n.name.split(".")]
        assert len(shared) in (3, 5)
        assert all(flight not in ancestors[at] and at not in ancestors[flight] for at in shared)
        landing = next(at for at, n in enumerate(template.nodes) if n.is_compute and flight in ancestors[at])
        assert ancestors[landing].issuperset(shared)
        assert template.nodes[landing].op == "sort_by_expert"


def test_without_it_shared_experts_run_alone() -> None:
    ahead, back = templates(made({"tp": 2, "dp": 2, "ep": 4}, beside=False))
    for template, before in ((ahead, True), (back, False)):
        ancestors = behind(template)
        flight = next(at for at, node in enumerate(template.nodes) if node.kind == "all_to_all")
        shared = [at for at, n in enumerate(template.nodes) if n.is_compute and "shared" in n.name.split(".")]
        related = [at in ancestors[flight] if before else flight in ancestors[at] for at in shared]
        assert all(related)


def test_the_pass_done_twice_is_the_pass() -> None:
    both = layer(made({"tp": 2, "dp": 2, "ep": 4}))
    assert overlap(both.forward) == both.forward
    assert overlap(both.backward) == both.backward
    assert overlaps(both.forward)


def test_a_block_without_the_two_is_left_as_it_is() -> None:
    for model in ("llama3-8b", "mixtral-8x7b"):
        graph = layer(request(model, "megatron_moe", tp=2)).forward
        assert overlap(graph) is graph
    dense = made({"dp": 4, "ep": 2})
    graph = sharded_block(dense, dense.model.layers[0]).forward
    assert overlap(graph) is graph
    assert not any(is_collective(node.op) and node.op == "all_to_all" for node in graph.nodes)


MIXES: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "1f1b", "streams": "per-axis"},
    {"pp": 2, "schedule": "interleaved", "vpp": 2},
    {"pp": 2, "schedule": "zb-v", "recompute": "full"},
    {"pp": 2, "schedule": "zb-h1", "streams": "per-axis", "zero": 3},
    {"pp": 2, "schedule": "1f1b", "tp_overlap_chunks": 2, "streams": "per-axis"},
]


@pytest.mark.parametrize("options", MIXES, ids=name_of)
def test_mixes_are_proved(options: dict[str, Any]) -> None:
    sizes = {"layers": 4}
    found = TraceSet.of(job(made({"tp": 2, "dp": 2, "ep": 4}, batch=8, sizes=sizes, **options)))
    report = verify_set(found)
    assert (report.defects, report.unchecked) == ((), ())
    assert found.manifest["moe_shared_expert_overlap"] is True


@pytest.mark.parametrize(
    ("model", "mesh"), [("mixtral-8x7b", {"dp": 4, "ep": 2}), ("deepseek-v3", {"dp": 4})]
)
def test_nothing_to_overlap_is_refused(model: str, mesh: dict[str, int]) -> None:
    assert model in MODELS
    with pytest.raises(StrategyError) as caught:
        job(request(model, "megatron_moe", moe_shared_expert_overlap=True, **mesh))
    assert str(caught.value) == (
        "moe_shared_expert_overlap finds no shared expert beside an all-to-all; leave it out, "
        "or take a model with shared experts and ep above 1"
    )
