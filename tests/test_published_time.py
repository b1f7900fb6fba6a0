"""Published step times as jobs: what a row says, by hand; that every row says something; what a prediction adds up to."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from stage.cost.system import System
from stage.cost.system_file import load_system
from stage.cost.work import Exchange, Kernel
from stage.counting import count_parameters
from stage.errors import StageError
from stage.published import korthikanti2022, mlperf_pretraining, mosaic_mpt, nvidia_dgxc, vtrain_single
from stage.published.row import Row, published_rows
from stage.published.time_accuracy import TIME_SETS, TimeAccuracy, predict_seconds, time_accuracy, time_set
from stage.request import Request

LEFT_OUT: dict[str, dict[str, int]] = {
    "korthikanti2022_table5_e2e": {},
    "vtrain_ground_truth_single": {},
    "nvidia_dgxc_benchmarking_step_times": {
        "a model outside the zoo (nemotron-h-56b (mamba2 hybrid))": 4,
        "a model outside the zoo (llama4-maverick-400b)": 1,
        "a model outside the zoo (adapters)": 8,
        "packed documents, whose lengths are in no column": 7,
    },
    "simumax_b200_real_vs_perf": {},
    "mlperf_gpt3_llama405b": {
        "a machine outside the systems (Gaudi 2)": 4,
        "no parallel configuration": 7,
        "products in 4 bits, which no recipe computes": 3,
    },
    "mosaic_llmfoundry_mpt_fsdp_a100_h100": {},
}
ROWS = {
    "korthikanti2022_table5_e2e": 8,
    "vtrain_ground_truth_single": 880,
    "nvidia_dgxc_benchmarking_step_times": 92,
    "simumax_b200_real_vs_perf": 30,
    "mlperf_gpt3_llama405b": 37,
    "mosaic_llmfoundry_mpt_fsdp_a100_h100": 125,
}
SAMPLED = 15
"""Of the sweep, so many rows apart: those have all values of all columns, as a test of its own shows."""


class Arithmetic:
    """Prices products at the peak and everything else at nothing."""

    def __init__(self, system: System, issue: str = "eager") -> None:
        self.peak, self.issue = system.peak("bf16"), issue

    def kernels(self, kernels: Sequence[Kernel]) -> np.ndarray:
        return np.array([kernel.flops / self.peak if kernel.matmul else 0.0 for kernel in kernels])

    def exchanges(self, exchanges: Sequence[Exchange]) -> np.ndarray:
        return np.zeros(len(exchanges))


def cases(name: str) -> list[Row]:
    told = time_set(name).rows
    return [case for row in published_rows(name) for case in told.cases(row)]


def row(name: str, **values: str) -> Row:
    """The first case with these cells; the words of a column stand with `_` for what separates them."""

    def fits(case: Row) -> bool:
        cells = {"".join(c if c.isalnum() else "_" for c in key): cell for key, cell in case.items()}
        return all(cells[key] == cell for key, cell in values.items())

    return next(case for case in cases(name) if fits(case))


def degrees(request: Request) -> dict[str, int]:
    return {axis: n for axis, n in request.degrees.items() if n > 1}


@pytest.mark.parametrize("name", TIME_SETS)
def test_every_row_is_a_job_or_left_out_for_a_listed_reason(name: str) -> None:
    told, rows = time_set(name).rows, cases(name)
    assert len(rows) == ROWS[name]
    without = Counter(why for why in map(told.left_out, rows) if why is not None)
    assert without == LEFT_OUT[name]
    for case in [case for case in rows if told.left_out(case) is None][:: SAMPLED if len(rows) > 500 else 1]:
        request = told.row_request(case)
        assert told.group(case) in time_set(name).bounds
        assert told.row_issue(case) in {"eager", "compiled", "graph"}
        assert load_system(told.row_system(case)).peak(request.dtype) > 0
        assert told.measured_seconds(case) > 0
        assert case["case"]


def test_rows_of_the_sweep_that_are_resolved_have_all_that_the_others_have() -> None:
    rows = cases("vtrain_ground_truth_single")
    for column in set(rows[0]) - {"iteration time (ms)", "case"}:
        assert {case[column] for case in rows[::SAMPLED]} == {case[column] for case in rows}
    for case in rows:
        tp, dp, pp = (int(case[f"{axis} parallelism"]) for axis in ("tensor", "data", "pipeline"))
        assert tp * dp * pp == int(case["# GPUs"])
        assert int(case["global batch"]) % (dp * int(case["micro batch"])) == 0
        assert int(case["# layers"]) % pp == 0


def test_two_measurements_of_korthikanti_differ_in_sequence_parallelism_and_recomputation() -> None:
    full, selective = (
        row("korthikanti2022_table5_e2e", model="175B", recompute=policy) for policy in ("full", "selective")
    )
    one, two = korthikanti2022.row_request(full), korthikanti2022.row_request(selective)
    for request in (one, two):
        parameters = 12 * 96 * 12288**2 + 13 * 96 * 12288 + (51200 + 2048 + 2) * 12288
        assert count_parameters(request.model) == parameters
        assert (degrees(request), request.mesh.world) == ({"tp": 8, "pp": 8}, 64)
        assert (request.batch, request.micro_batches, request.pipeline.chunks) == (64, 64, 3)
        assert request.strategy.zero == 0
    assert ("tp" in one.strategy.axes("seq"), str(one.strategy.recompute)) == (False, "full")
    assert ("tp" in two.strategy.axes("seq"), str(two.strategy.recompute)) == (True, "selective")
    assert korthikanti2022.measured_seconds(full) == 18.13
    assert korthikanti2022.measured_seconds(selective) == 13.75


def test_row_of_the_sweep() -> None:
    # 2 of the rows' GPUs in a pipeline: h = 1024, 24 layers, 16 sequences of 1024 tokens in micro-batches of 8
    case = cases("vtrain_ground_truth_single")[0]
    request = vtrain_single.row_request(case)
    assert count_parameters(request.model) == 12 * 24 * 1024**2 + 13 * 24 * 1024 + (50257 + 1024 + 2) * 1024
    assert (degrees(request), request.micro_batches, request.micro_batch, request.seq) == (
        {"pp": 2},
        2,
        8,
        1024,
    )
    assert request.sizes["vocab"] == 50304
    assert vtrain_single.measured_seconds(case) == pytest.approx(0.372160408)


def test_parameters_of_mpt_are_those_that_its_authors_count() -> None:
    name = "mosaic_llmfoundry_mpt_fsdp_a100_h100"
    models = {(case["Model"], case["SeqLen (T)"]): case for case in cases(name)}
    assert len(models) > 40
    for case in models.values():
        request = mosaic_mpt.row_request(case)
        assert count_parameters(request.model) == int(case["NumParams"])


def test_sharding_and_precision_of_mpt() -> None:
    name = "mosaic_llmfoundry_mpt_fsdp_a100_h100"
    case = row(name, Model="3b", __GPUs="512", Sharding_Strategy="SHARD_GRAD_OP")
    request = mosaic_mpt.row_request(case)
    assert (degrees(request), request.micro_batches, request.micro_batch) == ({"dp": 512}, 1, 8)
    assert (request.strategy.zero, request.strategy.reshard_after_forward) == (3, False)
    assert (request.grad_dtype, request.grad_reduce) == ("fp32", "microbatch")
    assert mosaic_mpt.measured_seconds(case) == pytest.approx(8388608 / 11092218)
    case = row(name, Model="70b", __GPUs="64", GPU="a100_40gb")
    request = mosaic_mpt.row_request(case)
    assert (request.grad_dtype, str(request.strategy.recompute)) == ("bf16", "full")
    assert request.strategy.reshard_after_forward is True
    assert mosaic_mpt.row_system(case) == "a100-40gb-sxm"
    eight = row(name, Precision="amp_fp8")
    assert mosaic_mpt.row_request(eight).strategy.fp8 == "delayed"
    odd = {**case, "MicroBatchSize": "3"}
    assert mosaic_mpt.left_out(odd) == "micro-batches of different sizes"


def test_llama_405b_counts_embedding_and_loss_as_layers() -> None:
    name = "nvidia_dgxc_benchmarking_step_times"
    request = nvidia_dgxc.row_request(row(name, layers="126", gpu="H100", gpus="1024", dtype="fp8"))
    assert count_parameters(request.model) == 405_853_388_800
    assert degrees(request) == {"pp": 8, "dp": 8, "cp": 2, "tp": 8}
    assert (request.batch, request.micro_batches, request.pipeline.stages) == (512, 64, 64)
    assert request.stage_layers == (1, *(2,) * 62, 1)
    assert (request.strategy.fp8, request.strategy.fp8_param_gather) == ("delayed", True)
    assert (request.grad_dtype, request.strategy.context) == ("bf16", "ring")
    proxy = nvidia_dgxc.row_request(row(name, layers="30", dtype="bf16"))
    assert proxy.stage_layers == (0, *(1,) * 30, 0)


def test_grok_is_a_mixtral_whose_experts_take_their_balanced_share() -> None:
    name = "nvidia_dgxc_benchmarking_step_times"
    early = nvidia_dgxc.row_request(row(name, layers="8", seq="8192", dtype="bf16", gpus="64", ep="8"))
    attention, experts = 6144**2 * (2 + 2 * 8 / 48), 8 * 3 * 6144 * 32768
    parameters = 8 * (attention + experts + 8 * 6144 + 2 * 6144) + 2 * 128256 * 6144 + 6144
    assert count_parameters(early.model) == parameters
    assert degrees(early) == {"dp": 8, "cp": 2, "tp": 4, "ep": 8, "etp": 4}
    assert (early.micro_batches, early.strategy.capacity_factor, early.strategy.pad_to_capacity) == (
        128,
        1,
        True,
    )
    late = nvidia_dgxc.row_request(row(name, model="grok1-314b", gpu="H100"))
    assert degrees(late) == {"pp": 8, "dp": 8, "cp": 2, "tp": 4, "ep": 8}


def test_other_jobs_of_nvidia() -> None:
    name = "nvidia_dgxc_benchmarking_step_times"
    deepseek = nvidia_dgxc.row_request(row(name, model="deepseek-v3-671b", gpu="H100"))
    assert deepseek.stage_layers == (3, *(4,) * 14, 2)
    assert str(deepseek.strategy.recompute) == "ops:mla_up_proj"
    assert any("mtp1" in node.name for node in deepseek.model.graph(deepseek.model.head).nodes)
    nemotron = nvidia_dgxc.row_request(
        row(name, model="nemotron4-340b", vp="1")
    )  # NA in the table, 12 in launch.sh
    assert (nemotron.pipeline.chunks, nemotron.pipeline.stages) == (12, 96)
    assert nvidia_dgxc.row_issue(row(name, model="nemotron4-340b", gpu="GB200")) == "graph"
    large = row(name, model="llama3-70b (MaxText FSDP)", gpus="2048")
    assert nvidia_dgxc.row_request(large).mesh.degree("dp_shard") == 128
    assert (nvidia_dgxc.row_issue(large), nvidia_dgxc.group(large)) == ("compiled", "dense bf16")


def test_submissions_to_mlperf() -> None:
    name = "mlperf_gpt3_llama405b"
    case = row(name, system="carina_ngpu512_ngc25.04_nemo")
    request = mlperf_pretraining.row_request(case)
    assert count_parameters(request.model) == 405_853_388_800 - 2 * (128256 - 32000) * 16384
    assert degrees(request) == {"pp": 8, "dp": 8, "cp": 2, "tp": 4}
    assert (request.mesh.world, request.batch, request.micro_batches) == (512, 896, 112)
    assert request.placement is not None
    assert request.placement[:8] == tuple(range(8))  # tp, cp
    assert request.placement[8] == 64  # the next of dp is behind all stages
    assert (mlperf_pretraining.row_issue(case), mlperf_pretraining.row_system(case)) == ("graph", "gb200")
    old = row(name, release="v3.0", num_accelerators="768")
    request = mlperf_pretraining.row_request(old)
    assert (request.sizes["vocab"], request.micro_batches, request.pipeline.chunks) == (50688, 128, 12)
    assert (request.strategy.fp8, request.strategy.fp8_param_gather) == ("delayed", False)
    assert (request.strategy.tp_overlap_chunks, request.placement) == (1, None)
    assert mlperf_pretraining.measured_seconds(row(name, release="v4.0", pp="6")) == 0.9216


def test_prediction_is_the_arithmetic_of_the_model_where_nothing_else_takes_time() -> None:
    """All layers four times a micro-batch (two forwards), the head three times; half the pairs under the mask."""
    values = {"hidden_size": "1024", "tensor_parallelism": "1", "pipeline_parallelism": "1"}
    case = row("vtrain_ground_truth_single", **values)
    layers, batch, dp = (int(case[column]) for column in ("# layers", "global batch", "data parallelism"))
    h, s, vocab = 1024, 1024, 50304
    layer, head = 24 * s * h**2 + 2 * s**2 * h, 2 * s * h * vocab
    system = load_system(vtrain_single.row_system(case))
    seconds = predict_seconds(vtrain_single.row_request(case), system, Arithmetic(system))
    assert seconds * system.peak("bf16") == pytest.approx(
        batch / dp * (4 * layers * layer + 3 * head), rel=1e-6
    )


def test_errors_are_grouped_and_summed_up() -> None:
    name = "nvidia_dgxc_benchmarking_step_times"
    rows = [case for case in published_rows(name) if case["model"] in {"nemotron4-15b", "llama3-8b LoRA"}]
    made: list[tuple[str, str]] = []

    def make(system: System, issue: str) -> Arithmetic:
        made.append((system.name, issue))
        return Arithmetic(system, issue)

    found = time_accuracy(name, rows, make)
    assert made == [("h100", "eager")]
    assert found.left_out == {"a model outside the zoo (adapters)": 5}
    assert len(found.rows) == len(rows) - 5
    bf16 = [abs(one.predicted / one.measured - 1) for one in found.rows if one.group == "dense bf16"]
    assert found.groups["dense bf16"] == {
        "cases": 5,
        "median": sorted(bf16)[2],
        "mean": pytest.approx(sum(bf16) / 5),
        "worst": max(bf16),
    }
    assert all(one.error < 0 for one in found.rows if one.group == "dense bf16")  # no run is above the peak
    assert TimeAccuracy((), {}).groups == {}


def test_a_row_that_is_no_job_is_left_out_with_what_is_said_of_it() -> None:
    name = "vtrain_ground_truth_single"
    odd = {**published_rows(name)[0], "# layers": "23"}
    found = time_accuracy(name, [odd], Arithmetic)
    (why,) = found.left_out
    assert not found.rows
    assert why.startswith("no job of this tool: 23 layers of gpt3-175b do not divide by pp = 2")


@pytest.mark.parametrize("name", TIME_SETS)
def test_a_column_that_is_missing_is_named(name: str) -> None:
    told = time_set(name).rows
    case = next(case for case in cases(name) if told.left_out(case) is None)
    told.row_request(case)
    with pytest.raises(StageError, match=r"^column '.+' is missing; this set has it") as caught:
        told.row_request({"case": case["case"]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cell", ["", "fast", "0", "-3", "nan", "inf"])
def test_a_measurement_is_a_number_above_0(cell: str) -> None:
    case = {**cases("vtrain_ground_truth_single")[0], "iteration time (ms)": cell}
    with pytest.raises(StageError, match=f"is {cell!r}, where a number above 0 is needed; correct the row"):
        vtrain_single.measured_seconds(case)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(
        StageError, match="set 'mlperf' has no step times; choose one of korthikanti2022_table5_e2e, "
    ):
        time_accuracy("mlperf", [], Arithmetic)


def test_a_model_or_machine_that_nobody_knows_is_left_out() -> None:
    case = cases("mosaic_llmfoundry_mpt_fsdp_a100_h100")[0]
    assert mosaic_mpt.left_out({**case, "Model": "200b"}) == "a model outside the zoo"
    assert mosaic_mpt.left_out({**case, "GPU": "mi250"}) == "a machine outside the systems"
    case = row("mlperf_gpt3_llama405b", system="carina_ngpu512_ngc25.04_nemo")
    assert mlperf_pretraining.left_out({**case, "accelerator": "MI325X"}) == "a machine outside the systems"
