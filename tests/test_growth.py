"""Work does not grow where it must not: counted, not timed.

Symbols are handled once for each kind of block, templates encoded once for each way they are connected, and a rank
is a copy of its class's bytes, however many layers, micro-batches and ranks there are.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
from sympy.core.cache import clear_cache

import stage.block_graphs
import stage.symbols
import stage.synthesis
import stage.trace.concrete
import stage.trace.expand
import stage.trace.job
import stage.trace.kind
import stage.trace.stage_program
from stage.synthesis import synthesize
from stage.trace.classes import RankClasses
from stage.trace.verify_rank import RankReader
from stage.traceset import TraceSet
from stage.verification import verify_set

SIZES = {"d_model": 256, "d_ff": 512, "heads": 16, "kv_heads": 16, "head_dim": 16, "vocab": 512}
COUNTED = {
    "expressions made exact": (stage.trace.concrete, "exact"),
    "blocks sharded": (stage.block_graphs, "shard"),
    "blocks differentiated": (stage.block_graphs, "differentiate"),
    "blocks lowered": (stage.trace.kind, "lower"),
    "templates encoded": (stage.trace.expand, "encode_template"),
    "stages assembled": (stage.synthesis, "stage_program"),
    "actions recorded": (stage.trace.stage_program, "record_action"),
    "classes expanded": (stage.trace.job, "expand"),
}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each step of synthesis has run, and how many sums and products sympy has made."""
    found: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found[name] += 1
            return function(*args, **options)

        return call

    for name, (module, attribute) in COUNTED.items():
        monkeypatch.setattr(module, attribute, counting(name, getattr(module, attribute)))
    for kind in (sympy.Add, sympy.Mul):
        flatten = counting("sympy operations", kind.flatten)
        monkeypatch.setattr(kind, "flatten", staticmethod(flatten))
    return found


def work(counts: Counter[str], **options: Any) -> Counter[str]:
    """What synthesis of a job and of one rank of each class takes."""
    clear_cache()  # sympy keeps the results of earlier work
    counts.clear()
    sizes = {**SIZES, "layers": options.pop("layers", 8), **options.pop("more", {})}
    traces = synthesize(options.pop("model", "llama3-8b"), sizes=sizes, seq=64, **options)
    for number in range(traces.classes.count):
        traces.classes.image(number)
    return Counter(counts)


JOB = {"dp": 2, "tp": 2, "pp": 4, "batch": 16}
"""Eight micro-batches: a pipeline that is filled, runs in turns and drains."""


@pytest.mark.parametrize("strategy", [None, "fsdp"])
@pytest.mark.parametrize(
    "more",
    [
        {"layers": 64},
        {"batch": 512},
        {"dp": 64, "batch": 512},
        {"layers": 32, "batch": 128, "steps": 1},
    ],
    ids=["layers", "micro-batches", "ranks", "layers and micro-batches"],
)
def test_symbols_and_templates_are_handled_once(
    counts: Counter[str], more: dict[str, int], strategy: str | None
) -> None:
    job = {**JOB, "tp": 1} if strategy else JOB
    before = work(counts, strategy=strategy, **job)
    assert all(before[name] for name in COUNTED)
    assert work(counts, strategy=strategy, **{**job, **more}) == before


def test_blocks_are_handled_once_for_each_kind(counts: Counter[str]) -> None:
    found = work(counts, **JOB)
    assert found["blocks sharded"] == found["blocks lowered"] == 3, "embedding, layer, head"
    assert found["stages assembled"] == found["classes expanded"] == 4


def test_layers_are_lowered_once_for_each_place_of_unequal_work(counts: Counter[str]) -> None:
    job = {**JOB, "cp": 4, "context_balance": "none"}
    found = work(counts, **job)
    assert found["blocks sharded"] == found["blocks differentiated"] == 3, "embedding, layer, head"
    assert found["blocks lowered"] == 2 + 4
    assert found["stages assembled"] == found["classes expanded"] == 4 * 4
    assert work(counts, **{**job, "dp": 64, "batch": 512, "layers": 32}) == found


def test_windows_that_see_alike_are_encoded_once(counts: Counter[str]) -> None:
    """Behind the first window every query sees as many keys: two kinds of ranks, however many parts."""
    job = {"model": "mistral-7b", "context_balance": "none", "batch": 1}
    few, many = (work(counts, **job, cp=cp, more={"window": 8}) for cp in (2, 8))
    assert many["blocks lowered"] == 2 + 8
    assert many["templates encoded"] - few["templates encoded"] == 6 * 4, "data-parallel work of each class"


def test_a_stage_more_encodes_its_messages_and_its_data_parallel_work(counts: Counter[str]) -> None:
    few, many = work(counts, **JOB), work(counts, **{**JOB, "pp": 8, "batch": 32})
    assert few["expressions made exact"] == many["expressions made exact"]
    assert many["templates encoded"] - few["templates encoded"] <= 4 * 9
    assert many["classes expanded"] == 8


def test_buckets_of_one_size_are_one_template(counts: Counter[str]) -> None:
    options = {**JOB, "pp": 1, "batch": 2, "bucket_size": 300_000}
    few = work(counts, **{**options, "layers": 16})["templates encoded"]
    assert work(counts, **{**options, "layers": 160})["templates encoded"] == few


def test_a_rank_is_a_copy_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,096 ranks the first of each class makes an image, every other one copies it and sets its own bytes."""
    made: list[int] = []
    image = RankClasses.image

    def counted(self: RankClasses, number: int) -> Any:
        made.extend([number] * (number not in self._images))
        return image(self, number)

    monkeypatch.setattr(RankClasses, "image", counted)
    traces = synthesize("llama3-8b", sizes={**SIZES, "layers": 8}, seq=64, dp=512, tp=2, pp=4, batch=2048)
    own = [own_bytes(traces, number) for number in range(4)]
    made.clear()
    first = {number: np.frombuffer(traces.rank(number * 1024), np.uint8) for number in range(4)}
    for rank in (1, 1023, 1024, 2500, 4095):
        data = np.frombuffer(traces.rank(rank), np.uint8)
        number = traces.classes.of(rank)
        assert data.size == first[number].size
        assert np.count_nonzero(data != first[number]) <= own[number]
    assert made == []


def own_bytes(traces: TraceSet, number: int) -> int:
    """The bytes that ranks of a class have for themselves."""
    image = traces.classes.image(number)
    return sum(rows.size for rows in image.groups.values()) + 3 * sum(at.size for at in image.peers.values())


@pytest.mark.parametrize("dp", [2, 64])
def test_a_proof_decodes_one_rank_a_class(monkeypatch: pytest.MonkeyPatch, dp: int) -> None:
    read: list[int] = []
    reader = RankReader.read

    def counted(self: RankReader, rank: int, data: bytes) -> Any:
        read.append(rank)
        return reader(self, rank, data)

    monkeypatch.setattr(RankReader, "read", counted)
    sizes = {**SIZES, "layers": 4}
    traces = synthesize("llama3-8b", sizes=sizes, seq=64, dp=dp, tp=2, pp=2, batch=2 * dp)
    assert verify_set(traces).ok
    assert read == [0, 2 * dp]
    read.clear()
    uneven = synthesize(
        "llama3-8b", sizes=sizes, seq=64, dp=dp, cp=2, pp=2, batch=2 * dp, context_balance="none"
    )
    assert verify_set(uneven).ok
    assert read == [0, 1, 2 * dp, 2 * dp + 1]
