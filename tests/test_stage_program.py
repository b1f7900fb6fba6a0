"""Programs of pipeline ranks: messages between virtual stages, marks on nodes, and reductions in their place."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import stage
from stage.catalog import load_strategy
from stage.errors import StrategyError
from stage.pipeline.schedules import SCHEDULES, order, plan_pipeline
from stage.trace.node import NodeType, TraceNode
from stage.trace.verify import verify
from stage.traceset import TraceSet

SMALL = {"d_model": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 48, "vocab": 64}
SHAPES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("looped-bfs", 2),
    ("zb-h1", 1),
    ("zb-h1", 2),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


def job(
    schedule: str, vpp: int, pp: int, *, strategy: str = "megatron", model: str = "llama3-8b", **options: Any
) -> TraceSet:
    """A small job; as many layers as stages unless `layers` says another number."""
    sizes = {"layers": options.pop("layers", pp * vpp)} | (SMALL if model == "llama3-8b" else {})
    options = {"batch": 2 * pp * options.get("dp", 1), "seq": 32, **options}
    return stage.synthesize(model, strategy, pp=pp, vpp=vpp, schedule=schedule, sizes=sizes, **options)


def messages(nodes: list[TraceNode], kind: NodeType) -> list[tuple[Any, ...]]:
    return [(n.get("comm_src"), n.get("comm_dst"), n.get("comm_tag")) for n in nodes if n.type == kind]


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
def test_every_boundary_between_ranks_has_a_message_each_way(schedule: str, vpp: int) -> None:
    pp, m = 4, 8
    traces = job(schedule, vpp, pp)
    pipeline = plan_pipeline(schedule, pp, m, vpp)
    expected: Counter[tuple[int, int]] = Counter()
    for boundary in range(pipeline.stages - 1):
        a, b = pipeline.place(boundary)[0], pipeline.place(boundary + 1)[0]
        if a != b:
            expected.update({(a, b): m, (b, a): m})
    sent = [x for rank in range(pp) for x in messages(list(traces.nodes(rank)), NodeType.COMM_SEND)]
    received = [x for rank in range(pp) for x in messages(list(traces.nodes(rank)), NodeType.COMM_RECV)]
    assert sorted(sent) == sorted(set(sent)) == sorted(received)
    assert Counter((src, dst) for src, dst, _ in sent) == expected


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
def test_a_job_verifies_without_a_warning(schedule: str, vpp: int) -> None:
    """Not even where a send waits for its receive."""
    for options in ({"pp": 2}, {"pp": 4, "tp": 2, "strategy": "megatron_sp", "zero": 1}):
        report = verify(job(schedule, vpp, **options))
        assert report.ok, report.defects[:3]
        assert not report.warnings


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
def test_nodes_say_which_chunk_and_phase_they_belong_to(schedule: str, vpp: int) -> None:
    pp, m = 2, 4
    traces = job(schedule, vpp, pp)
    pipeline = plan_pipeline(schedule, pp, m, vpp)
    for rank in range(pp):
        nodes = list(traces.nodes(rank))
        assert len({node.name for node in nodes}) == len(nodes)
        phases = order(schedule, pipeline, rank)
        expected = [
            (phase, action.chunk, action.micro_batch)
            for phase, actions in phases._asdict().items()
            for action in actions
            if action.kind == "F"
        ]
        cores = [node for node in nodes if node.get("op") == "attention" and node.get("phase") == "forward"]
        found = [(n.get("pipeline_phase"), n.get("chunk", 0), n.get("micro_batch")) for n in cores]
        assert found == expected
        assert [n.get("layer") for n in cores] == [pipeline.stage(rank, chunk) for _, chunk, _ in expected]
        assert all((node.get("chunk") is None) == (vpp == 1) for node in cores)
        assert all(node.get("pipeline_phase") is None for node in nodes if node.get("phase") == "optimizer")


def test_without_a_pipeline_nothing_is_marked() -> None:
    nodes = list(job("1f1b", 1, 1).nodes(0))
    assert all(node.get("pipeline_phase") is None and node.get("chunk") is None for node in nodes)


def test_the_turn_of_a_v_is_a_dependency() -> None:
    nodes = {n.name: n for n in job("zb-v", 2, 2).nodes(1)}
    last, following = nodes["layer1.mlp.residual/forward/mb0"], nodes["layer2.attn.norm/forward/mb0"]
    assert last.id in following.data_deps
    first, before = (
        nodes["layer2.attn.residual.cotangent_sum/backward/mb0"],
        nodes["layer1.mlp.down_proj.dgrad/backward/mb0"],
    )
    assert first.id < before.id


def test_the_head_is_on_the_last_stage_wherever_that_is() -> None:
    for schedule, vpp, rank in (("interleaved", 2, 1), ("zb-v", 2, 0), ("dualpipe-v", 2, 0)):
        traces = job(schedule, vpp, 2)
        for other in (0, 1):
            names = {node.name.split(".")[0] for node in traces.nodes(other)}
            assert ("head" in names) == (other == rank)
            assert ("embedding" in names) == (other == 0)


@pytest.mark.parametrize(
    ("schedule", "vpp", "count"), [("1f1b", 1, 1), ("interleaved", 2, 1), ("zb-v", 2, 0)]
)
def test_a_tied_table_is_summed_where_its_users_are_apart(schedule: str, vpp: int, count: int) -> None:
    traces = job(schedule, vpp, 2, model="gpt3-125m", dp=2)
    for rank in range(4):
        nodes = list(traces.nodes(rank))
        assert sum("tied_embedding" in node.name for node in nodes) == count
        tables = [n for n in nodes if n.name.startswith("embedding.") and n.get("phase") == "forward"]
        assert bool(tables) == (rank < 2)


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
@pytest.mark.parametrize("model", ["llama3-8b", "gpt3-125m"])
def test_gradients_are_reduced_after_the_last_backward_of_their_blocks(
    schedule: str, vpp: int, model: str
) -> None:
    """Each tensor is a bucket here: a reduction stands right behind the last backward node of its block."""
    strategy = load_strategy("megatron").replace(overlap_grad=True, bucket_size=1, bucket_first_stage=False)
    sizes = {"layers": 2 * vpp} | (SMALL if model == "llama3-8b" else {})
    traces = stage.synthesize(
        model, strategy, pp=2, dp=2, vpp=vpp, schedule=schedule, sizes=sizes, batch=8, seq=32
    )
    for rank in (0, 2):
        last: dict[str, int] = {}
        behind: list[tuple[int, str]] = []
        block = ""
        for node in traces.nodes(rank):
            if node.type == NodeType.COMP and node.get("phase") == "backward":
                block = node.name.split(".")[0]
                last[block] = node.id
            elif node.name.startswith("bucket") and node.get("phase") == "backward":
                behind.append((node.id, block))
        assert {block for _, block in behind} == set(last)
        assert all(at > last[block] for at, block in behind)
        assert last.get("head", -1) < last.get("embedding", max(last.values()) + 1)


def test_a_chunk_has_buckets_of_its_own() -> None:
    for schedule, vpp, count in (("1f1b", 1, 1), ("interleaved", 2, 2), ("zb-v", 2, 2)):
        nodes = list(job(schedule, vpp, 2, dp=2, layers=4).nodes(0))
        assert (
            sum(node.name.startswith("bucket") and node.type == NodeType.COMM_COLL for node in nodes) == count
        )


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2)]
)
def test_embedding_and_head_may_be_stages_of_their_own(schedule: str, vpp: int) -> None:
    pp = 3
    inner = [1] * (pp * vpp - 2)
    traces = job(schedule, vpp, pp, layers=len(inner), stage_layers=[0, *inner, 0])
    assert verify(traces).ok
    layers = {n.get("layer") for rank in range(pp) for n in traces.nodes(rank)} - {None}
    assert layers == set(range(len(inner)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": 6, "pp": 2},
            "6 layers of llama3-8b do not divide by pp x vpp = 4; choose a pp x vpp that divides them, "
            "or give --stage-layers with 4 numbers that add up to 6",
        ),
        (
            {"layers": 6, "pp": 2, "stage_layers": [3, 3]},
            "stage layers 3,3 are 2 numbers that add up to 6; "
            "give 4 numbers (pp x vpp) that add up to the 6 layers of llama3-8b",
        ),
        (
            {"layers": 6, "pp": 2, "stage_layers": [2, 0, 2, 2]},
            "stage 1 of llama3-8b has no layers; give it at least one in --stage-layers",
        ),
    ],
)
def test_layers_are_shared_out_to_virtual_stages(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        job("interleaved", 2, **options)
    assert str(caught.value) == message


def test_fsdp_gathers_each_chunk_before_its_use() -> None:
    for schedule, vpp in SHAPES:
        nodes = list(job(schedule, vpp, 2, dp=2, strategy="fsdp").nodes(0))
        gathered = {n.id for n in nodes if ".parameters" in n.name}
        readers = [n for n in nodes if n.name.startswith("layer") and n.get("op") == "norm"]
        assert readers
        for node in readers:
            assert set(node.data_deps) & gathered, node.name


DRAWN = st.fixed_dictionaries(
    {
        "pp": st.integers(1, 3),
        "tp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 2]),
        "zero": st.sampled_from([0, 1, 3]),
        "recompute": st.sampled_from(["none", "full", "selective"]),
        "grad_reduce": st.sampled_from(["step", "microbatch"]),
        "steps": st.sampled_from([1, 2]),
        "strategy": st.sampled_from(["megatron", "megatron_sp"]),
    }
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SHAPES), st.integers(1, 7), DRAWN)
def test_drawn_jobs_verify(shape: tuple[str, int], micro_batches: int, drawn: dict[str, Any]) -> None:
    try:
        traces = job(*shape, **drawn, batch=micro_batches * drawn["dp"])
    except StrategyError:
        assume(False)
        raise
    report = verify(traces)
    assert report.ok, report.defects[:3]
    for rank in traces.ranks:
        names = [node.name for node in traces.nodes(rank)]
        assert len(set(names)) == len(names)


def test_every_schedule_has_a_shape_here() -> None:
    assert {schedule for schedule, _ in SHAPES} == set(SCHEDULES)
