"""8-bit recipes: work that does not change, and bytes by closed form, of kernels and of every collective."""

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

import stage
from stage.errors import LayoutError, StageError, StrategyError
from stage.request import resolve_request
from stage.synthesis import sharded_block
from stage.trace.node import TraceNode
from stage.trace.verify import verify
from tests.small import name_of

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
ACTIVATION = {
    "delayed": Fraction(1),
    "tensorwise": Fraction(1),
    "blockwise": 1 + Fraction(4, 128),
    "mxfp8": 1 + Fraction(1, 32),
}
"""Bytes of an element of an activation with its share of the scales."""

WEIGHT = ACTIVATION | {"blockwise": 1 + Fraction(4, 128 * 128)}

LAYERS, MICRO_BATCHES, TP, DP = 2, 2, 2, 2
HIDDEN, FEED, HEADS, KV, SEQ, VOCAB = 4096, 14336, 4096, 1024, 2048, 128256
"""Of Llama 3 8B; heads and KV heads in elements, a vocabulary that needs no padding."""

LINEAR = {
    "qkv": HIDDEN * (HEADS + 2 * KV),
    "o": HEADS * HIDDEN,
    "gate_up": 2 * HIDDEN * FEED,
    "down": FEED * HIDDEN,
}
"""Elements of the weights of a layer, those of fused products as one."""


@cache
def synthesized(recipe: str, strategy: str = "megatron_sp", tp: int = TP, **options: Any) -> stage.TraceSet:
    return stage.synthesize(
        "llama3-8b",
        strategy,
        **{"tp": tp, "dp": DP, "batch": DP * MICRO_BATCHES, "seq": SEQ, "sizes": {"layers": LAYERS}}
        | {"fp8": recipe}
        | options,
    )


def nodes(traces: stage.TraceSet, **wanted: object) -> Iterator[TraceNode]:
    for node in traces.nodes(0):
        if all(node.get(key) == value for key, value in wanted.items()):
            yield node


def named(traces: stage.TraceSet, name: str) -> TraceNode:
    return next(node for node in traces.nodes(0) if node.name == name)


def sent(traces: stage.TraceSet, **wanted: object) -> list[int]:
    """`comm_size` of the first rank's nodes with these attributes."""
    return [int(str(node.get("comm_size"))) for node in nodes(traces, **wanted)]


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"pp": 2, "schedule": "zb-h1"},
    {"recompute": "full"},
    {"recompute": "selective", "attention": "unfused"},
    {"strategy": "fsdp", "tp": 1},
    {"strategy": "megatron"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_the_same_work_in_another_precision(recipe: str, options: dict[str, Any]) -> None:
    plain, quantised = synthesized("none", **options), synthesized(recipe, **options)
    for before, after in zip(plain.manifest["classes"], quantised.manifest["classes"], strict=True):
        assert before["matmul_ops"] == after["matmul_ops"]
        assert before["model_flops"] == after["model_flops"]
    assert "fp8" not in plain.manifest
    assert quantised.manifest["fp8"] == recipe
    products = [
        n
        for n in quantised.nodes(0)
        if str(n.get("op")).startswith("contract") and n.get("layer") is not None
    ]
    kept = {"lm_head", "core"}
    assert {n.get("dtype") for n in products if not kept & set(n.name.split("/")[0].split("."))} == {"fp8"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_moves_its_copies(recipe: str) -> None:
    """The row-parallel o_proj: all tokens, its share of the heads."""
    traces, x, w = synthesized(recipe), ACTIVATION[recipe], WEIGHT[recipe]
    tokens, heads = SEQ, HEADS // TP
    given, made, weight = tokens * heads, tokens * HIDDEN, heads * HIDDEN
    product = "layer0.attn.o_proj"
    amax = 4 * (recipe == "tensorwise")
    expected = {
        f"{product}.input.quantize/forward/mb1": 2 * given + 2 * x * given + amax,
        f"{product}.weight.quantize/forward/mb0": 2 * weight + 2 * w * weight + amax,
        f"{product}/forward/mb1": x * given + w * weight + 2 * made,
        f"{product}.dgrad/backward/mb1": x * made + w * weight + 2 * given,
        f"{product}.wgrad/backward/mb1": x * given + x * made + 2 * 4 * weight,
    }
    assert {name: named(traces, name).get("tensor_size") for name in expected} == expected
    copies = 2 if recipe in ("blockwise", "mxfp8") else 1
    gradient = named(traces, f"{product}.grad_output.quantize/backward/mb1")
    assert gradient.get("tensor_size") == made // TP * (2 + copies * x) + amax, (
        "only blocks are gathered by columns"
    )
    if copies == 1:
        turned = named(traces, f"{product}.grad_output.requantize/backward/mb1")
        assert turned.get("tensor_size") == 2 * made
    if amax:
        assert named(traces, f"{product}.input.amax/forward/mb1").get("tensor_size") == 2 * given + 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_gathers_over_tp_move_8_bits_and_reductions_do_not(recipe: str) -> None:
    traces = synthesized(recipe)
    shard = SEQ // TP * HIDDEN
    columns = (
        2 if recipe in ("blockwise", "mxfp8") else 0
    )  # of gradients, beside their row copies and inputs again
    runs, wide = MICRO_BATCHES * LAYERS, {"axes": "tp", "dtype": "bf16"}
    forward = sent(traces, op="all_gather", axes="tp", dtype="fp8", phase="forward")
    backward = sent(traces, op="all_gather", axes="tp", dtype="fp8", phase="backward")
    assert forward == [shard * ACTIVATION[recipe]] * 2 * runs
    assert backward == [shard * ACTIVATION[recipe]] * (4 + columns) * runs
    assert len(list(nodes(traces, op="all_gather", **wide))) == 3 * MICRO_BATCHES, (
        "of the head, and of embeddings"
    )
    for phase in ("forward", "backward"):
        scattered = sent(traces, op="reduce_scatter", phase=phase, **wide)
        assert scattered == [2 * TP * shard] * (2 * runs + MICRO_BATCHES)


def test_shards_that_are_gathered_agree_on_one_scale_first() -> None:
    traces = synthesized("tensorwise")
    for phase in ("forward", "backward"):
        found = [n for n in nodes(traces, op="all_reduce", axes="tp", phase=phase) if ".amax" in n.name]
        assert [n.get("comm_size") for n in found] == [4] * 2 * LAYERS * MICRO_BATCHES
        assert {n.get("dtype") for n in found} == {"fp32"}
    alone = synthesized("tensorwise", "megatron")
    assert not [n for n in nodes(alone, op="all_reduce") if ".amax" in n.name], (
        "nothing is gathered without shards"
    )
    assert len(list(nodes(alone, op="amax"))) == LAYERS * (4 + 8 * MICRO_BATCHES)


@pytest.mark.parametrize("pp", [1, 2])
def test_delayed_scaling_reduces_all_largest_values_at_once(pp: int) -> None:
    traces = synthesized("delayed", pp=pp)
    products = 4 * LAYERS // pp
    for phase, kept in (("forward", 3), ("backward", 2)):
        found = list(nodes(traces, op="all_reduce", axes="dp tp", phase=phase))
        assert [n.get("comm_size") for n in found] == [4 * kept * products] * MICRO_BATCHES
        assert {len(traces.groups[str(n.get("pg_name"))]) for n in found} == {DP * TP}
        assert len(list(nodes(traces, op="scale_update", phase=phase))) == MICRO_BATCHES


def test_grouped_products_keep_largest_values_for_each_expert() -> None:
    traces = sparse("delayed")
    products = LAYERS * (2 + 2 * 8 // 2)
    assert sent(traces, op="all_reduce", phase="forward") == [4 * 3 * products]
    assert sent(traces, op="all_reduce", phase="backward") == [4 * 2 * products]


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_quantised_once_a_step_and_by_fsdp_wherever_they_are_gathered(recipe: str) -> None:
    def count(traces: stage.TraceSet, phase: str) -> int:
        return sum(".weight." in n.name for n in nodes(traces, op="quantize", phase=phase))

    kept = synthesized(recipe, steps=2)
    assert (count(kept, "forward"), count(kept, "backward")) == (2 * 4 * LAYERS, 0)
    gathered, unfused = synthesized(recipe, "fsdp", tp=1), 7
    assert count(gathered, "forward") == count(gathered, "backward") == unfused * LAYERS * MICRO_BATCHES


def test_a_forward_that_runs_again_makes_copies_for_backward_only_then() -> None:
    traces, given = synthesized("mxfp8", recompute="full"), SEQ * HEADS // TP
    first = named(traces, "layer0.attn.o_proj.input.quantize/forward/mb0")
    again = named(traces, "layer0.attn.o_proj.input.quantize.recompute/recompute/mb0")
    assert first.get("tensor_size") == given * (2 + ACTIVATION["mxfp8"])
    assert again.get("tensor_size") == given * (2 + 2 * ACTIVATION["mxfp8"])
    assert not [n for n in nodes(traces, phase="recompute") if ".weight." in n.name]


def test_backward_keeps_column_copies_of_shards() -> None:
    job = resolve_request(
        "llama3-8b", "megatron_sp", tp=2, dp=2, seq=SEQ, fp8="mxfp8", sizes={"layers": LAYERS}
    )
    both = sharded_block(job, job.model.layers[0])
    kept = {name for name in both.saved if both.forward.tensors[name].dtype == "fp8"}
    made_once = {name for name in kept if both.forward.tensors[name].role == "weight"}
    assert kept - made_once == {"attn.norm.fp8_t", "attn.core.fp8_t", "mlp.norm.fp8_t", "mlp.act.fp8_t"}
    assert len(made_once) == 7
    assert not {"attn.norm", "mlp.norm", "mlp.act"} & set(both.saved), "what is quantised is not kept as well"
    assert "attn.core" in both.saved, "which attention's own backward reads"


PARAMETERS = LAYERS * sum(LINEAR.values())
OTHERS = LAYERS * 2 * HIDDEN * TP + 2 * VOCAB * HIDDEN + HIDDEN * TP
"""Elements of all weights that are quantised, and of all others (norms stand on every rank of tp)."""


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_stored_in_8_bits_are_gathered_so(recipe: str) -> None:
    traces = synthesized(recipe, fp8_param_gather=True)
    gathered = sent(traces, op="all_gather", phase="optimizer")
    assert sum(gathered) * DP * TP == PARAMETERS + 2 * OTHERS
    scattered = sent(traces, op="reduce_scatter", dtype="fp32")
    plain = sent(synthesized("none"), op="reduce_scatter", dtype="fp32")
    assert sum(scattered) == sum(plain), "gradients are as they were"
    (agreed,) = (n for n in nodes(traces, op="all_reduce", axes="dp") if "amax" in n.name)
    blocks = sum(n // TP // 128**2 for n in LINEAR.values())
    assert agreed.get("comm_size") == 4 * LAYERS * (blocks if recipe == "blockwise" else len(LINEAR))
    rounding = [n for n in nodes(traces, phase="optimizer") if n.get("op") in ("amax", "quantize")]
    owned, scales = PARAMETERS // TP // DP, int(str(agreed.get("comm_size")))
    widths = [5] if recipe == "delayed" else [4, 5]
    assert [n.get("tensor_size") for n in rounding] == [width * owned + scales for width in widths]
    turned = [n for n in nodes(traces, op="requantize", phase="forward") if ".weight." in n.name]
    assert len(turned) == 4 * LAYERS, "the column copy is made once a step"
    assert not [n for n in nodes(traces, op="quantize") if ".weight." in n.name]


def test_fsdp_gathers_8_bits_beside_others() -> None:
    traces = synthesized("tensorwise", "fsdp", tp=1, fp8_param_gather=True)
    layer = (sum(LINEAR.values()) + 2 * 2 * HIDDEN) // DP
    found = sent(traces, op="all_gather", dtype="uint8")
    assert found == [layer] * 2 * LAYERS * MICRO_BATCHES


@cache
def sparse(recipe: str, **options: Any) -> stage.TraceSet:
    return stage.synthesize(
        "mixtral-8x7b",
        "megatron_moe",
        dp=2,
        ep=2,
        batch=2,
        seq=SEQ,
        sizes={"layers": LAYERS},
        fp8=recipe,
        **options,
    )


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_tokens_and_their_gradients_go_to_experts_in_8_bits_and_come_back_in_16(recipe: str) -> None:
    traces = sparse(recipe, fp8_dispatch=True)
    tokens, probabilities = SEQ * 2 * HIDDEN, SEQ * 2 * 2
    for phase in ("forward", "backward"):
        found = sent(traces, op="all_to_all", phase=phase)
        expected = [int(tokens * ACTIVATION[recipe]), 2 * tokens, probabilities] * LAYERS
        assert sorted(found) == sorted(expected)
    plain = sent(sparse(recipe), op="all_to_all")
    assert sorted(plain) == sorted([probabilities, 2 * tokens, 2 * tokens] * 2 * LAYERS)
    assert traces.manifest["classes"][0]["matmul_ops"] == sparse("none").manifest["classes"][0]["matmul_ops"]


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_unequal_loads_are_sent_with_the_scales_of_their_tokens(recipe: str) -> None:
    plain, quantised = (
        sparse("none", expert_load="zipf:1.2"),
        sparse(recipe, expert_load="zipf:1.2", fp8_dispatch=True),
    )
    before = next(n for n in nodes(plain, op="all_to_all") if "permute.all" in n.name)
    after = next(n for n in nodes(quantised, op="all_to_all") if "permute.all" in n.name)
    smaller = ACTIVATION[recipe] / 2
    assert after.get("comm_size") == int(str(before.get("comm_size"))) * smaller
    for splits in ("in_splits", "out_splits"):
        whole, part = before.get(splits), after.get(splits)
        assert isinstance(whole, tuple)
        assert isinstance(part, tuple)
        assert [int(n) * smaller for n in whole] == list(part)


def test_a_partial_block_of_an_unsharded_dim_has_a_scale_of_its_own() -> None:
    """The joint latent of DeepSeek-V3 has 576 elements, which are 4.5 blocks of 128."""
    traces = stage.synthesize(
        "deepseek-v3", "megatron_moe", dp=1, seq=SEQ, sizes={"layers": 1}, fp8="blockwise"
    )
    quantised = next(n for n in traces.nodes(0) if "kv_a_proj.grad_output.quantize" in n.name)
    rows, columns = SEQ * (576 + 4 * 5), SEQ * 576 + 4 * SEQ // 128 * 576
    assert quantised.get("tensor_size") == SEQ * 576 * 2 + rows + columns


VERIFIED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "pp": 2, "fp8": "mxfp8", "steps": 2}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "pp": 2, "fp8": "delayed", "schedule": "zb-h1"}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "cp": 2, "fp8": "tensorwise", "recompute": "full"}),
    ("llama3-8b", "megatron", {"tp": 4, "fp8": "blockwise", "recompute": "selective"}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "fp8": "blockwise", "fp8_param_gather": True, "steps": 2}),
    ("llama3-8b", "fsdp", {"dp": 4, "fp8": "delayed", "fp8_param_gather": True, "recompute": "full", "steps": 2}),
    ("llama3-8b", "hsdp", {"dp": 4, "dp_shard": 2, "fp8": "tensorwise", "fp8_param_gather": True}),
    ("llama3-8b", "ddp", {"dp": 2, "fp8": "delayed"}),
    ("llama3-8b", "megatron_sp", {"pp": 2, "dp": 2, "fp8": "delayed", "schedule": "dualpipe-v"}),
    ("mixtral-8x7b", "megatron_moe", {"dp": 2, "tp": 2, "ep": 2, "fp8": "mxfp8", "fp8_dispatch": True}),
    ("mixtral-8x7b", "megatron_moe", {"dp": 4, "ep": 2, "pp": 2, "fp8": "delayed", "fp8_param_gather": True}),
    ("mixtral-8x7b", "megatron_moe", {"tp": 2, "ep": 2, "dp": 2, "etp": 2, "fp8": "blockwise", "fp8_dispatch": True}),
    ("mixtral-8x7b", "megatron_moe", {"dp": 4, "ep": 4, "fp8": "mxfp8", "fp8_dispatch": True, "expert_load": "zipf:2"}),
    ("mixtral-8x7b", "megatron_moe", {"dp": 4, "ep": 4, "fp8": "blockwise", "fp8_dispatch": True, "alltoall": "p2p"}),
    ("mixtral-8x7b", "megatron_moe", {"dp": 4, "ep": 4, "pp": 2, "fp8": "delayed", "expert_load": "zipf:3"}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "cp": 2, "fp8": "mxfp8", "context": "ring"}),
    ("llama3-8b", "tp_2d", {"tp": 4, "tp_x": 2, "fp8": "tensorwise", "fp8_param_gather": True}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "fp8": "mxfp8", "recompute": "ops:norm,act"}),
    ("llama3-8b", "fsdp", {"dp": 4, "fp8": "tensorwise", "recompute": "every:2", "prefetch": 2}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "cp": 2, "fp8": "tensorwise", "context": "ulysses"}),
    ("deepseek-v3", "megatron_moe", {"dp": 4, "ep": 4, "pp": 2, "fp8": "blockwise", "fp8_dispatch": True}),
)  # fmt: skip


@pytest.mark.parametrize(("model", "strategy", "options"), VERIFIED, ids=name_of)
def test_traces_verify(model: str, strategy: str, options: dict[str, Any]) -> None:
    batch = {"batch": 8, "seq": 4096, "sizes": {"layers": 4}}
    report = verify(stage.synthesize(model, strategy, **batch | options))
    assert report.ok, report.defects[:3]


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"tp": 2, "fp8": "mxfp8", "seq": 96},
        "batch x seq = 48 on a device, of attn.norm, does not divide by 32, which the fp8 recipe mxfp8 needs; choose "
        "sizes, seq, micro_batch or degrees so that it does",
    ),
    (
        {"tp": 2, "fp8": "blockwise", "seq": 4096, "sizes": {"layers": 1, "d_ff": 1216}},
        "d_ff = 608 on a device, of mlp.act, does not divide by 128, which the fp8 recipe blockwise needs; choose "
        "sizes, seq, micro_batch or degrees so that it does",
    ),
    (
        {"fp8": "delayed", "seq": 4096, "sizes": {"layers": 1, "d_ff": 1000}},
        "d_ff = 1000 on a device, of mlp.act, does not divide by 16, which the fp8 recipe delayed needs; choose "
        "sizes, seq, micro_batch or degrees so that it does",
    ),
)


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_shapes_that_no_block_divides_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        stage.synthesize("llama3-8b", "megatron_sp", **{"sizes": {"layers": 1}} | options)
    assert str(caught.value) == message


ILLEGAL: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"fp8": "mxfp8", "fp8_param_gather": True},
        "strategy megatron_sp: fp8_param_gather is not possible with fp8 = 'mxfp8', whose weights are gathered as they "
        "are; leave it out or choose fp8 from delayed, tensorwise, blockwise",
    ),
    (
        {"fp8_param_gather": True},
        "strategy megatron_sp: fp8_param_gather is not possible with fp8 = 'none', whose weights are gathered as they "
        "are; leave it out or choose fp8 from delayed, tensorwise, blockwise",
    ),
    (
        {"fp8": "delayed", "fp8_param_gather": True, "zero": 0},
        "strategy megatron_sp: fp8_param_gather needs zero = 1, 2 or 3, for with zero = 0 nothing is gathered",
    ),
    (
        {"fp8": "delayed", "fp8_dispatch": True},
        "strategy megatron_sp: fp8_dispatch is not possible with fp8 = 'delayed', for scales must travel with their "
        "tokens; leave it out or choose fp8 from blockwise, mxfp8",
    ),
    (
        {"fp8": "mxfp8", "fp8_dispatch": True},
        "fp8_dispatch sends tokens to experts, but llama3-8b has none; leave it out",
    ),
    (
        {"fp8": "mxfp8", "dtype": "fp8"},
        "dtype = fp8 leaves nothing to the recipe fp8 = mxfp8; choose dtype bf16, fp16 or fp32",
    ),
    (
        {"fp8": "mxpf8"},
        "strategy megatron_sp: fp8 is 'mxpf8' (did you mean 'mxfp8'?); known: none, delayed, tensorwise, blockwise, "
        "mxfp8",
    ),
)


@pytest.mark.parametrize(("options", "message"), ILLEGAL)
def test_what_a_recipe_does_not_allow_is_refused_before_any_work(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(StageError) as caught:
        stage.synthesize("llama3-8b", "megatron_sp", **options)
    assert str(caught.value) == message
    assert isinstance(caught.value, StrategyError)
