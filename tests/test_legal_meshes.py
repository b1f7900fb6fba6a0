"""Any degrees, batches and options: either the trace set verifies, or the error is one line that says what to do."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stage.errors import StageError
from stage.synthesis import job
from stage.trace.verify import verify
from stage.traceset import TraceSet
from tests.small import MODELS, STRATEGIES, request

DEGREES = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "micro_batch": st.integers(0, 3),
    "batch": st.sampled_from([None, None, 1, 4, 8, 12, 24]),
    "seq": st.sampled_from([None, None, None, 0, 1, 12, 16, 24, 32]),
    "schedule": st.sampled_from([None, "gpipe", "1f1b"]),
    "zero": st.sampled_from([None, None, 0, 1, 2, 3, 4]),
    "recompute": st.sampled_from(
        [None, "full", "selective", "none", "every:2", "ops:norm,act", "ops:moe,mlp"]
    ),
    "grad_reduce": st.sampled_from(["step", "microbatch"]),
    "dtype": st.sampled_from(["bf16", "fp32", "fp8", "bf17"]),
    "clip": st.booleans(),
    "dropout": st.booleans(),
    "steps": st.integers(0, 2),
    "attention": st.sampled_from(["fused", "unfused"]),
    "mask": st.sampled_from(["causal", "full"]),
    "mtp": st.booleans(),
    "bucket_size": st.sampled_from([None, 0, 1, 1000, -1]),
    "stage_layers": st.sampled_from([None, None, (1, 1), (0, 2), (2, 0), (2,), (3, -1), ()]),
    "vocab_multiple": st.sampled_from([None, 1, 8, 0]),
    "sizes": st.dictionaries(
        st.sampled_from(
            ["layers", "experts", "top_k", "heads", "kv_heads", "vocab", "d_ff", "window", "positions"]
        ),
        st.integers(-1, 9),
        max_size=1,
    ),
}


def draws(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the options that have these names."""
    return st.fixed_dictionaries({}, optional={name: OPTIONS[name] for name in names})


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(sorted(MODELS)),
    strategy=st.sampled_from([*STRATEGIES, "megatron_sp", "megatron_moe"]),
    degrees=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("pp", "dp", "cp", "tp", "ep", "etp", "dp_shard"), DEGREES)
    ),
    options=draws(tuple(OPTIONS)) | st.just({}),
)
def test_a_job_verifies_or_is_refused_in_one_line(
    model: str, strategy: str, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    try:
        traces = TraceSet.of(job(request(model, strategy, **{**degrees, **options})))
    except StageError as refused:
        text = str(refused)
        assert text
        assert "\n" not in text
        return
    report = verify(traces)
    assert report.ok, report.defects[:3]
    assert not report.unchecked


GATHERED: dict[str, st.SearchStrategy[Any]] = {
    "reshard_after_forward": st.sampled_from([True, False, 2]),
    "prefetch": st.integers(0, 3),
    "grad_reduce": st.sampled_from(["step", "microbatch"]),
    "param_dtype": st.sampled_from(["fp32", "fp8"]),
    "recompute": st.sampled_from(["every:1", "every:2", "full", "ops:norm,up_proj", "selective"]),
    "schedule": st.sampled_from(["1f1b", "zb-h1", "interleaved", "zb-v"]),
    "steps": st.integers(1, 2),
    "pp": st.just(2),
}


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["gpt3-125m", "llama3-8b", "mixtral-8x7b", "deepseek-v3"]),
    strategy=st.sampled_from(["fsdp", "torchtitan"]),
    mesh=st.sampled_from([{"dp": 4}, {"dp": 2, "cp": 2}, {"dp": 4, "dp_shard": 2}]),
    options=st.fixed_dictionaries({}, optional=GATHERED),
)
def test_any_way_to_gather_parameters_verifies(
    model: str, strategy: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    if "dp_shard" in mesh:
        options = {key: value for key, value in options.items() if key != "reshard_after_forward"}
    if options.get("recompute") == "every:2":
        options = options | {"pp": 1, "schedule": "1f1b"}
    sizes = {"layers": 4, "first_k_dense": 2} if model == "deepseek-v3" else {"layers": 4}
    report = verify(TraceSet.of(job(request(model, strategy, **mesh, **options, batch=16, sizes=sizes))))
    assert report.ok, report.defects[:3]
    assert not report.unchecked


REFUSED: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("llama3-8b", "megatron", {"tp": 3}, ("heads = 4", "tp = 3")),
    ("llama3-8b", "megatron", {"tp": 8}, ("heads = 4", "tp = 8")),
    ("gpt3-125m", "megatron", {"tp": 8}, ("tp = 8",)),
    ("llama3-8b", "megatron", {"gpus": 6, "tp": 4}, ("4", "6")),
    ("llama3-8b", "megatron", {"gpus": 8, "tp": 2, "dp": 2}, ("4", "8")),
    ("llama3-8b", "megatron", {"pp": 2, "sizes": {"layers": 3}}, ("3 layers", "pp = 2", "--stage-layers")),
    ("llama3-8b", "megatron", {"pp": 2, "stage_layers": (2, 1)}, ("2,1", "2 layers")),
    ("llama3-8b", "megatron", {"dp": 4, "batch": 6}, ("batch = 6", "4")),
    ("llama3-8b", "megatron_sp", {"tp": 2, "seq": 15}, ("seq = 15", "tp = 2")),
    ("llama3-8b", "ddp", {"tp": 2}, ("ddp", "tp")),
    ("llama3-8b", "megatron", {"tp": 4, "tp_x": 2}, ("megatron", "tp_x", "2")),
    ("llama3-8b", "tp_2d", {"tp": 4, "tp_x": 3}, ("tp_x = 3", "tp = 4")),
    ("llama3-8b", "tp_2d", {"tp": 4, "sizes": {"d_model": 31}}, ("d_model = 31", "tp_x = 2")),
    ("llama3-8b", "megatron", {"tp": 4, "sizes": {"d_ff": 66}}, ("d_ff = 66", "tp = 4")),
    ("llama3-8b", "megatron", {"ep": 2, "dp": 2}, ("ep = 2",)),
    ("mixtral-8x7b", "megatron", {"dp": 8, "ep": 8}, ("experts = 4", "ep = 8")),
    ("mixtral-8x7b", "megatron", {"dp": 2, "ep": 4}, ("ep",)),
    (
        "mixtral-8x7b",
        "megatron",
        {"tp": 4, "ep": 2, "seq": 1, "sizes": {"top_k": 1}},
        ("moe.permute_probs", "1/4"),
    ),
    ("llama3-8b", "megatron", {"sizes": {"d_modle": 64}}, ("d_modle", "d_model")),
    ("llama3-8b", "megatron", {"vpp": 2}, ("vpp = 2",)),
    ("llama3-8b", "megatron", {"dtype": "bf17"}, ("bf17", "bf16")),
    ("llama3-8b", "megatorn", {}, ("megatorn", "megatron")),
    ("llama3-8b", "megatron", {"placement": (0, 1), "dp": 4}, ("placement", "4")),
    ("llama3-8b", "megatron", {"schedule": "zb"}, ("zb", "1f1b")),
    ("llama3-8b", "megatron", {"mtp": True}, ("multi-token",)),
]


@pytest.mark.parametrize(("model", "strategy", "options", "words"), REFUSED, ids=str)
def test_what_is_refused_says_what_and_where(
    model: str, strategy: str, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(StageError) as caught:
        job(request(model, strategy, **options))
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
