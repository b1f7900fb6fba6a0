"""Sharding: golden texts of tiny graphs and of layers, and what the pass refuses."""

from collections.abc import Callable

import pytest

from stage.blocks import attention, gated_mlp, lm_head, residual, rms_norm, token_embedding
from stage.errors import LayoutError
from stage.graph import Builder, Graph, format_graph
from stage.mesh import build_mesh
from stage.passes.fuse import fuse
from stage.passes.shard import Table, rest_layout, shard
from stage.synthesis import sharded_block
from tests.small import request

SIZES = {
    "batch": 2,
    "seq": 16,
    "d_model": 32,
    "d_ff": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "vocab": 64,
}
COLUMNS: Table = (
    ("heads", ["tp"]),
    ("kv_heads", ["tp"]),
    ("d_ff", ["tp"]),
    ("vocab", ["tp"]),
    ("batch", ["dp"]),
)
TENSOR: Table = (*COLUMNS, ("seq", ["cp"]))
SEQUENCE: Table = (*COLUMNS, ("seq", ["cp", "tp"]))


def mlp() -> Graph:
    b = Builder("mlp")
    return b.graph(gated_mlp(b, b.input("x", "batch", "seq", "d_model")))


def attend() -> Graph:
    b = Builder("attention")
    return b.graph(attention(b, b.input("x", "batch", "seq", "d_model")))


def norm() -> Graph:
    b = Builder("norm")
    x = b.input("x", "batch", "seq", "d_model")
    return b.graph(residual(b, x, rms_norm(b, x, "norm")))


def embed() -> Graph:
    b = Builder("embedding")
    return b.graph(token_embedding(b, b.input("tokens", "batch", "seq", dtype="int64")))


def head() -> Graph:
    b = Builder("head")
    return b.graph(
        lm_head(b, b.input("x", "batch", "seq", "d_model"), b.input("labels", "batch", "seq", dtype="int64"))
    )


TINY = {
    "mlp-tp": (mlp, TENSOR, {"tp": 2}),
    "mlp-tp-sp": (mlp, SEQUENCE, {"tp": 2}),
    "norm-tp": (norm, TENSOR, {"tp": 2, "dp": 2}),
    "norm-tp-sp": (norm, SEQUENCE, {"tp": 2, "dp": 2}),
    "attention-cp": (attend, TENSOR, {"cp": 2}),
    "attention-kv-replicated": (attend, TENSOR, {"tp": 4}),
    "embedding-tp": (embed, TENSOR, {"tp": 2}),
    "embedding-tp-sp": (embed, SEQUENCE, {"tp": 2}),
    "head-tp": (head, TENSOR, {"tp": 2}),
    "head-tp-sp": (head, SEQUENCE, {"tp": 2}),
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_graphs_are_sharded_as_written_down(name: str, golden: Callable[[str, str], None]) -> None:
    make, table, degrees = TINY[name]
    graph = make()
    mesh = build_mesh(**degrees, kv_heads=SIZES["kv_heads"])
    golden(
        f"shard/{name}.txt", f"{format_graph(graph)}\n\n{format_graph(shard(graph, table, mesh, SIZES))}\n"
    )


LAYERS = {
    "llama-megatron": ("llama3-8b", "layer", "megatron", {"tp": 2, "dp": 2}),
    "llama-megatron-sp": ("llama3-8b", "layer", "megatron_sp", {"tp": 2, "dp": 2}),
    "llama-megatron-cp": ("llama3-8b", "layer", "megatron_sp", {"tp": 2, "cp": 2}),
    "llama-kv-replicated": ("llama3-8b", "layer", "megatron_sp", {"tp": 4}),
    "llama-fsdp": ("llama3-8b", "layer", "fsdp", {"dp": 4}),
    "mixtral-ep": ("mixtral-8x7b", "layer", "megatron_moe", {"dp": 2, "tp": 2, "ep": 2}),
    "mixtral-ep-etp": ("mixtral-8x7b", "layer", "megatron_moe", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
    "mixtral-ep-without-sp": ("mixtral-8x7b", "layer", "megatron", {"dp": 2, "tp": 2, "ep": 4}),
    "deepseek-mla": ("deepseek-v3", "dense", "megatron_sp", {"tp": 2, "dp": 2}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_sharded_as_written_down(name: str, golden: Callable[[str, str], None]) -> None:
    model, kind, strategy, mesh = LAYERS[name]
    job = request(model, strategy, **mesh)
    both = sharded_block(job, next(b for b in job.model.blocks if b.kind == kind))
    golden(f"layers/{name}.txt", f"{format_graph(both.forward)}\n\n{format_graph(both.backward)}\n")


def test_a_pass_returns_a_new_graph() -> None:
    graph = mlp()
    before = format_graph(graph)
    assert shard(graph, TENSOR, build_mesh(tp=2), SIZES) is not graph
    assert format_graph(graph) == before


def test_a_mesh_of_one_device_needs_no_reshard() -> None:
    for make in (mlp, attend, norm, embed, head):
        graph = make()
        assert shard(graph, SEQUENCE, build_mesh(), SIZES).nodes == graph.nodes


def test_a_dim_takes_the_axes_that_no_dim_above_it_took() -> None:
    b = Builder("rest")
    x = b.input("x", "batch", "seq", "d_model")
    mesh = build_mesh(dp=2, cp=2, tp=2)
    assert rest_layout(x, SEQUENCE, mesh, SIZES).dims == (("dp",), ("cp", "tp"), ())
    assert rest_layout(x, TENSOR, mesh, SIZES).dims == (("dp",), ("cp",), ())
    assert rest_layout(x, TENSOR, mesh, SIZES).invariant == {"tp"}


def test_a_shard_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(LayoutError) as caught:
        shard(mlp(), TENSOR, build_mesh(tp=3), SIZES)
    assert "d_ff = 64" in str(caught.value)
    assert "tp = 3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fused_weights_are_sharded_as_their_own_heads_are() -> None:
    graph = shard(fuse(attend()), TENSOR, build_mesh(tp=4, kv_heads=2), SIZES)
    assert graph.layouts["q_proj.weight"].dims == (("tp_kv", "tp_rep"), (), ())
    assert graph.layouts["k_proj.weight"].dims == (("tp_kv",), (), ())
    assert graph.layouts["k_proj.weight"].state("tp_rep") == "R"
