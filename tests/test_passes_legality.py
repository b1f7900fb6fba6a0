"""Every node of every sharded graph runs locally by the op table, and every cotangent lies as the dual of its primal."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from stage.graph import Graph
from stage.layout import Layout
from stage.model import Block
from stage.passes.backward import Differentiated
from stage.request import Request
from stage.synthesis import sharded_block, symbol_values
from tests.executor import Executor
from tests.legality import Checker
from tests.small import CASES, name_of, request

OPTIONS: list[dict[str, Any]] = [
    {},
    {"recompute": "full", "attention": "unfused"},
    {"recompute": "selective", "dropout": True},
]


def checker(job: Request) -> Checker:
    return Checker(job.mesh, Executor(job.mesh, symbol_values(job), np.random.default_rng(0)))


def blocks(job: Request) -> Iterator[tuple[Block, Differentiated]]:
    for block in dict.fromkeys(job.model.blocks):
        yield block, sharded_block(job, block)


def duals(both: Differentiated, atoms: tuple[str, ...]) -> list[str]:
    """Cotangents that do not lie as the dual of their primal."""
    found = []
    for name, layout in both.backward.layouts.items():
        primal = name.removeprefix("d.")
        if primal not in both.forward.layouts:
            primal = re.sub(r"\.\d+$", "", primal)
        known = both.forward.layouts.get(primal) if name.startswith("d.") else None
        if known is not None and layout != known.dual(atoms):
            found.append(name)
    return found


@pytest.mark.parametrize(("model", "strategy", "mesh"), CASES, ids=name_of)
def test_every_node_is_legal(model: str, strategy: str, mesh: dict[str, int]) -> None:
    job = request(model, strategy, **mesh, **OPTIONS[CASES.index((model, strategy, mesh)) % len(OPTIONS)])
    check = checker(job)
    for _, both in blocks(job):
        assert [*check.defects(both.forward), *check.defects(both.backward)] == []
        assert duals(both, job.mesh.names) == []


def without(graph: Graph, name: str) -> Graph:
    """The graph whose readers of a reshard read what it reshards."""
    node = next(n for n in graph.nodes if n.name == name)
    other = {node.outputs[0]: node.inputs[0]}
    nodes = (
        replace(n, inputs=tuple(other.get(x, x) for x in n.inputs)) for n in graph.nodes if n.name != name
    )
    return replace(graph, nodes=tuple(nodes))


@cache
def planted() -> list[tuple[Request, Graph, str]]:
    found = []
    for model, strategy, mesh in (
        ("qwen3-8b", "megatron", {"tp": 4}),
        ("mixtral-8x7b", "megatron_sp", {"dp": 2, "tp": 2, "ep": 2}),
    ):
        job = request(model, strategy, **mesh)
        for _, both in blocks(job):
            for graph in (both.forward, both.backward):
                readers = graph.consumers()
                found += [
                    (job, graph, n.name) for n in graph.nodes if "step" in n.attrs and n.outputs[0] in readers
                ]
    return found


def test_the_check_notices_every_missing_reshard() -> None:
    assert len(planted()) > 30
    for job, graph, name in planted():
        assert list(checker(job).defects(without(graph, name))), f"{graph.name} without {name} passes"


def test_the_check_notices_a_wrong_layout() -> None:
    job = request("llama3-8b", "megatron", tp=2, dp=2)
    for _, both in blocks(job):
        for name in (n.outputs[0] for n in both.forward.nodes):
            layout = both.forward.layouts[name]
            wrong = (
                Layout(layout.dims, frozenset(), frozenset()) if layout.invariant or layout.pending else None
            )
            if wrong is not None:
                changed = replace(both.forward, layouts={**both.forward.layouts, name: wrong})
                assert list(checker(job).defects(changed)), f"{name} as {wrong} passes"
