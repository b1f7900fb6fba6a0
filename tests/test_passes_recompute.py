"""Recomputation: golden texts, what is no longer saved, and what runs again."""

from collections import Counter
from collections.abc import Callable

import pytest

from stage.graph import format_graph
from stage.passes.backward import Differentiated
from stage.passes.recompute import recompute
from stage.recomputation import parse_recomputation
from stage.request import Request
from stage.synthesis import sharded_block
from tests.small import MODELS, request


def layer(job: Request) -> Differentiated:
    return sharded_block(job, job.model.layers[-1])


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_a_layer_is_recomputed_as_written_down(
    policy: str, attention: str, golden: Callable[[str, str], None]
) -> None:
    pair = layer(request("llama3-8b", "megatron_sp", tp=2, recompute=policy, attention=attention))
    golden(f"recompute/llama-{policy}-{attention}.txt", f"{format_graph(pair.backward)}\n")


@pytest.mark.parametrize("model", MODELS)
def test_full_keeps_the_input_alone(model: str) -> None:
    pair = layer(request(model, "megatron", tp=2, recompute="full"))
    assert pair.saved == ("x",)
    again = Counter(n.op for n in pair.backward.nodes if n.phase == "recompute")
    assert again == Counter(n.op for n in pair.forward.nodes)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_selective_runs_the_core_again_and_keeps_less(model: str, attention: str) -> None:
    plain, less = (
        layer(request(model, "megatron", tp=2, attention=attention, recompute=policy))
        for policy in ("none", "selective")
    )
    again = [n.name for n in less.backward.nodes if n.phase == "recompute"]
    assert again
    assert all(".core" in name for name in again)
    assert set(less.saved) < set(plain.saved) | {"attn.q_rope", "attn.k_rope", "attn.v_proj"}
    if attention == "unfused":
        assert "attn.core.softmax" in plain.saved
        assert "attn.core.softmax" not in less.saved


def test_recomputed_nodes_stand_before_what_reads_them() -> None:
    for policy in ("full", "selective"):
        pair = layer(request("deepseek-v3", "megatron_sp", tp=2, recompute=policy, attention="unfused"))
        pair.backward.check()


def test_forward_is_left_as_it_is() -> None:
    pair = layer(request("llama3-8b", "megatron_sp", tp=2))
    for policy in ("full", "selective", "ops:norm"):
        assert recompute(pair, parse_recomputation(policy)).forward is pair.forward


def test_embedding_and_head_are_never_recomputed() -> None:
    job = request("llama3-8b", "megatron_sp", tp=2, recompute="full")
    for block in (job.model.embedding, job.model.head):
        assert not any(n.phase == "recompute" for n in sharded_block(job, block).backward.nodes)
