"""Blocks as text: the forward graph of a layer and the backward graph that is derived from it."""

from collections.abc import Callable

import pytest

from stage.graph import Options, format_graph
from stage.passes.backward import differentiate
from stage.sizes import build_model

CASES = [
    ("llama3-8b", "layer", Options()),
    ("gpt3-175b", "layer", Options()),
    ("gpt-oss-20b", "sliding", Options(attention="unfused")),
    ("deepseek-v3", "moe", Options()),
    ("llama3-8b", "head", Options()),
]


@pytest.mark.parametrize(("name", "kind", "options"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_block_and_its_derivative(
    name: str, kind: str, options: Options, golden: Callable[[str, str], None]
) -> None:
    model, _ = build_model(name, options=options)
    block = next(block for block in model.blocks if block.kind == kind)
    both = differentiate(model.graph(block))
    golden(f"{name}-{kind}.txt", f"{format_graph(both.forward)}\n\n{format_graph(both.backward)}\n")
