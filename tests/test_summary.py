"""Closed forms against formulas written by hand, and against the nodes of traces synthesized at the same degrees."""

import re
from collections import Counter
from typing import Any

import pytest
import sympy

import stage
from stage.catalog import list_models, load_strategy
from stage.errors import StageError, TraceError
from stage.strategy import Strategy
from stage.summary import model_summary, trace_summary
from stage.symbols import size
from tests.small import PRESETS, STRATEGIES

FAMILIES = [
    "gpt3-125m", "llama3-8b", "mistral-7b", "qwen2-7b", "qwen3-0.6b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3",
]  # fmt: skip
SMALL: dict[str, Any] = {"seq": 256, "sizes": {"layers": 4}}


def parsed(text: str) -> sympy.Expr:
    """The expression in a text, its names as sizes."""
    return sympy.sympify(text, locals={name: size(name) for name in re.findall(r"[a-z_]+\w*", text)})


def same(text: str, expected: str) -> bool:
    return bool(sympy.expand(parsed(text) - parsed(expected)) == 0)


def forms(model: str, strategy: str | Strategy, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = model_summary(model, strategy=strategy, **options)["closed_forms"]
    return found


def block(found: dict[str, Any], kind: str) -> dict[str, Any]:
    entry: dict[str, Any] = next(b for b in found["blocks"] if b["kind"] == kind)
    return entry


TOKENS = "batch*seq/(dp*cp)"
LLAMA = {
    "attn.norm": f"4*{TOKENS}*d_model/tp",
    "attn.qkv_proj": "2*batch*seq*d_model*(heads + 2*kv_heads)*head_dim/(dp*cp*tp)",
    "attn.core": f"4*{TOKENS}*heads/tp*head_dim*seq/2",
    "attn.o_proj": f"2*{TOKENS}*heads/tp*head_dim*d_model",
    "mlp.gate_up_proj": f"2*{TOKENS}*2*d_ff/tp*d_model",
    "mlp.down_proj": f"2*{TOKENS}*d_ff/tp*d_model",
    "mlp.residual": f"{TOKENS}*d_model/tp",
}


def test_flops_of_a_llama_layer_are_those_of_the_paper() -> None:
    layer = block(forms("llama3-8b", "megatron_sp"), "layer")
    forward = {op["name"]: op for op in layer["forward"]["ops"]}
    for name, expected in LLAMA.items():
        assert same(forward[name]["flops"], expected), (name, forward[name]["flops"])
    backward = {op["name"]: op["flops"] for op in layer["backward"]["ops"]}
    for name in ("attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        for product in ("dgrad", "wgrad"):
            assert same(backward[f"{name}.{product}"], LLAMA[name])
    assert same(backward["attn.core.backward"], f"5/2*({LLAMA['attn.core']})")  # scores are made again
    matmuls = ("attn.qkv_proj", "attn.core", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert same(layer["forward"]["matmul_flops"], " + ".join(LLAMA[name] for name in matmuls))


def test_bytes_of_a_llama_layer_are_operands_and_results() -> None:
    forward = {
        op["name"]: op["bytes"] for op in block(forms("llama3-8b", "megatron_sp"), "layer")["forward"]["ops"]
    }
    projected = "(heads + 2*kv_heads)/tp*head_dim"
    assert same(
        forward["attn.qkv_proj"], f"2*({TOKENS}*d_model + d_model*{projected} + {TOKENS}*{projected})"
    )
    assert same(forward["mlp.residual"], f"2*3*{TOKENS}*d_model/tp")


def sends(entries: list[dict[str, Any]]) -> set[tuple[str, str, int]]:
    return {(entry["kind"], entry["axes"], entry["count"]) for entry in entries}


def test_communication_of_a_llama_layer_is_that_of_sequence_parallelism() -> None:
    layer = block(forms("llama3-8b", "megatron_sp", dp=2, tp=2), "layer")
    forward, backward = layer["forward"]["communication"], layer["backward"]["communication"]
    assert sends(forward) == {("all_gather", "tp", 2), ("reduce_scatter", "tp", 2)}
    assert sends(backward) == {("all_gather", "tp", 4), ("reduce_scatter", "tp", 2)}
    for entry in (*forward, *backward):
        whole = "2*batch*d_model*seq/dp"  # an all-gather is counted by what one device brings
        assert same(entry["bytes"], f"{whole}/tp" if entry["kind"] == "all_gather" else whole)
        assert entry["bytes_value"] == 2 * 4096 * 8192 // (2 if entry["kind"] == "all_gather" else 1)


def test_parts_of_axes_are_said_with_their_degrees() -> None:
    assert forms("llama3-8b", "megatron_sp", tp=16)["parts"] == {"tp_kv": 8}
    assert forms("llama3-8b", "hsdp")["parts"] == {"dp_shard": 2}


def test_parameters_on_a_device_are_those_that_tp_shards_and_the_norms() -> None:
    found = forms("llama3-8b", "megatron_sp", tp=4)
    layer = "d_model*(2*heads + 2*kv_heads)*head_dim/tp + 3*d_model*d_ff/tp + 2*d_model"
    assert same(block(found, "layer")["parameters"], layer)
    assert same(found["parameters"], f"32*({layer}) + 2*vocab*d_model/tp + d_model")
    assert same(
        forms("llama3-8b", "fsdp", dp=4)["parameters"],
        f"(32*({layer}) + 2*vocab*d_model + d_model)/dp".replace("/tp", ""),
    )
    expected = 32 * (4096 * 80 * 128 // 4 + 3 * 4096 * 14336 // 4 + 2 * 4096) + 2 * 128512 * 4096 // 4 + 4096
    assert found["parameters_value"] == expected


def test_a_tied_table_is_on_a_device_once_unless_the_pipeline_parts_its_users() -> None:
    assert block(forms("qwen3-0.6b", "megatron_sp", tp=2), "head")["parameters"] == "d_model"
    assert same(
        block(forms("qwen3-0.6b", "megatron_sp", tp=2, pp=2), "head")["parameters"],
        "d_model + vocab*d_model/tp",
    )


def test_experts_have_their_own_axes() -> None:
    layer = block(forms("mixtral-8x7b", "megatron_moe", dp=4, tp=2, ep=4), "layer")
    dispatch = [entry for entry in layer["forward"]["communication"] if entry["kind"] == "all_to_all"]
    assert {(entry["axes"], entry["count"]) for entry in dispatch} == {("ep", 2), ("ep", 1)}
    assert same(dispatch[0]["bytes"], "2*batch*seq*top_k*d_model/(dp*tp)")
    assert dispatch[0]["bytes_value"] == 2 * 4 * 32768 * 2 * 4096 // 8
    shards = [entry for entry in layer["data_parallel"] if entry["tensors"].startswith("expert")]
    assert [(entry["kind"], entry["axes"]) for entry in shards] == [
        ("reduce_scatter", "edp"),
        ("all_gather", "edp"),
    ]
    assert same(shards[1]["bytes"], "2*3*d_model*expert_d_ff*experts/(dp*tp)")  # edp x ep is dp x tp
    assert same(
        layer["parameters"].replace("experts/ep", "E"),
        "3*d_model*expert_d_ff*E + d_model*experts + 2*d_model + 2*d_model*(heads + kv_heads)*head_dim/tp",
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", {("gradients", "all_reduce", "dp", 1, "step")}),
        (
            "megatron_sp",
            {
                ("gradients", "reduce_scatter", "dp", 1, "step"),
                ("parameters", "all_gather", "dp", 1, "step"),
            },
        ),
        (
            "fsdp",
            {
                ("parameters", "all_gather", "dp", 2, "micro-batch"),
                ("gradients", "reduce_scatter", "dp", 1, "step"),
            },
        ),
        (
            "hsdp",
            {
                ("parameters", "all_gather", "dp_shard", 2, "micro-batch"),
                ("gradients", "reduce_scatter", "dp_shard", 1, "step"),
                ("gradients", "all_reduce", "dp_replicate", 1, "step"),
            },
        ),
    ],
)
def test_data_parallelism_of_a_layer(strategy: str, expected: set[tuple[str, str, str, int, str]]) -> None:
    options = {"dp": 4, "dp_shard": 2} if strategy == "hsdp" else {"dp": 4}
    layer = block(forms("llama3-8b", strategy, **options), "layer")
    keys = ("tensors", "kind", "axes", "count", "per")
    assert {tuple(entry[key] for key in keys) for entry in layer["data_parallel"]} == expected
    parameters = 4096 * 80 * 128 + 3 * 4096 * 14336 + 2 * 4096
    for entry in layer["data_parallel"]:
        width = 4 if entry["tensors"] == "gradients" else 2
        shards = (
            {"hsdp": 2}.get(strategy, 4)
            if entry["kind"] == "all_gather" or entry["axes"] == "dp_replicate"
            else 1
        )
        assert entry["bytes_value"] == width * parameters // shards, entry


NAME = re.compile(r"(?P<block>[a-z_]+)(?P<layer>\d*)\.(?P<name>.+)/(?P<phase>[a-z]+)(/mb0)?")


def traced(
    traces: stage.TraceSet,
) -> tuple[dict[tuple[str, str, str], tuple[Any, ...]], Counter[tuple[str, str]]]:
    """Work of the nodes of rank 0, and bytes of its communication outside of blocks."""
    found: dict[tuple[str, str, str], tuple[Any, ...]] = {}
    rest: Counter[tuple[str, str]] = Counter()
    for node in traces.nodes(0):
        match = NAME.fullmatch(node.name)
        assert match, node.name
        key = (match["block"], match["name"], str(node.get("phase")))
        if node.get("num_ops") is not None:
            values: tuple[Any, ...] = (node.get("num_ops"), node.get("tensor_size"))
        else:
            values = (node.get("comm_size"),)
        assert (
            found.setdefault(key, values) == values
            or "bucket" in match["block"]
            or match["block"] == "optimizer"
        ), key
        if node.get("comm_size") and match["block"] == "optimizer":
            rest[match["block"], match["name"]] += int(str(node.get("comm_size")))
    return found, rest


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", FAMILIES)
def test_values_are_those_of_the_nodes_of_a_trace(model: str, strategy: str) -> None:
    agree(model, strategy, {})


@pytest.mark.parametrize(
    ("model", "strategy", "options"),
    [
        ("llama3-8b", "megatron_sp", {"tp": 16}),  # more ranks than KV heads
        ("llama3-8b", "megatron", {"tp": 4, "recompute": "full"}),
        ("llama3-8b", "megatron_sp", {"tp": 4, "recompute": "selective", "attention": "unfused"}),
        ("llama3-8b", load_strategy("fsdp").replace(reshard_after_forward=False), {"dp": 8}),
        ("llama3-8b", load_strategy("fsdp").replace(reshard_after_forward=2), {"dp": 8}),
        ("llama3-8b", "ddp", {"dp": 2, "grad_dtype": "bf16", "mask": "full", "dropout": True}),
        ("mixtral-8x7b", "megatron_moe", {"dp": 2, "tp": 2, "ep": 2}),
        ("mixtral-8x7b", "megatron_moe", {"dp": 2, "tp": 4, "ep": 4, "etp": 2}),
        ("deepseek-v3", "megatron_moe", {"dp": 8, "cp": 2, "tp": 2, "ep": 16, "mtp": True}),
        ("gpt-oss-20b", "megatron_moe", {"tp": 2, "seq": 64}),  # a window wider than the sequence
        ("gpt-oss-20b", load_strategy("megatron_sp").replace(context="ring"), {"cp": 4, "tp": 2}),
        ("llama3-8b", load_strategy("megatron_sp").replace(context="ulysses"), {"cp": 4, "tp": 4}),
        (
            "llama3-8b",
            load_strategy("megatron").replace(context="ring:2x2", recompute="selective"),
            {"cp": 4},
        ),
    ],
)
def test_values_agree_at_other_degrees_and_options(
    model: str, strategy: str | Strategy, options: dict[str, Any]
) -> None:
    agree(model, strategy, options)


def agree(model: str, strategy: str | Strategy, options: dict[str, Any]) -> None:
    options = {**SMALL, "bucket_size": 0, "clip": False, **options}
    found = forms(model, strategy, **options)
    shard = {"dp_shard": 2} if strategy == "hsdp" else {}
    given = {**options, **found["degrees"], **shard}
    nodes, rest = traced(stage.synthesize(model, strategy, batch=found["batch"], **given))
    seen = 0
    for entry in found["blocks"]:
        for phase in ("forward", "backward"):
            for op in entry[phase]["ops"]:
                assert nodes[entry["kind"], op["name"], op["phase"]] == (
                    op["flops_value"],
                    op["bytes_value"],
                ), op
                seen += 1
            for sent in entry[phase]["communication"]:
                for name in sent["nodes"]:
                    assert nodes[entry["kind"], name, sent["phase"]] == (sent["bytes_value"],), name
                    seen += 1
        seen += gathered(entry, nodes)
    blocks = [name for kind, name, _ in nodes if kind != "optimizer" and "bucket" not in kind]
    assert seen == sum(not name.endswith(".recv") for name in blocks)
    sums = [
        e["bytes_value"] * b["count"]
        for b in found["blocks"]
        for e in b["data_parallel"]
        if e["tensors"].startswith("replicated")
    ]
    assert sum(sums) == sum(size for (_, name), size in rest.items() if name.startswith("replicated"))


def gathered(entry: dict[str, Any], nodes: dict[tuple[str, str, str], tuple[Any, ...]]) -> int:
    """How many nodes of a block's own data-parallel communication there are, each as its closed form says."""
    expected: dict[tuple[str, str, bool], set[int]] = {}
    for sent in entry["data_parallel"]:
        key = (
            sent["tensors"].removeprefix("expert ").split()[0],
            sent["kind"],
            sent["tensors"].startswith("expert"),
        )
        expected.setdefault(key, set()).add(sent["bytes_value"])
    own = 0
    for (kind, name, _), (amount, *_) in nodes.items():
        match = re.fullmatch(r"(parameters|gradients)(_expert)?[a-z_]*\.([a-z_]+)", name)
        if kind == entry["kind"] and match:
            assert amount in expected[match[1], match[3], bool(match[2])], name
            own += 1
    return own


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *((model.name, strategy) for model in list_models() for strategy in STRATEGIES),
        *((model, strategy) for model in ("llama3-8b", "deepseek-v3") for strategy in PRESETS),
    ],
)
def test_every_model_has_closed_forms_under_every_strategy(model: str, strategy: str) -> None:
    found = forms(model, strategy)
    assert found["parameters_value"] > 0
    assert {entry["phase"] for entry in found["flops"]} == {"forward", "backward"}


def test_counts_are_of_the_model_and_plain_values() -> None:
    report = model_summary("llama3-8b", batch=2, seq=64, mask="full")
    assert report["parameters"] == 8_030_261_248
    layer = 2 * 64 * (4096 * 80 * 128 + 3 * 4096 * 14336) + 4 * 64 * 64 * 32 * 128
    forward = 2 * (32 * layer + 2 * 64 * 4096 * 128256)
    assert report["flops"] == {"forward": forward, "backward": 2 * forward}
    assert report["blocks"][1] == {
        "kind": "layer", "count": 32, "parameters": 218_112_000,
        "forward_flops": 2 * layer, "backward_flops": 4 * layer,
    }  # fmt: skip
    assert "closed_forms" not in report
    assert is_plain(model_summary("gpt-oss-20b", strategy="megatron_moe"))


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(is_plain(item) for item in value)
    return type(value) in (int, str, bool) or value is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "half"}, "mask is 'half'; choose one of causal, full"),
        ({"attention": "flash"}, "attention is 'flash'; choose one of fused, unfused"),
        ({"batch": 0}, "batch = 0 and seq = 8192 must both be at least 1; change the smaller one"),
    ],
)
def test_wrong_options_are_said_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError) as caught:
        model_summary("llama3-8b", **options)
    assert str(caught.value) == message


@pytest.fixture(scope="module")
def traces() -> stage.TraceSet:
    return stage.synthesize("llama3-8b", gpus=8, tp=2, pp=2, batch=8, **SMALL)


def test_a_trace_set_by_its_manifest(traces: stage.TraceSet) -> None:
    report = trace_summary(traces)
    assert (report["name"], report["ranks"], report["available"]) == ("llama3-8b", 8, 8)
    assert report["inputs"]["mesh"] == {"dp": 2, "pp": 2, "tp": 2}
    assert report["nodes"] == sum(sum(1 for _ in traces.nodes(rank)) for rank in range(8))
    assert [(entry["class"], entry["ranks"]) for entry in report["classes"]] == [(0, 4), (1, 4)]
    assert report["groups"] == [{"ranks": 2, "groups": 8}, {"ranks": 8, "groups": 1}]
    first = report["classes"][0]
    assert first["num_ops"] == sum(int(str(node.get("num_ops", 0))) for node in traces.nodes(0))
    sent = {(e["class"], e["kind"], *e["axes"]): e for e in report["communication"]}
    nodes = [node for node in traces.nodes(0) if node.get("comm_type") == 2 and node.get("axes") == "tp"]
    assert sent[0, "all_gather", "tp"] == {
        "class": 0, "kind": "all_gather", "axes": ["tp"], "group": 2,
        "count": len(nodes), "bytes": sum(int(str(node.get("comm_size"))) for node in nodes),
    }  # fmt: skip


class Foreign:
    """The same traces as another producer would have them: without a manifest."""

    manifest = None

    def __init__(self, traces: stage.TraceSet) -> None:
        self.traces, self.world, self.ranks, self.groups = traces, traces.world, traces.ranks, traces.groups

    def nodes(self, rank: int) -> Any:
        return self.traces.nodes(rank)


def test_a_trace_set_without_a_manifest_is_read_and_sorted_into_classes(traces: stage.TraceSet) -> None:
    own, foreign = trace_summary(traces), trace_summary(Foreign(traces))
    assert [entry["first_rank"] for entry in foreign["classes"]] == [0, 4]
    for one, other in zip(own["classes"], foreign["classes"], strict=True):
        assert [one[key] for key in ("ranks", "nodes", "num_ops", "memory_bytes")] == [
            other[key] for key in ("ranks", "nodes", "num_ops", "memory_bytes")
        ]
    assert (
        Counter((e["class"], e["kind"], e["group"]) for e in own["communication"]).keys()
        == Counter((e["class"], e["kind"], e["group"]) for e in foreign["communication"]).keys()
    )
    assert foreign["nodes"] == own["nodes"]


def test_one_rank_in_detail(traces: stage.TraceSet) -> None:
    report = trace_summary(traces, rank=5)
    nodes = list(traces.nodes(5))
    assert report["nodes"] == len(nodes) == sum(report["types"].values()) == sum(report["phases"].values())
    assert sum(entry["num_ops"] for entry in report["ops"]) == report["num_ops"]
    assert report["largest"][0]["name"] == "head.lm_head/forward"
    assert report["first"][0] == {
        "id": 0, "name": nodes[0].name, "type": "COMM_RECV", "waits_for": [],
    }  # fmt: skip
    with pytest.raises(TraceError, match="rank 8 is not one of the 8 ranks"):
        trace_summary(traces, rank=8)


def test_layers_that_stages_can_not_share_are_refused_as_in_synthesis() -> None:
    with pytest.raises(StageError) as shown:
        model_summary("llama3-8b", pp=5)
    with pytest.raises(StageError) as synthesized:
        stage.synthesize("llama3-8b", pp=5)
    assert str(shown.value) == str(synthesized.value)
    assert "32 layers" in str(shown.value)
