"""Ring attention, exchanged heads and both compute what one device does, forward and backward."""

from typing import Any

import pytest

from tests.small import name_of
from tests.test_numerics import compare

HEADS = {"heads": 8, "kv_heads": 8}
GROUPED = {"heads": 8, "kv_heads": 2}

CASES: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("ring", {"cp": 2}, {}),
    ("ring", {"cp": 4}, {}),
    ("ring", {"cp": 4, "tp": 2}, {}),
    ("ring", {"cp": 2, "dp": 2, "tp": 2}, {}),
    ("ring", {"cp": 2, "tp": 4}, {}),
    ("ring", {"cp": 8}, {}),
    ("ulysses", {"cp": 2}, {}),
    ("ulysses", {"cp": 4}, {}),
    ("ulysses", {"cp": 2, "tp": 2}, {}),
    ("ulysses", {"cp": 4, "tp": 2}, HEADS),
    ("ulysses", {"cp": 4, "tp": 2}, GROUPED),
    ("ulysses", {"cp": 4}, GROUPED),
    ("ulysses", {"cp": 2, "tp": 4}, GROUPED),
    ("ulysses", {"cp": 2, "dp": 2, "tp": 2}, HEADS),
    ("ring:2x2", {"cp": 4}, {}),
    ("ring:2x2", {"cp": 4, "tp": 2}, GROUPED),
    ("ring:2x4", {"cp": 8}, GROUPED),
    ("ring:4x2", {"cp": 8}, HEADS),
]


@pytest.mark.parametrize(("context", "mesh", "sizes"), CASES, ids=name_of)
def test_blocks_compute_the_same(context: str, mesh: dict[str, int], sizes: dict[str, int]) -> None:
    compare("llama3-8b", "megatron_sp", mesh, context=context, sizes=sizes)


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
@pytest.mark.parametrize("context", ["ring", "ulysses", "ring:2x2"])
def test_under_other_strategies_as_well(strategy: str, context: str) -> None:
    compare(
        "llama3-8b",
        strategy,
        {"cp": 4} | ({"tp": 2} if strategy == "megatron" else {}),
        context=context,
        sizes=HEADS,
    )


FAMILIES = ("gpt3-125m", "qwen3-8b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x7b")


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize(
    ("context", "mesh"),
    [("ring", {"cp": 4}), ("ulysses", {"cp": 2, "tp": 2}), ("ring:2x2", {"cp": 4})],
    ids=name_of,
)
def test_every_family_does(model: str, context: str, mesh: dict[str, int]) -> None:
    """Windows, sinks, latent attention, learned positions and experts beside it."""
    compare(model, "megatron_sp", mesh, context=context)


@pytest.mark.parametrize("context", ["ring", "ulysses", "ring:2x2"])
@pytest.mark.parametrize(
    "options", [{"recompute": "full"}, {"recompute": "selective"}, {"mask": "full"}], ids=name_of
)
def test_with_recomputation_and_without_a_mask(context: str, options: dict[str, Any]) -> None:
    compare("gpt-oss-20b", "megatron_sp", {"cp": 4, "tp": 1}, context=context, **options)


@pytest.mark.parametrize("context", ["ring", "ring:2x2"])
@pytest.mark.parametrize("model", ["llama3-8b", "gpt-oss-20b"])
def test_consecutive_parts_of_the_sequence_go_round_as_well(model: str, context: str) -> None:
    compare(model, "megatron_sp", {"cp": 4}, context=context, context_balance="none")


def test_unfused_attention_exchanges_heads() -> None:
    for options in ({}, {"dropout": True}, {"recompute": "selective"}):
        compare(
            "gpt-oss-20b",
            "megatron_sp",
            {"cp": 2, "tp": 2},
            context="ulysses",
            attention="unfused",
            **options,
        )
