"""What other generators of symbolic workloads get wrong, each with the right value here.

The public STAGE generator counts a multiply-add once, gives sizes in elements, makes attention linear in the sequence,
reduces gradients after every micro-batch, puts the head on a wrong stage when pp does not divide the layers, multiplies
attention's work by the degree of experts, truncates sizes that do not divide, draws random tags, and exits 0 for a
model that it does not know.
"""

from typing import Any

import pytest

from stage.cli import main
from stage.errors import StageError
from stage.synthesis import job
from stage.trace.node import NodeType, TraceNode
from stage.traceset import TraceSet
from tests.small import request

D, FF, HEADS, HEAD_DIM, VOCAB, SEQ = 32, 64, 4, 8, 64, 16


def nodes(
    rank: int = 0, model: str = "llama3-8b", strategy: str = "megatron", **options: Any
) -> list[TraceNode]:
    return list(TraceSet.of(job(request(model, strategy, **options))).nodes(rank))


def number(node: TraceNode, name: str) -> int:
    return int(str(node.get(name)))


def named(found: list[TraceNode], part: str) -> list[TraceNode]:
    return [node for node in found if part in node.name]


def test_a_multiply_add_is_two_operations() -> None:
    (head,) = named(nodes(dp=1), ".lm_head/forward")
    assert number(head, "num_ops") == 2 * SEQ * D * VOCAB


def test_sizes_are_bytes() -> None:
    for dtype, width in (("bf16", 2), ("fp32", 4)):
        found = nodes(tp=2, dtype=dtype)
        (reduced,) = named(found, "layer0.attn.o_proj.all_reduce/forward")
        assert number(reduced, "comm_size") == SEQ * D * width
        (projected,) = named(found, "layer0.mlp.down_proj/forward")
        assert number(projected, "tensor_size") == (SEQ * FF // 2 + D * FF // 2 + SEQ * D) * width


def test_gradients_have_bytes_of_their_own_dtype() -> None:
    for dtype, width in (("fp32", 4), ("bf16", 2)):
        found = nodes(dp=2, strategy="ddp", grad_dtype=dtype, bucket_size=0)
        (reduced,) = [n for n in named(found, "bucket") if n.get("op") == "all_reduce"]
        count = 2 * VOCAB * D + 2 * (2 * D + (2 * HEADS + 2 * 2) * HEAD_DIM * D + 3 * D * FF) + D
        assert number(reduced, "comm_size") == count * width


def test_attention_is_quadratic_in_the_sequence() -> None:
    work = []
    for seq in (SEQ, 2 * SEQ):
        (core,) = named(nodes(seq=seq), "layer0.attn.core/forward")
        work.append(number(core, "num_ops"))
    assert work[0] == 2 * (SEQ * SEQ // 2) * HEADS * 2 * HEAD_DIM, "half of all pairs, two products"
    assert work[1] == 4 * work[0]


def test_gradients_are_reduced_once_a_step() -> None:
    few, many = (nodes(strategy="ddp", dp=2, batch=2 * n, bucket_size=0) for n in (1, 8))
    for found in (few, many):
        assert len([n for n in found if n.get("comm_type") == 0 and "bucket" in n.name]) == 1
    each = nodes(strategy="ddp", dp=2, batch=16, bucket_size=0, grad_reduce="microbatch")
    assert len([n for n in each if n.get("comm_type") == 0 and "bucket" in n.name]) == 8, (
        "only where asked for"
    )


@pytest.mark.parametrize("stage_layers", [(2, 1), (1, 2), (3, 0), (0, 3)])
def test_the_head_is_on_the_last_stage_however_layers_are_shared_out(stage_layers: tuple[int, int]) -> None:
    options: dict[str, Any] = {"pp": 2, "sizes": {"layers": 3}, "stage_layers": stage_layers, "batch": 2}
    first, last = (nodes(rank, **options) for rank in (0, 1))
    assert named(last, ".lm_head/forward")
    assert named(last, ".loss.")
    assert not named(first, ".lm_head/")
    assert named(first, ".embedding/forward")
    assert not named(last, ".embedding/")
    assert len(named(first, ".attn.core/forward")) == 2 * stage_layers[0]
    assert len(named(last, ".attn.core/forward")) == 2 * stage_layers[1]


def test_the_degree_of_experts_multiplies_no_work() -> None:
    def core(**degrees: int) -> tuple[int, int]:
        found = nodes(model="mixtral-8x7b", strategy="megatron_moe", dp=4, **degrees)
        attention = sum(number(n, "num_ops") for n in found if n.get("op") == "attention")
        return attention, sum(
            number(n, "num_ops") for n in found if ".experts." in n.name and n.get("op") != "pointwise"
        )

    assert core() == core(ep=2) == core(ep=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 4, "sizes": {"d_ff": 66}}, ("d_ff = 66", "tp = 4")),
        ({"tp": 4, "sizes": {"heads": 6}}, ("heads = 6", "tp = 4")),
        ({"cp": 4, "seq": 18}, ("seq = 18", "cp = 4")),
        ({"pp": 2, "sizes": {"layers": 3}}, ("3 layers", "pp = 2")),
        ({"dp": 4, "batch": 6}, ("batch = 6", "4")),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(StageError) as caught:
        job(request("llama3-8b", "megatron", **options))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_tags_are_deterministic_and_pair_every_message() -> None:
    options: dict[str, Any] = {"pp": 2, "dp": 2, "batch": 8, "steps": 2}
    sent, received = set[tuple[int, int, int]](), set[tuple[int, int, int]]()
    for rank in range(4):
        found = nodes(rank, **options)
        assert found == nodes(rank, **options)
        for node in found:
            ends = (node.get("comm_src"), node.get("comm_dst"), node.get("comm_tag"))
            if node.type == NodeType.COMM_SEND:
                assert ends not in sent
                sent.add(ends)  # type: ignore[arg-type]
            if node.type == NodeType.COMM_RECV:
                received.add(ends)  # type: ignore[arg-type]
    assert sent == received
    assert len(sent) == 2 * 2 * 2 * 4, "each way, pairs of ranks, steps, micro-batches"
    assert all(0 <= tag < 500_000_000 for _, _, tag in sent)


def test_an_unknown_model_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synth", "lama3-8b", "--gpus", "2", "--out", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert "lama3-8b" in error
    assert "llama3-8b" in error, "it says what may be meant"
    assert "Traceback" not in error
