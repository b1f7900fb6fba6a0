"""Every model under every strategy on several meshes: the trace set verifies."""

from typing import Any

import pytest

from stage.catalog import list_models, list_strategies
from stage.synthesis import job
from stage.trace.verify import verify
from stage.traceset import TraceSet
from tests.small import MODELS, PRESETS, STRATEGIES, fits, name_of, request

MESHES: list[dict[str, Any]] = [
    {"dp": 4, "batch": 8},
    {"pp": 2, "dp": 2, "batch": 8},
    {"pp": 2, "dp": 2, "cp": 2, "schedule": "gpipe", "batch": 8},
    {"dp": 2, "tp": 4, "grad_reduce": "microbatch", "batch": 4},
    {"pp": 2, "cp": 2, "tp": 2, "recompute": "full", "batch": 4},
    {"dp": 4, "ep": 2, "steps": 2},
    {"pp": 2, "dp": 2, "tp": 2, "ep": 2, "dropout": True, "batch": 8},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "recompute": "selective"},
    {"dp": 2, "tp": 2, "ep": 4, "zero": 1, "steps": 2, "attention": "unfused"},
    {"dp": 2, "cp": 2, "tp": 2, "ep": 8, "sizes": {"experts": 8}, "mask": "full"},
]


def legal(model: str, strategy: str, options: dict[str, Any]) -> bool:
    axes = ("dp", "cp", "tp", "ep", "etp")
    return fits(model, strategy, {axis: options[axis] for axis in axes if axis in options})


CASES = [
    (model, strategy, options)
    for model in MODELS
    for strategy in STRATEGIES
    for options in MESHES
    if legal(model, strategy, options)
]


@pytest.mark.parametrize(("model", "strategy", "options"), CASES, ids=name_of)
def test_the_trace_set_verifies(model: str, strategy: str, options: dict[str, Any]) -> None:
    report = verify(TraceSet.of(job(request(model, strategy, **options))))
    assert report.defects == ()
    assert report.unchecked == ()


def test_every_model_and_strategy_is_here() -> None:
    assert {model for model, _, _ in CASES} == set(MODELS)
    assert {strategy for _, strategy, _ in CASES} == set(STRATEGIES)
    assert len(CASES) > 200


def test_every_family_of_the_catalog_and_every_strategy_is_here() -> None:
    files = {entry.file for entry in list_models()}
    assert {entry.file for entry in list_models() if entry.name in MODELS} == files
    assert {strategy.name for strategy in list_strategies()} == {*STRATEGIES, *PRESETS}


PRESET_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek-v3", "deepseek_v3", {"pp": 2, "dp": 2, "ep": 2, "batch": 8, "sizes": {"layers": 4}}),
    ("gpt3-125m", "gpt3_175b", {"pp": 2, "tp": 2, "dp": 2, "batch": 8, "sizes": {"layers": 4}}),
    ("llama3-8b", "llama3_405b", {"pp": 2, "cp": 2, "tp": 2, "dp": 2, "batch": 8, "sizes": {"layers": 4}}),
    ("llama3-8b", "torchtitan", {"pp": 2, "dp": 2, "tp": 2, "batch": 4}),
    ("mixtral-8x7b", "torchtitan", {"dp": 2, "tp": 2, "cp": 2}),
    ("llama3-8b", "zero2", {"dp": 4, "cp": 2, "batch": 8}),
]


@pytest.mark.parametrize(("model", "strategy", "options"), PRESET_CASES, ids=name_of)
def test_presets_verify(model: str, strategy: str, options: dict[str, Any]) -> None:
    report = verify(TraceSet.of(job(request(model, strategy, **options))))
    assert report.defects == ()
    assert report.unchecked == ()
