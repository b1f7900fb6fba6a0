"""Activations kept for backward: closed forms of Korthikanti et al. 2022, tensor by tensor, and local sizes as numbers.

A layer of GPT-3 has d_ff = 4h and as many KV heads as heads. Equations 1 to 6 and table 2 of the paper (arXiv 2205.05198)
count 2 bytes an activation, 1 a dropout mask, and leave out what is small beside sbh.
"""

from typing import Any

import pytest
import sympy

from stage.catalog import load_strategy
from stage.ops import get_op
from stage.passes.backward import Differentiated
from stage.request import Request, resolve_request
from stage.summary import model_summary
from stage.summary.activations import saved_activations
from stage.summary.forms import pricing
from stage.symbols import dtype_bytes, size
from stage.synthesis import sharded_block, symbol_values
from stage.tensor import resolve_dtypes
from stage.trace.lower import Concrete
from tests.small import MODELS, fits, name_of, request

S, B, H, A, T = (size(name) for name in ("seq", "batch", "d_model", "heads", "tp"))
SBH, SCORES = S * B * H, A * S * S * B
GPT3 = {size("d_ff"): 4 * H, size("kv_heads"): A, size("head_dim"): H / A}


def layer(strategy: str, tp: int, **options: Any) -> dict[str, Any]:
    """The saved tensors of a layer of GPT-3 175B with dropout, by name, in bytes."""
    report = model_summary("gpt3-175b", strategy=strategy, tp=tp, dropout=True, batch=1, **options)
    (entry,) = [e for e in report["closed_forms"]["blocks"] if e["kind"] == "layer"]
    found = {one["name"]: formula(one["bytes"]) for one in entry["saved"]["tensors"]}
    assert sympy.simplify(sum(found.values()) - formula(entry["saved"]["bytes"])) == 0
    return found


def formula(text: str) -> Any:
    names = ("seq", "batch", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "tp")
    return sympy.expand(sympy.sympify(text, locals={name: size(name) for name in names}).subs(GPT3))


def tensors(t: Any, around: Any) -> dict[str, Any]:
    """The paper's tensors of a layer: inside attention and MLP over `t` ranks, `around` them over so many."""
    inside = {
        "attn.q_proj": 2 * SBH,  # Q and K, for their product
        "attn.k_proj": 2 * SBH,
        "attn.v_proj": 2 * SBH,  # for the product with the dropped softmax
        "attn.core.softmax": 2 * SCORES,
        "attn.core.dropout:1": SCORES,  # its mask
        "attn.core.dropout": 2 * SCORES,
        "attn.core.values": 2 * SBH,  # input of the output projection
        "mlp.up_proj": 8 * SBH,  # input of GeLU
        "mlp.act": 8 * SBH,  # input of the second linear
    }
    outside = {
        "x": 2 * SBH,  # inputs of the layer norms
        "attn.residual": 2 * SBH,
        "attn.norm": 2 * SBH,  # inputs of the projections
        "mlp.norm": 2 * SBH,
        "attn.dropout:1": SBH,
        "mlp.dropout:1": SBH,
    }
    return {k: v / t for k, v in inside.items()} | {k: v / around for k, v in outside.items()}


def statistics(around: Any) -> dict[str, Any]:
    """Mean and deviation of a token in fp32, for each of two layer norms: the paper leaves them out as small."""
    return {f"{norm}.norm:{i}": 4 * S * B / around for norm in ("attn", "mlp") for i in (1, 2)}


CORE = ("attn.core.softmax", "attn.core.dropout:1", "attn.core.dropout")
ROWS: dict[str, tuple[str, int, str, Any]] = {
    "none, no parallelism (eq. 1)": ("megatron", 1, "none", SBH * (34 + 5 * A * S / H)),
    "none, TP (eq. 2)": ("megatron", 8, "none", SBH * (10 + 24 / T + 5 * A * S / (H * T))),
    "none, TP+SP (eq. 4)": ("megatron_sp", 8, "none", SBH * (34 / T + 5 * A * S / (H * T))),
    "selective, no parallelism": ("megatron", 1, "selective", 34 * SBH),
    "selective, TP": ("megatron", 8, "selective", SBH * (10 + 24 / T)),
    "selective, TP+SP (eq. 6)": ("megatron_sp", 8, "selective", 34 * SBH / T),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"saved[{row}]")
def test_a_layer_keeps_what_the_paper_says_and_the_statistics_of_norms(row: str) -> None:
    strategy, tp, policy, published = ROWS[row]
    t = T if tp > 1 else sympy.Integer(1)
    around = t if strategy == "megatron_sp" else sympy.Integer(1)
    paper = tensors(t, around)
    if policy == "selective":
        paper = {name: size_ for name, size_ in paper.items() if name not in CORE}
    assert sympy.simplify(sum(paper.values()) - published) == 0
    found = {
        name.removesuffix(".vary"): size_
        for name, size_ in layer(strategy, tp, recompute=policy, attention="unfused").items()
    }
    expected = paper | statistics(around)
    assert found.keys() == expected.keys()
    for name, size_ in expected.items():
        assert sympy.simplify(found[name] - size_) == 0, name


@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
def test_full_recomputation_keeps_the_input(strategy: str) -> None:
    """2sbh (table 2); under sequence parallelism a rank holds its share of it, where the paper's row has all."""
    (kept,) = layer(strategy, 8, recompute="full", attention="unfused").values()
    assert sympy.simplify(kept - 2 * SBH / (T if strategy == "megatron_sp" else 1)) == 0


def test_fused_attention_keeps_a_logarithm_a_row_instead_of_the_scores() -> None:
    """FlashAttention keeps logsumexp in fp32 of every query and head, and its dropout by a seed."""
    found = layer("megatron_sp", 8)
    expected = {name: size_ for name, size_ in tensors(T, T).items() if name not in CORE} | statistics(T)
    expected["attn.core"] = expected.pop("attn.core.values")
    expected["attn.core:1"] = 4 * S * B * A / T
    assert found.keys() == expected.keys()
    assert all(sympy.simplify(found[name] - size_) == 0 for name, size_ in expected.items())


def test_without_regathering_the_gathered_inputs_are_kept() -> None:
    """Section 4.2.2: keeping the gathered inputs of both column-parallel products costs 4sbh instead of 4sbh/t."""
    kept = load_strategy("megatron_sp").replace(regather=[])
    report = model_summary("gpt3-175b", strategy=kept, tp=8, dropout=True, batch=1)
    (entry,) = [e for e in report["closed_forms"]["blocks"] if e["kind"] == "layer"]
    more = formula(entry["saved"]["bytes"]) - sum(layer("megatron_sp", 8).values())
    assert sympy.simplify(more - (4 * SBH - 4 * SBH / T)) == 0


def numbers(job: Request, both: Differentiated) -> int:
    """Bytes that a block keeps, from integer sizes."""
    dtypes = {"compute": job.dtype, "gradient": job.grad_dtype}
    concrete = Concrete(symbol_values(job), job.mesh, dtypes)
    makers, total = both.forward.producers(), 0
    for name in both.saved:
        source = name
        while source in makers and not get_op(makers[source].op).kernel:
            source = makers[source].inputs[0]
        if source == name or source not in both.saved:
            local = concrete.local(both.backward.tensors[name], both.backward.layouts[name])
            total += int(local.elements) * dtype_bytes(resolve_dtypes(local.dtype, dtypes))
    return total


MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2, "ep": 2})


@pytest.mark.parametrize("policy", ["none", "ops:norm,act,up_proj"])
@pytest.mark.parametrize(
    ("model", "mesh"), [(m, d) for m in MODELS for d in MESHES if fits(m, "megatron_sp", d)], ids=name_of
)
def test_values_are_those_of_the_sizes_of_one_device(model: str, mesh: dict[str, int], policy: str) -> None:
    job = request(model, "megatron_sp", **mesh, recompute=policy)
    price = pricing(job)
    for block in dict.fromkeys(job.model.blocks):
        both = sharded_block(job, block)
        assert saved_activations(both, price.local, price.width)["bytes_value"] == numbers(job, both)


@pytest.mark.parametrize("model", MODELS)
def test_recomputing_more_keeps_less(model: str) -> None:
    order = ("none", "ops:norm", "ops:norm,up_proj,act", "full")
    kept = []
    for policy in order:
        job = request(model, "megatron_sp", tp=2, recompute=policy)
        kept.append(sum(numbers(job, sharded_block(job, b)) for b in dict.fromkeys(job.model.layers)))
    assert kept == sorted(set(kept), reverse=True)
    assert len(kept) == len(order)


def test_every_second_layer_of_a_stage_keeps_its_input_alone() -> None:
    report = model_summary("gpt3-175b", strategy="megatron_sp", tp=8, pp=8, recompute="every:2")
    count = {e["kind"]: (e["count"], e["saved"]["bytes_value"]) for e in report["closed_forms"]["blocks"]}
    s, h = 2048, 12288
    assert count["layer"][0] == count["layer (recomputed)"][0] == 48
    assert count["layer (recomputed)"][1] == 2 * s * h // 8
    assert count["layer"][1] > 10 * count["layer (recomputed)"][1]


FIGURE_7 = {
    "22B": (
        {"layers": 48, "d_model": 6144, "heads": 64, "kv_heads": 64, "head_dim": 96, "d_ff": 24576},
        (66.84, 49.42, 16.18, 7.64),
    ),
    "175B": ({}, (62.04, 56.53, 18.49, 8.71)),
    "530B": (
        {"layers": 105, "d_model": 20480, "heads": 128, "kv_heads": 128, "head_dim": 160, "d_ff": 81920},
        (58.31, 62.04, 20.27, 9.42),
    ),
}
"""Sizes, and activation memory in percent of tensor parallelism alone (tp 8), read off the paper's figure 7: with
sequence parallelism, with selective recomputation, with both, and with full recomputation instead."""


@pytest.mark.parametrize("name", FIGURE_7)
def test_savings_are_those_of_figure_7(name: str) -> None:
    sizes, published = FIGURE_7[name]

    def kept(strategy: str, policy: str) -> int:
        options: dict[str, Any] = {"tp": 8, "dropout": True, "attention": "unfused", "recompute": policy}
        job = resolve_request("gpt3-175b", strategy, sizes=sizes, **options)
        return numbers(job, sharded_block(job, job.model.layers[0]))

    whole = kept("megatron", "none")
    parts = [
        kept("megatron_sp", "none"),
        kept("megatron", "selective"),
        kept("megatron_sp", "selective"),
        kept("megatron", "full"),
    ]
    assert [100 * part / whole for part in parts] == pytest.approx(published, abs=0.4)
