"""Taking kernels apart where a table shards what they sum: golden texts, and graphs that stay as they are."""

from collections.abc import Callable

import pytest

from stage.blocks import layer_norm, mlp, rms_norm
from stage.graph import Builder, Graph, format_graph
from stage.mesh import build_mesh
from stage.passes.backward import differentiate
from stage.passes.shard import Table, shard
from stage.passes.unfuse import unfuse
from tests.small import MODELS, request
from tests.test_passes_shard import SEQUENCE, SIZES

GRID: Table = (("d_model", ["tp_x"]), ("d_ff", ["tp"]), ("batch", ["dp"]), ("seq", ["cp", "tp"]))
MESH = build_mesh(tp=4, tp_x=2)


def norms(kind: str) -> Graph:
    b = Builder(f"{kind}_norm")
    x = b.input("x", "batch", "seq", "d_model")
    return b.graph((rms_norm if kind == "rms" else layer_norm)(b, x, "norm"))


def biased() -> Graph:
    b = Builder("mlp")
    return b.graph(mlp(b, b.input("x", "batch", "seq", "d_model"), bias=True))


@pytest.mark.parametrize(
    ("name", "graph"), [("rms-norm", norms("rms")), ("layer-norm", norms("layer")), ("bias", biased())]
)
def test_parts_are_as_written_down(name: str, graph: Graph, golden: Callable[[str, str], None]) -> None:
    apart = unfuse(graph, GRID, MESH)
    pair = differentiate(shard(apart, GRID, MESH, SIZES), MESH.names)
    texts = (format_graph(g) for g in (graph, apart, pair.forward, pair.backward))
    golden(f"unfuse/{name}.txt", "\n\n".join(texts) + "\n")


@pytest.mark.parametrize("model", MODELS)
def test_a_table_that_shards_no_such_dim_leaves_every_block_as_it_is(model: str) -> None:
    job = request(model, "ddp")
    for block in job.model.blocks:
        graph = job.model.graph(block)
        assert unfuse(graph, SEQUENCE, MESH) == graph
        assert unfuse(graph, GRID, build_mesh(tp=4, tp_x=1)) == graph


def test_the_bias_of_a_product_over_a_whole_dim_stays_in_its_epilogue() -> None:
    b = Builder("up")
    graph = b.graph(b.linear(b.input("h", "batch", "seq", "d_ff"), "down", ["d_ff"], ["d_model"], bias=True))
    table: Table = (("d_model", ["tp_x"]),)
    assert unfuse(graph, table, MESH) == graph
    assert [n.op for n in unfuse(graph, GRID, MESH).nodes] == ["contract", "add"]
