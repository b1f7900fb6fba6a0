"""Estimates of whole jobs: what they hold, what bounds them, and what can only make them faster."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.cli import main
from stage.cost.plugins import load_cost_model
from stage.cost.pricing import price_job
from stage.cost.spread import job_spread
from stage.cost.system import System
from stage.cost.system_file import load_system
from stage.errors import StageError
from stage.estimate import estimate
from stage.request import resolve_request
from stage.synthesis import job

Capture = pytest.CaptureFixture[str]
JOB: dict[str, Any] = {"gpus": 16, "tp": 2, "pp": 2, "batch": 32, "seq": 2048, "sizes": {"layers": 4}}


def found(system: System | str = "h100", **options: Any) -> dict[str, Any]:
    return estimate("llama3-8b", system=system, **{**JOB, **options})


def test_the_parts_of_a_step_add_up() -> None:
    report = found()
    parts = ("compute_seconds", "exposed_communication_seconds", "bubble_seconds")
    assert sum(report[name] for name in parts) == pytest.approx(report["step_seconds"])
    assert report["bubble_fraction"] == pytest.approx(report["bubble_seconds"] / report["step_seconds"])
    for each in report["classes"]:
        parts = ("compute_seconds", "exposed_seconds", "bubble_seconds")
        assert sum(each[name] for name in parts) == pytest.approx(report["step_seconds"])
    assert report["tokens_per_second_per_gpu"] * report["step_seconds"] * 16 == pytest.approx(32 * 2048)


def test_mfu_counts_the_model_and_hfu_what_is_run() -> None:
    """Against the closed form of Llama: 6 FLOPs a parameter of the products and token, and attention's."""
    report = found(recompute="full")
    d, ff, vocab, layers, seq, tokens = 4096, 14336, 128256, 4, 2048, 32 * 2048
    products = layers * (2 * d * d + 2 * d * d // 4 + 3 * d * ff) + vocab * d
    attention = layers * 2 * 2 * d * (seq + 1) / 2
    model = tokens * 3 * (2 * products + attention)
    could = report["step_seconds"] * 16 * load_system("h100").peak("bf16")
    assert report["mfu"] == pytest.approx(model / could, rel=1e-3)
    again = tokens * (2 * (products - vocab * d) + attention)
    fused = tokens * attention / 2  # a fused backward makes the scores again
    assert report["hfu"] == pytest.approx((model + again + fused) / could, rel=1e-3)


def test_several_steps_are_averaged() -> None:
    one, two = found(clip=False), found(clip=False, steps=2)
    assert two["step_seconds"] == pytest.approx(one["step_seconds"], rel=0.02)
    assert two["mfu"] == pytest.approx(one["mfu"], rel=0.02)


def test_a_small_model_is_as_fast_as_its_host() -> None:
    sizes = {"layers": 2, "d_model": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "d_ff": 128, "vocab": 512}
    options: dict[str, Any] = {"gpus": 1, "batch": 1, "seq": 32, "sizes": sizes}
    system = load_system("a100-80gb-sxm")
    assert system.framework_op
    kernels = sum(
        node.is_compute
        for t in job(resolve_request("llama3-8b", **options)).programs[0].templates
        for node in t.nodes
    )
    took = estimate("llama3-8b", system=system, **options)["step_seconds"]
    assert took >= kernels * system.framework_op
    faster = replace(system, framework_op=system.framework_op / 2)
    assert estimate("llama3-8b", system=faster, **options)["step_seconds"] < took


@settings(max_examples=10, deadline=None)
@given(st.floats(1, 4), st.floats(1, 4), st.floats(1, 4))
def test_a_better_system_is_never_slower(compute: float, memory: float, network: float) -> None:
    system = load_system("h100")
    better = replace(
        system,
        matrix_flops={dtype: compute * peak for dtype, peak in system.matrix_flops.items()},
        matrix_flops_per_clock={},
        memory_bandwidth=memory * system.memory_bandwidth,
        tiers=tuple(replace(tier, bandwidth=network * tier.bandwidth) for tier in system.tiers),
    )
    made = job(resolve_request("llama3-8b", **JOB))
    before, after = (
        price_job(made, load_cost_model("roofline", one), job_spread(one, made)) for one in (system, better)
    )
    assert all(after.kernels[key] <= seconds * (1 + 1e-9) for key, seconds in before.kernels.items())
    assert all(after.exchanges[key] <= seconds * (1 + 1e-9) for key, seconds in before.exchanges.items())


def test_the_command_prints_what_there_is(capsys: Capture) -> None:
    line = "estimate llama3-8b --gpus 8 --tp 2 --batch 8 --seq 4096 --system h100 --set layers=2"
    assert main([*line.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    wanted = {
        *(
            "step_seconds",
            "peak_memory_bytes",
            "tokens_per_second_per_gpu",
            "mfu",
            "exposed_communication_seconds",
        ),
        "bubble_fraction",
    }
    assert wanted <= report.keys()
    assert main(line.split()) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_job_that_does_not_fit_is_said_to(capsys: Capture) -> None:
    line = "estimate llama3-70b --gpus 8 --batch 8 --seq 4096 --system h100 --set layers=20"
    assert main(line.split()) == 0
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"system": "h1000"}, "there is no system 'h1000'"),
        ({"system": "h100", "cost": "guess"}, "there is no cost model 'guess'"),
        ({"system": "a100-80gb-sxm", "dtype": "fp8"}, "has no peak for fp8"),
    ],
)
def test_what_can_not_be_estimated_is_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(StageError, match=text) as caught:
        estimate("llama3-8b", **{**JOB, **options})
    assert "\n" not in str(caught.value)


def test_published_rows_are_predicted(capsys: Capture) -> None:
    assert main(["bench-accuracy", "--set", "simumax_b200_real_vs_perf", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["sets"]
    assert len(found["rows"]) == 30
    for row in found["rows"]:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    (group,) = found["groups"]
    errors = sorted(abs(row["error"]) for row in found["rows"])
    assert group["mean"] == pytest.approx(sum(errors) / 30)
    assert group["worst"] == errors[-1] < 0.4


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--set nothing", "set 'nothing' has no step times"),
        ("--rows rows.csv", "give --set too"),
        ("--rows nowhere.csv --set korthikanti2022_table5_e2e", "nowhere.csv"),
    ],
)
def test_rows_that_can_not_be_read_are_one_line(capsys: Capture, line: str, text: str) -> None:
    assert main(["bench-accuracy", *line.split()]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_rows_that_are_no_text_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "rows.csv").write_bytes(b"case,model\n\xff\xfe,x\n")
    line = f"bench-accuracy --set korthikanti2022_table5_e2e --rows {tmp_path / 'rows.csv'}"
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert "not a CSV file in UTF-8" in error
    assert error.count("\n") == 1
