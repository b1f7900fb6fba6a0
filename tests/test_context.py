"""Context parallel trace sets: they verify, their messages have tags of their own, and orders agree on all ranks."""

from collections import defaultdict
from typing import Any

import pytest

import stage
from stage.errors import StageError
from stage.strategy import parse_strategy
from stage.trace.capacity import check_tags
from stage.trace.limits import TAG_LIMIT
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from tests.small import MODELS, name_of, request

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama3-8b", "ring", {"cp": 2}),
    ("llama3-8b", "ring", {"cp": 4, "tp": 2}),
    ("llama3-8b", "ring", {"cp": 2, "tp": 4}),  # KV heads fewer than tp
    ("llama3-8b", "ring", {"cp": 4, "dp": 2, "strategy": "fsdp"}),
    ("llama3-8b", "ring", {"cp": 2, "pp": 2, "batch": 4, "steps": 2}),
    ("llama3-8b", "ring", {"cp": 2, "pp": 2, "batch": 4, "schedule": "zb-h1", "recompute": "full"}),
    ("llama3-8b", "ring", {"cp": 4, "pp": 2, "batch": 4, "schedule": "gpipe", "strategy": "megatron"}),
    ("gpt-oss-20b", "ring", {"cp": 4, "dp": 2, "ep": 4, "recompute": "selective"}),
    (
        "deepseek-v3",
        "ring",
        {"cp": 2, "tp": 2, "pp": 2, "batch": 4, "sizes": {"layers": 4}, "schedule": "zb-v"},
    ),
    ("llama3-8b", "ring", {"cp": 2, "pp": 2, "batch": 4, "sizes": {"layers": 4}, "schedule": "dualpipe-v"}),
    ("llama3-8b", "ring", {"cp": 2, "pp": 2, "batch": 4, "sizes": {"layers": 4}, "schedule": "interleaved"}),
    ("llama3-8b", "ulysses", {"cp": 4}),
    ("llama3-8b", "ulysses", {"cp": 2, "tp": 2, "pp": 2, "batch": 4, "schedule": "zb-h1"}),
    ("gpt-oss-20b", "ulysses", {"cp": 4, "recompute": "selective", "attention": "unfused"}),
    ("deepseek-v3", "ulysses", {"cp": 2, "tp": 2, "ep": 4, "recompute": "full"}),
    ("llama3-8b", "ring:2x2", {"cp": 4, "pp": 2, "batch": 4}),
    ("llama3-8b", "ring:2x2", {"cp": 4, "tp": 2, "recompute": "selective"}),
    ("llama3-8b", "ring:2x4", {"cp": 8, "recompute": "full"}),
    ("gpt-oss-20b", "ring:4x2", {"cp": 8, "ep": 4}),
    ("llama3-8b", "ring", {"cp": 4, "tp": 2, "pp": 2, "batch": 4, "context_balance": "none"}),
    ("llama3-8b", "ring", {"cp": 4, "pp": 2, "batch": 4, "context_balance": "none", "schedule": "zb-h1"}),
    ("gpt-oss-20b", "ring", {"cp": 4, "dp": 2, "ep": 4, "context_balance": "none", "recompute": "selective"}),
    ("deepseek-v3", "ring:2x2", {"cp": 4, "context_balance": "none", "recompute": "full"}),
]


def traces(model: str, context: str, options: dict[str, Any]) -> stage.TraceSet:
    given = dict(options)
    strategy, sizes = given.pop("strategy", "megatron_sp"), MODELS[model] | given.pop("sizes", {})
    return stage.synthesize(model, strategy, sizes=sizes, vocab_multiple=8, context=context, **given)


@pytest.mark.parametrize(("model", "context", "options"), CASES, ids=name_of)
def test_a_set_has_no_defect(model: str, context: str, options: dict[str, Any]) -> None:
    found = traces(model, context, options)
    by_rank, by_class = verify(found), verify_classes(found.classes)
    assert by_rank.defects == by_class.defects == ()
    assert by_rank.nodes == by_class.nodes
    assert found.manifest["context"] == context
    check_messages(found)


def check_messages(found: stage.TraceSet) -> None:
    """Each message between two ranks has its own tag, small enough, and both ends have them in one order."""
    sent: dict[tuple[int, int], list[tuple[object, ...]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[object, ...]]] = defaultdict(list)
    for rank in found.ranks:
        for node in found.nodes(rank):
            if node.get("comm_tag") is not None:
                ends = int(str(node.get("comm_src"))), int(str(node.get("comm_dst")))
                where = sent if ends[0] == rank and int(node.type) == 5 else received
                where[ends].append((node.get("comm_tag"), node.get("comm_size"), node.get("axes")))
    assert sent.keys() == received.keys()
    for ends, messages in sent.items():
        tags = [int(str(tag)) for tag, _, _ in messages]
        assert len(set(tags)) == len(tags), f"{ends}: a tag stands for two messages"
        assert max(tags) < TAG_LIMIT
        assert sorted(map(str, messages)) == sorted(map(str, received[ends]))
        rounds = [message for message in messages if message[2]]
        assert rounds == [message for message in received[ends] if message[2]], f"{ends}: two orders"


def steps(found: stage.TraceSet, rank: int, phase: str) -> dict[int, int]:
    """The work of each step of the rings of the first layer of a rank."""
    own = [
        n for n in found.nodes(rank) if n.get("layer") == 0 and n.get("phase") == phase and ".step" in n.name
    ]
    return {int(n.name.partition(".step")[2].partition("/")[0]): int(str(n.get("num_ops"))) for n in own}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ranks_of_consecutive_parts_skip_the_blocks_behind_them(phase: str) -> None:
    """Rank i has i blocks before its own, each twice the work of the diagonal; what it skips it still passes on."""
    even = traces("llama3-8b", "ring", {"cp": 4})
    uneven = traces("llama3-8b", "ring", {"cp": 4, "context_balance": "none"})
    half = steps(even, 0, phase)[0]
    for rank in uneven.ranks:
        assert steps(even, rank, phase) == dict.fromkeys(range(4), half)
        assert steps(uneven, rank, phase) == {0: half} | dict.fromkeys(range(1, rank + 1), 2 * half)
    assert uneven.manifest["class_axes"] == ["cp"]
    messages = [
        [n.get("comm_size") for n in uneven.nodes(rank) if n.get("comm_tag") is not None] for rank in range(4)
    ]
    assert messages == 4 * [[n.get("comm_size") for n in even.nodes(0) if n.get("comm_tag") is not None]]


def test_a_window_leaves_consecutive_parts_what_is_near() -> None:
    """Windowed layers of parts of 4 tokens: 3 keys reach into the part before alone, and the first part has none."""
    options = {"cp": 4, "context_balance": "none", "sizes": {"window": 3}}
    uneven = traces("gpt-oss-20b", "ring", options)
    heads, dim = MODELS["gpt-oss-20b"]["heads"], MODELS["gpt-oss-20b"]["head_dim"]
    own, before = (
        4 * dim * heads * area for area in (7.5, 4.5)
    )  # 4 x 4 / 2 less a corner of 1; a corner of 3
    assert [steps(uneven, rank, "forward") for rank in range(4)] == [{0: own}, *3 * [{0: own, 1: before}]]


def test_tags_of_rings_are_behind_those_of_the_pipeline() -> None:
    tags: dict[bool, set[int]] = {True: set(), False: set()}
    options = {"cp": 4, "pp": 2, "batch": 4, "steps": 3}
    for node in traces("llama3-8b", "ring", options).nodes(0):
        if node.get("comm_tag") is not None:
            tags[node.get("axes") is not None].add(int(str(node.get("comm_tag"))))
    assert max(tags[False]) < 2 * 3 * 4 <= min(tags[True])
    # steps x micro-batches x blocks of the stage (the embedding and a layer) x (3 + 3 + 4 messages)
    assert max(tags[True]) == 2 * 3 * 4 + 3 * 4 * 2 * 10 - 1


def test_more_tags_than_there_are_is_refused() -> None:
    fits: dict[str, int] = {"micro_batches": 1 << 10, "steps": 1 << 10, "chunks": 1, "blocks": 1 << 6}
    check_tags(**fits, messages=31)
    with pytest.raises(StageError) as caught:
        check_tags(**fits, messages=32)
    assert str(caught.value) == (
        "steps x micro_batches x blocks x messages of a block = 1024 x 1024 x 64 x 32 needs 2149580800 tags, "
        "more than the 2147483648 that a trace has room for; choose fewer"
    )


def test_the_manifest_counts_messages_by_their_axes() -> None:
    found = traces("llama3-8b", "ring", {"cp": 4, "pp": 2, "batch": 4})
    sent = {
        (entry["kind"], *entry["axes"]): (entry["group"], entry["count"], entry["bytes"])
        for entry in found.manifest["classes"][0]["communication"]
        if entry["kind"] in ("send", "recv")
    }
    block = 2 * 4 * 2 * 8 * 2  # K and V of 4 tokens, 2 KV heads of 8 numbers, in bf16
    message = (2, 4 * 10, 4 * (6 * block + 4 * 2 * block))
    assert sent["send", "cp"] == sent["recv", "cp"] == message
    assert sent["send",][:2] == (2, 4)


def test_a_file_may_say_it() -> None:
    text = (
        'context = "ring:2x2"\n[shard]\nheads = ["tp"]\nkv_heads = ["tp"]\nbatch = ["dp"]\nseq = ["cp", "tp"]'
    )
    one = request("llama3-8b", parse_strategy(text, "mine", "mine.toml"), cp=4)
    assert one.mesh.atoms == (("cp_ring", 2), ("cp_ulysses", 2))
    assert one.strategy.replace(context="ulysses").contexts.ulysses(4) == 4


@pytest.mark.parametrize("text", ["ring:0x4", "ring:4", "ring:x2", "ulysses:2", "", "Ring"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(StageError) as caught:
        request("llama3-8b", "megatron", cp=4, context=text)
    expected = f"context is {text!r}; known: all_gather, ring, ulysses, or ring:AxB with A x B = cp"
    assert str(caught.value) == f"strategy megatron: {expected}"
