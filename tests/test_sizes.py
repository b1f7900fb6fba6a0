"""Sizes and model files that can not be are refused in one line, before anything is built."""

from pathlib import Path

import pytest

import stage
from stage.errors import ModelError, StageError
from stage.sizes import build_model

HEADER = "from stage import Model\n"


@pytest.mark.parametrize(
    ("model", "sizes", "text"),
    [
        ("llama3-8b", {"layers": 10**12}, "size 'layers' of llama3-8b is more than 16384"),
        ("llama3-8b", {"d_model": 10**400}, "size 'd_model' of llama3-8b is more than 1000000000000"),
        ("llama3-8b", {"heads": 9}, "heads = 9 of llama3-8b does not divide by kv_heads = 8"),
        ("llama3-8b", {"kv_heads": 3}, "heads = 32 of llama3-8b does not divide by kv_heads = 3"),
        ("mixtral-8x7b", {"top_k": 9}, "top_k = 9 of mixtral-8x7b is more than its 8 experts"),
    ],
)
def test_sizes_that_can_not_be(model: str, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ModelError) as caught:
        stage.synthesize(model, gpus=1, seq=8, sizes=sizes)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("def model(name, sizes):\n    raise RuntimeError('x\\ny')\n", "RuntimeError: x y"),
        ("def model(name, sizes):\n    return 1\n", "model() returns int; return a stage.Model"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_model_file_that_fails_is_its_authors_mistake(tmp_path: Path, body: str, text: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEADER + body)
    with pytest.raises(StageError) as caught:
        stage.synthesize(file, gpus=1)
    assert text in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float"])
def test_dtypes_are_those_of_floating_point(dtype: str) -> None:
    with pytest.raises(StageError, match=f"^dtype is '{dtype}'; choose one of bf16, "):
        stage.synthesize("llama3-8b", gpus=1, dtype=dtype)


def test_a_node_beyond_64_bits_is_named() -> None:
    with pytest.raises(StageError, match=r"has bytes = .*, which no trace can hold"):
        stage.synthesize("llama3-8b", gpus=1, seq=10**15)


def test_an_inner_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(StageError, match=r"^dp_shard = 3 does not divide dp = 2"):
        stage.synthesize("llama3-8b", "hsdp", gpus=2, dp_shard=3)


def test_dropout_leaves_attention_fused() -> None:
    traces = stage.synthesize("llama3-8b", gpus=1, batch=1, seq=64, dropout=True, sizes={"layers": 1})
    ops = [node.get("op") for node in traces.nodes(0)]
    assert "attention" in ops
    assert "dropout" in ops
    assert "attention_softmax" not in ops


def test_a_table_of_positions_is_read_by_rows() -> None:
    traces = stage.synthesize("gpt3-125m", gpus=1, batch=1, seq=64, sizes={"layers": 1})
    node = next(n for n in traces.nodes(0) if ".position/forward" in n.name)
    assert node.get("tensor_size") == 3 * 64 * 768 * 2  # x and its rows of the table in, their sum out


def test_multi_head_attention_stays_so_when_heads_are_set() -> None:
    model, _ = build_model("gpt3-175b", {"heads": 48})
    assert model.values["kv_heads"] == 48
    grouped, _ = build_model("llama3-8b", {"heads": 48})
    assert grouped.values["kv_heads"] == 8
