"""Backward: golden texts of tiny graphs, and what is saved, gathered again and reduced."""

from collections import Counter
from collections.abc import Callable

import pytest

from stage.blocks import gated_mlp, mlp
from stage.graph import Builder, Graph, Options, format_graph
from stage.mesh import build_mesh
from stage.passes.backward import Differentiated, differentiate
from stage.passes.shard import shard
from stage.synthesis import sharded_block
from tests.small import MODELS, request
from tests.test_passes_shard import SEQUENCE, SIZES, TENSOR, TINY, norm


def both(name: str, regather: frozenset[str] = frozenset()) -> Differentiated:
    make, table, degrees = TINY[name]
    mesh = build_mesh(**degrees, kv_heads=SIZES["kv_heads"])
    return differentiate(shard(make(), table, mesh, SIZES), mesh.names, regather)


def text(pair: Differentiated) -> str:
    return f"{format_graph(pair.forward)}\n\n{format_graph(pair.backward)}\n"


@pytest.mark.parametrize("name", TINY)
def test_tiny_graphs_are_differentiated_as_written_down(
    name: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"backward/{name}.txt", text(both(name)))


def test_a_gathered_input_is_gathered_again_where_asked(golden: Callable[[str, str], None]) -> None:
    golden("backward/mlp-tp-sp-regather.txt", text(both("mlp-tp-sp", frozenset({"tp"}))))
    kept, again = both("mlp-tp-sp"), both("mlp-tp-sp", frozenset({"tp"}))
    assert "x.all_gather" in kept.saved
    assert "x.all_gather" not in again.saved
    assert "x" in again.saved
    assert count(again.backward)["all_gather"] == count(kept.backward)["all_gather"] + 1


def count(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def test_an_unsharded_graph_has_no_collective_in_backward() -> None:
    pair = differentiate(norm())
    assert not any("step" in node.attrs for node in pair.backward.nodes)


def test_a_residual_hands_its_cotangent_on() -> None:
    pair = differentiate(norm())
    assert count(pair.backward) == {"norm_backward": 1, "add": 1}
    assert pair.seeds == ("d.residual",)


def test_a_gradient_is_added_into_where_a_parameter_is_used_twice() -> None:
    b = Builder("twice")
    x = b.input("x", "batch", "seq", "d_model")
    weight = b.parameter("w", "d_model", b.dim("d_out", SIZES["d_model"]))
    first = b.contract(x, weight, "first", ("batch", "seq", "d_out"))
    second = b.contract(x, weight, "second", ("batch", "seq", "d_out"))
    pair = differentiate(b.graph(b.add("sum", first, second)))
    wgrads = [node for node in pair.backward.nodes if node.name.endswith("wgrad")]
    assert [len(node.inputs) for node in wgrads] == [2, 3]
    assert wgrads[1].inputs[2] == wgrads[0].outputs[0]
    assert pair.gradients["w"] == wgrads[1].outputs[0]


def test_tokens_have_no_cotangent() -> None:
    job = request("llama3-8b", "megatron", tp=2)
    assert sharded_block(job, job.model.embedding).cotangents == (None,)
    assert sharded_block(job, job.model.head).cotangents[1] is None


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_has_a_gradient_in_the_gradients_dtype(model: str) -> None:
    job = request(model, "ddp", dp=2)
    for block in dict.fromkeys(job.model.blocks):
        pair = sharded_block(job, block)
        assert pair.gradients.keys() == {t.name for t in pair.forward.parameters}
        for parameter, gradient in pair.gradients.items():
            found, primal = pair.backward.tensors[gradient], pair.forward.tensors[parameter]
            assert (found.role, found.dtype, found.dims) == ("gradient", "gradient", primal.dims)


@pytest.mark.parametrize("table", [TENSOR, SEQUENCE])
def test_backward_of_an_mlp_reduces_once_where_forward_gathers_once(table: object) -> None:
    for make in (mlp, gated_mlp):
        b = Builder("mlp")
        graph = b.graph(make(b, b.input("x", "batch", "seq", "d_model")))
        mesh = build_mesh(tp=2)
        pair = differentiate(shard(graph, table, mesh, SIZES), mesh.names)  # type: ignore[arg-type]
        ahead, behind = count(pair.forward), count(pair.backward)
        if table is TENSOR:
            assert (ahead["all_reduce"], behind["all_reduce"]) == (1, 1)
        else:
            assert (ahead["all_gather"], ahead["reduce_scatter"]) == (1, 1)
            assert (behind["all_gather"], behind["reduce_scatter"]) == (1, 1)


def test_the_backward_reads_only_what_is_saved_given_or_made() -> None:
    for model in MODELS:
        for options in ({}, {"attention": "unfused"}, {"dropout": True}):
            job = request(model, "ddp", **options)
            for block in dict.fromkeys(job.model.blocks):
                pair = sharded_block(job, block)
                made = {out for node in pair.backward.nodes for out in node.outputs}
                known = {*pair.saved, *pair.seeds, *made, *(t.name for t in pair.backward.parameters)}
                assert {name for node in pair.backward.nodes for name in node.inputs} <= known
                ahead = {*pair.forward.inputs, *(out for node in pair.forward.nodes for out in node.outputs)}
                assert set(pair.saved) <= ahead


def test_options_of_the_builder_change_the_graph() -> None:
    plain, masked = (Builder("b", Options(dropout=flag)) for flag in (False, True))
    for b, op in ((plain, 0), (masked, 1)):
        x = b.input("x", "batch", "seq", "d_model")
        graph = b.graph(b.dropout("drop", x) if op else b.add("same", x))
        assert count(graph)["dropout"] == op
