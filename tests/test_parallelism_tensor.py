"""The rows of tensor parallelism, each with its collectives, counts and bytes as formulas.

Plain TP, TP with SP, their recomputation and the sums of QK-norms are in `test_closed_forms.py`; here are TP of latent
attention, the vocabulary-parallel loss, replicated KV heads, and 2-D TP.

L layers, t = tp = y x x, act = batch x seq x d_model elements; a size is what one rank hands to the collective.
"""

from collections import Counter
from typing import Any

import pytest

import stage
from stage.synthesis import sharded_block
from stage.trace.node import TraceNode
from stage.traceset import TraceSet
from tests.small import request
from tests.test_closed_forms import BF16, FP32, SHAPES, act, communication, table
from tests.test_closed_forms import job as tiny
from tests.test_numerics import compare

Table = dict[tuple[str, str, str, int], int]
RANKS = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def axes(node: TraceNode) -> str:
    """The axes of a collective; the parts of tp together are tp."""
    name = str(node.get("axes"))
    return "tp" if name in ("tp_y tp_x", "tp_kv tp_rep") else name


def over(traces: TraceSet) -> Counter[tuple[str, str, str, int]]:
    """How many collectives there are of each (phase, axes, op, bytes)."""
    return Counter(
        (str(n.get("phase")), axes(n), str(n.get("op")), int(str(n.get("comm_size"))))
        for n in communication(traces)
    )


def total(*parts: tuple[int, tuple[str, str, str, int]]) -> Table:
    """Counts by key, from (count, key) of which several may have the same key."""
    found: Counter[tuple[str, str, str, int]] = Counter()
    for count, key in parts:
        found[key] += count
    return dict(found)


# ---------------------------------------------------------------- latent attention


def latent(strategy: str, tp: int, layers: int = 2) -> TraceSet:
    """A small DeepSeek of dense layers: d_model 32, 4 heads, seq 16, one sequence."""
    sizes = {
        "layers": layers,
        "d_model": 32,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 64,
        "d_ff": 64,
        "first_k_dense": layers,
    }
    return stage.synthesize(
        "deepseek-v3", strategy, tp=tp, batch=1, seq=16, sizes=sizes | RANKS, vocab_multiple=1
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_of_latent_attention(tp: int) -> None:
    """The projections into latents are repeated on every rank, so backward reduces latents and not the activation.

    All heads share the rotated part of the key, whose cotangent is reduced too.
    """
    layers, tokens = 2, 16
    a, loss = tokens * 32 * BF16, tokens * FP32
    assert over(latent("megatron", tp)) == total(
        (2 * layers + 1, ("forward", "tp", "all_reduce", a)),
        (3, ("forward", "tp", "all_reduce", loss)),
        (layers + 1, ("backward", "tp", "all_reduce", a)),
        *((layers, ("backward", "tp", "all_reduce", tokens * RANKS[size] * BF16)) for size in LATENTS),
        (1, ("optimizer", "tp", "all_reduce", FP32)),
    )


LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_of_latent_attention_with_sp(tp: int) -> None:
    """Tokens are projected into latents where they are, and the latents are what is gathered.

    Backward gathers latents again for the gradients of the projections out of them; the rotated part of the key is
    in no such product. Gradients of norms and of the projections into latents are summed over tp once a step.
    """
    layers, tokens, d_model = 2, 16, 32
    a, loss = tokens * d_model * BF16, tokens * FP32
    latents = [tokens * RANKS[size] * BF16 for size in LATENTS]
    q, kv, rope = (RANKS[size] for size in LATENTS)
    into = (q + kv + rope) * d_model + q + kv
    assert over(latent("megatron_sp", tp)) == total(
        (2 * layers + 1, ("forward", "tp", "reduce_scatter", a)),
        (layers + 1, ("forward", "tp", "all_gather", a // tp)),
        *((layers, ("forward", "tp", "all_gather", size // tp)) for size in latents),
        (3, ("forward", "tp", "all_reduce", loss)),
        (layers + 1, ("backward", "tp", "reduce_scatter", a)),
        *((layers, ("backward", "tp", "reduce_scatter", size)) for size in latents),
        (2 * layers + 1 + layers + 1, ("backward", "tp", "all_gather", a // tp)),
        *((layers, ("backward", "tp", "all_gather", size // tp)) for size in latents[:2]),
        (1, ("finalize", "tp", "all_reduce", ((2 * layers + 1) * d_model + layers * into) * FP32)),
        (1, ("optimizer", "tp", "all_reduce", FP32)),
    )


# ---------------------------------------------------------------- vocabulary and KV heads


@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp", "tp_2d"])
@pytest.mark.parametrize("vocab", [64, 640])
def test_vocabulary_parallel_loss(strategy: str, vocab: int) -> None:
    """Three all-reduces of one number a token (maximum, label, sum) over all of tp, whatever the vocabulary."""
    shape = SHAPES[1]
    traces = tiny(shape, tp=4, strategy=strategy, sizes={"vocab": vocab})
    tokens = shape["micro_batch"] * shape["seq"]
    found = [n for n in communication(traces) if n.name.partition(".")[2].startswith("loss")]
    assert [(n.get("op"), axes(n), n.get("comm_size"), n.get("phase")) for n in found] == [
        ("all_reduce", "tp", tokens * FP32, "forward")
    ] * 3
    other = tiny(shape, tp=4, strategy=strategy, sizes={"vocab": 2 * vocab})
    assert table(other) == table(traces), "nothing that is sent grows with the vocabulary"


@pytest.mark.parametrize(("tp", "kv_heads"), [(4, 2), (8, 2), (8, 1), (8, 4)])
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
def test_replicated_kv_heads(tp: int, kv_heads: int, strategy: str) -> None:
    """Nothing more is sent in a layer; gradients of K and V weights are summed over the ranks that share a head."""
    shape = SHAPES[1]
    sizes = {"kv_heads": kv_heads}
    traces, whole = tiny(shape, tp=tp, strategy=strategy, sizes=sizes), tiny(shape, tp=tp, strategy=strategy)
    own = {key: n for key, n in over(traces).items() if key[0] in ("forward", "backward")}
    assert own == {key: n for key, n in over(whole).items() if key[0] in ("forward", "backward")}
    layers, d_model, head_dim = shape["layers"], shape["d_model"], shape["d_model"] // 8
    rep = "tp_rep" if kv_heads > 1 else "tp"
    sums = {key: n for key, n in over(traces).items() if key[0] == "finalize"}
    weights, norms = layers * 2 * head_dim * d_model, (2 * layers + 1) * d_model
    joined = {("finalize", rep, "all_reduce", (weights + norms) * FP32): 1}
    apart = total(
        (1, ("finalize", rep, "all_reduce", weights * FP32)),
        (1, ("finalize", "tp", "all_reduce", norms * FP32)),
    )
    if strategy == "megatron":
        assert sums == {("finalize", rep, "all_reduce", weights * FP32): 1}
    else:
        assert sums == (joined if rep == "tp" else apart)
    names = [n for n in communication(traces) if n.get("phase") == "finalize" and axes(n) == rep]
    assert len(traces.groups[str(names[0].get("pg_name"))]) == tp // kv_heads


# ---------------------------------------------------------------- 2-D

GRIDS = [(2, 2), (4, 2), (2, 4)]


def grid(shape: dict[str, int], y: int, x: int, model: str = "llama3-8b", **options: Any) -> TraceSet:
    return tiny(shape, model, strategy="tp_2d", tp=y * x, tp_x=x, **options)


def two_d(shape: dict[str, int], y: int, x: int) -> Table:
    """Every collective of a Llama with as many KV heads as heads, derived by hand.

    A projection sums over d_model, which tp_x shards, and makes heads or hidden units, which tp_y shards: its input is
    gathered over tp_y (Pope et al. 2022, section 3.2.2: all-gather over yz), its result scattered over tp_x. The
    second projection of a pair does the same with the axes exchanged. A norm reduces one number a token.
    """
    layers, tokens = shape["layers"], shape["micro_batch"] * shape["seq"]
    a, f, one = act(shape) * BF16, tokens * 96 * BF16, tokens // y * FP32
    ty, tx = "tp_y", "tp_x"
    return total(
        (2 * layers + 1, ("forward", tx, "all_reduce", one)),
        (2 * layers + 1, ("forward", ty, "all_gather", a // (x * y))),
        (2 * layers, ("forward", ty, "reduce_scatter", a // x)),
        (3 * layers, ("forward", tx, "reduce_scatter", a // y)),
        (2 * layers, ("forward", tx, "reduce_scatter", f // y)),
        (layers, ("forward", tx, "all_gather", a // (x * y))),
        (layers, ("forward", tx, "all_gather", f // (x * y))),
        (1, ("forward", ty, "reduce_scatter", a)),
        (1, ("forward", tx, "reduce_scatter", a // y)),
        (1, ("forward", tx, "all_gather", a // x)),
        (3, ("forward", "tp", "all_reduce", tokens * FP32)),
        (2 * layers + 1, ("backward", tx, "all_reduce", one)),
        (2 * layers + 1, ("backward", ty, "reduce_scatter", a // x)),
        (2 * layers, ("backward", ty, "all_gather", a // (x * y))),
        (3 * layers, ("backward", tx, "all_gather", a // (x * y))),
        (2 * layers, ("backward", tx, "all_gather", f // (x * y))),
        (layers, ("backward", tx, "reduce_scatter", a // y)),
        (layers, ("backward", tx, "reduce_scatter", f // y)),
        (1, ("backward", tx, "reduce_scatter", a)),
        (1, ("backward", tx, "all_gather", a // (x * y))),
        (1, ("backward", ty, "all_gather", a // y)),
        (1, ("finalize", ty, "all_reduce", (2 * layers + 1) * shape["d_model"] // x * FP32)),
        (1, ("optimizer", "tp", "all_reduce", FP32)),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("y", "x"), GRIDS)
def test_two_dimensional_tp(shape: dict[str, int], y: int, x: int) -> None:
    assert over(grid(shape, y, x)) == two_d(shape, y, x)


@pytest.mark.parametrize(("y", "x"), GRIDS)
def test_a_feed_forward_pair_sends_what_pope_derived(y: int, x: int) -> None:
    """Two gathers and two scatters: 2 BLE/X over yz and 2 BLF/(YZ) over x, each by (n-1)/n for a ring.

    Of a plain MLP, forward (Pope et al. 2022, section 3.2.2, whose X and YZ are x and y here).
    """
    shape = SHAPES[1]
    traces = grid(shape, y, x, "gpt3-125m", sizes={"positions": 48})
    tokens = shape["micro_batch"] * shape["seq"]
    sent = {"tp_y": 0.0, "tp_x": 0.0}
    for n in communication(traces):
        if (
            n.get("layer") == 0
            and n.get("phase") == "forward"
            and "mlp" in n.name
            and n.get("op") != "all_reduce"
        ):
            size = len(traces.groups[str(n.get("pg_name"))])
            share = {"all_gather": size - 1, "reduce_scatter": (size - 1) / size}[str(n.get("op"))]
            sent[str(n.get("axes"))] += int(str(n.get("comm_size"))) * share
    assert sent["tp_y"] == pytest.approx(2 * act(shape) / x * (y - 1) / y * BF16)
    assert sent["tp_x"] == pytest.approx(2 * tokens * 96 / y * (x - 1) / x * BF16)


@pytest.mark.parametrize(("y", "x"), GRIDS)
def test_two_dimensional_tp_of_a_layer_norm_and_biases(y: int, x: int) -> None:
    """Both moments of a layer norm travel in one all-reduce; a bias is added once, after its product is reduced."""
    shape = SHAPES[1]
    traces = grid(shape, y, x, "gpt3-125m", sizes={"positions": 48})
    layers, tokens, d_model = shape["layers"], shape["micro_batch"] * shape["seq"], shape["d_model"]
    found = over(traces)
    for phase in ("forward", "backward"):
        assert found[phase, "tp_x", "all_reduce", 2 * tokens // y * FP32] == 2 * layers + 1
    sums = {key: n for key, n in found.items() if key[0] == "finalize"}
    assert sums == {("finalize", "tp_y", "all_reduce", (6 * layers + 2) * d_model // x * FP32): 1}
    added = [n for n in traces.nodes(0) if ".add_bias" in n.name and n.get("phase") == "forward"]
    assert len(added) == 4 * layers


@pytest.mark.parametrize(("y", "x"), GRIDS)
def test_two_dimensional_tp_shards_every_weight_on_both_dims(y: int, x: int) -> None:
    asked = request("llama3-8b", "tp_2d", tp=y * x, tp_x=x, sizes={"heads": 8, "kv_heads": 8})
    both = sharded_block(asked, asked.model.layers[0])
    for tensor in both.forward.parameters:
        dims = dict(zip(tensor.dim_names, both.forward.layouts[tensor.name].dims, strict=True))
        assert dims["d_model"] == ("tp_x",)
        assert ("tp_y",) in dims.values() or len(dims) == 1


SMALL = [
    {"tp": 4, "tp_x": 2},
    {"tp": 4, "tp_x": 4},
    {"tp": 8, "tp_x": 2},
    {"tp": 8, "tp_x": 4},
    {"dp": 2, "tp": 4},
]


@pytest.mark.parametrize("mesh", SMALL, ids=str)
@pytest.mark.parametrize("model", ["llama3-8b", "gpt3-125m", "qwen2-7b"])
def test_two_dimensional_tp_computes_what_one_device_does(model: str, mesh: dict[str, int]) -> None:
    """Embedding, layer and head, forward and backward, on 4 and 8 simulated devices; qwen2 has biases and few KV heads."""
    kv_heads = 2 if model == "qwen2-7b" else 8
    sizes = {"heads": 8, "kv_heads": kv_heads, "head_dim": 4} if mesh["tp"] == 8 else {}
    compare(model, "tp_2d", mesh, **({"sizes": sizes} if sizes else {}))


def test_a_norm_over_shards_runs_again_from_the_sums_that_were_reduced() -> None:
    job = compare("llama3-8b", "tp_2d", {"tp": 4}, recompute="ops:norm")
    backward = sharded_block(job, job.model.layers[0]).backward
    assert [n.op for n in backward.nodes if n.phase == "recompute" and n.op.startswith("norm")] == [
        "norm_scale"
    ] * 2
    assert not [n for n in backward.nodes if n.phase == "recompute" and n.op == "all_reduce"]
