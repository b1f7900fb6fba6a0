"""Streams: how communication is ordered, what a trace says of it, and what a verification proves."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stage.cost.system_file import load_system
from stage.errors import StrategyError
from stage.io.astra_sim import export_astra_sim, system_for_export
from stage.synthesis import job
from stage.trace.limits import ONE_AT_A_TIME
from stage.trace.node import Attribute, NodeType, TraceNode
from stage.trace.peer import Peer
from stage.trace.report import Report
from stage.trace.streams import chain, several_streams
from stage.trace.template import Ref, TemplateNode
from stage.trace.verify import verify
from stage.trace.verify_node import COLL, COMP
from stage.trace.verify_plan import Plan, build, make_plan
from stage.trace.verify_record import RankRecord
from stage.trace.verify_run import run_together
from stage.traceset import TraceSet
from stage.verification import verify_set
from tests.small import name_of, request
from tests.test_verify import Bench, coll, comp
from tests.test_verify_plan import Row, record

COMMUNICATION = {NodeType.COMM_COLL, NodeType.COMM_SEND}

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "pp": 2, "batch": 8}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "pp": 2, "batch": 8, "schedule": "zb-h1"}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "zero": 3}),
    ("llama3-8b", "megatron", {"tp": 2, "dp": 2, "zero": 0, "steps": 2}),
    ("llama3-8b", "hsdp", {"dp": 4, "dp_shard": 2, "steps": 2}),
    ("mixtral-8x7b", "megatron_moe", {"tp": 2, "dp": 4, "ep": 4, "steps": 2}),
    ("mixtral-8x7b", "megatron_moe", {"tp": 2, "dp": 4, "ep": 4, "zero": 3, "steps": 2}),
    ("gpt3-125m", "megatron_sp", {"tp": 2, "dp": 2, "pp": 2, "batch": 8}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "cp": 2, "pp": 2, "batch": 8, "context": "ring"}),
    ("llama3-8b", "megatron_sp", {"tp": 2, "cp": 2, "dp": 2, "context": "ulysses", "sizes": {"kv_heads": 4}}),
    ("deepseek-v3", "megatron_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 2, "pp": 2, "batch": 8, "vpp": 2,
                                     "schedule": "interleaved", "sizes": {"layers": 4}}),
    ("deepseek-v3", "megatron_moe", {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "pp": 2, "batch": 8, "schedule": "zb-v",
                                     "sizes": {"layers": 4}}),
]  # fmt: skip


def traces_of(model: str, strategy: str, options: dict[str, Any], streams: str | None) -> TraceSet:
    return TraceSet.of(job(request(model, strategy, streams=streams, **options)))


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{name_of(row[2])}")
def pair(request: pytest.FixtureRequest) -> tuple[TraceSet, TraceSet]:
    """One job with one stream of communication, and with one for each set of axes."""
    model, strategy, options = request.param
    single, several = (traces_of(model, strategy, options, streams) for streams in (None, "per-axis"))
    return single, several


def stream_name(node: TraceNode) -> str:
    if node.type == NodeType.COMM_COLL:
        return str(node.get("axes"))
    return "send pp" if node.get("phase") == "pipeline" else "send cp"


def first_ranks(traces: TraceSet) -> Sequence[int]:
    return range(0, traces.world, traces.classes.ranks_per_class)


def ancestors(nodes: Sequence[TraceNode]) -> dict[int, set[int]]:
    """The ids of all nodes that each node runs behind."""
    found: dict[int, set[int]] = {}
    for node in nodes:
        found[node.id] = set(node.data_deps).union(*(found[dep] for dep in node.data_deps))
    return found


def test_a_stream_for_each_set_of_axes_and_one_for_sends() -> None:
    def node(kind: str, *axes: str, peer: Peer | None = None, channel: str = "") -> TemplateNode:
        return TemplateNode(kind, kind, kind, 8, axes=axes, peer=peer, channel=channel)

    ahead, back = Peer(("pp",), 1), Peer(("pp",), -1)
    nodes = [
        node("compute"),
        node("all_gather", "tp"),
        node("all_reduce", "dp", "cp"),
        node("all_gather", "tp"),
        node("send", peer=ahead),
        node("recv", peer=back, channel="recv_forward.0"),
    ]
    assert [n.stream for n in chain(nodes)] == [""] * 6
    found = chain(nodes, "per-axis")
    assert [n.stream for n in found] == ["", "tp", "dp cp", "tp", "send pp", ""]
    assert [n.deps for n in found] == [
        (Ref("port", "compute"),),
        (Ref("port", "tp"),),
        (Ref("port", "dp cp"),),
        (Ref("self", 1),),
        (Ref("port", "send pp"),),
        (Ref("port", "recv_forward.0"),),
    ]


def test_nodes_are_the_same_but_for_order_and_stream(pair: tuple[TraceSet, TraceSet]) -> None:
    for rank in first_ranks(pair[0]):
        single, several = (list(traces.nodes(rank)) for traces in pair)
        assert all(node.get("stream") is None for node in single)
        for one, other in zip(single, several, strict=True):
            attrs = {key: value for key, value in other.attrs.items() if key != "stream"}
            assert replace(other, data_deps=one.data_deps, attrs=attrs) == one
            named = Attribute("string_val", stream_name(other))
            assert other.attrs.get("stream") == (named if other.type in COMMUNICATION else None)


def test_streams_are_chains_that_only_data_connects(pair: tuple[TraceSet, TraceSet]) -> None:
    """Of two streams no node waits for the other's but what it reads: dependencies that one stream has beside its own.

    They are a subset of the order that a single stream has, so what can run there can run here.
    """
    for rank in first_ranks(pair[0]):
        single, several = (list(traces.nodes(rank)) for traces in pair)
        before, now = ancestors(single), ancestors(several)
        last: dict[str, int] = {}
        for node in several:
            assert now[node.id] <= before[node.id], node.name
            if node.type in COMMUNICATION:
                stream = str(node.get("stream"))
                assert last.get(stream, node.id) in (node.id, *node.data_deps), node.name
                last[stream] = node.id


def test_gradients_do_not_wait_for_tensor_parallel_collectives() -> None:
    for zero in (1, 3):
        traces = traces_of(
            "llama3-8b", "megatron_sp", {"tp": 2, "dp": 2, "zero": zero, "bucket_size": 1000}, "per-axis"
        )
        nodes = {node.id: node for node in traces.nodes(0)}
        reductions = [n for n in nodes.values() if n.get("axes") == "dp" and n.get("phase") == "backward"]
        assert len(reductions) > 3
        for node in reductions:
            axes = {nodes[dep].get("axes") for dep in node.data_deps}
            assert axes <= {None, "dp"}, f"{node.name} waits for collectives over {axes}"


def test_what_follows_reductions_and_gathers_waits_for_all_streams(pair: tuple[TraceSet, TraceSet]) -> None:
    """The update of parameters runs behind every reduction, and what reads gathered ones behind every gather."""
    traces = pair[1]
    for rank in first_ranks(traces):
        nodes = list(traces.nodes(rank))
        behind = ancestors(nodes)
        gathers: dict[object, list[TraceNode]] = defaultdict(list)
        for node in nodes:
            step = node.get("step", 0)
            sums = [n.id for n in nodes if n.get("phase") in ("backward", "finalize") and n.get("step", 0) == step
                    and n.type == NodeType.COMM_COLL and ("bucket" in n.name or "gradients" in n.name
                                                         or n.get("phase") == "finalize")]  # fmt: skip
            if node.get("phase") == "optimizer" and node.type == NodeType.COMP:
                assert behind[node.id].issuperset(sums), node.name
            if ".parameters" in node.name:
                gathers[node.name.split(".")[0], node.get("phase"), node.get("micro_batch"), step].append(
                    node
                )
        for block, found in gathers.items():
            reads = [n for n in nodes if n.type == NodeType.COMP and n.id > found[-1].id and n.get("op") == "contract_group"
                     and (n.name.split(".")[0], n.get("phase"), n.get("micro_batch"), n.get("step", 0)) == block]  # fmt: skip
            assert all(behind[n.id].issuperset(g.id for g in found) for n in reads)


def test_the_next_step_waits_for_the_parameters_of_all_streams() -> None:
    options = {"tp": 2, "dp": 4, "ep": 4, "steps": 2}
    nodes = list(traces_of("mixtral-8x7b", "megatron_moe", options, "per-axis").nodes(0))
    behind = ancestors(nodes)
    gathers = [
        n.id
        for n in nodes
        if n.get("phase") == "optimizer" and n.get("op") == "all_gather" and n.get("step") == 0
    ]
    streams = {n.get("stream") for n in nodes if n.id in gathers}
    first = next(n for n in nodes if n.get("step") == 1 and n.get("op") == "contract_group")
    assert len(streams) == 2
    assert behind[first.id].issuperset(gathers)


def test_mixes_are_proved_on_every_stream(pair: tuple[TraceSet, TraceSet]) -> None:
    single, several = pair
    assert verify_set(single) == Report((), (), (), single.world, verify_set(single).nodes)
    for exhaustive in (False, True):
        report = verify_set(several, exhaustive=exhaustive)
        assert (report.defects, report.unchecked) == ((), ())
        assert {warning.rule for warning in report.warnings} <= {"one-slot"}


CROSSED = {
    "tp": {0: "1", 1: "1", 2: "2", 3: "2"},
    "dp": {0: "4", 2: "4", 1: "5", 3: "5"},
}
GROUPS = {"1": [0, 1], "2": [2, 3], "4": [0, 2], "5": [1, 3]}


def crossed(*, streams: bool, slow: Sequence[int] = (1, 2)) -> Bench:
    """Four ranks in a square, each with a collective along either side; on slow ones a kernel holds the first back."""
    traces = {}
    for rank in range(4):
        first, second = coll(2, 1, group=CROSSED["tp"][rank]), coll(3, group=CROSSED["dp"][rank])
        pair = [replace(first, data_deps=(1,) if rank in slow else ()), second]
        if streams:
            names = (Attribute("string_val", name) for name in ("tp", "dp"))
            pair = [
                replace(n, attrs={**n.attrs, "stream": name}) for n, name in zip(pair, names, strict=True)
            ]
        traces[rank] = [comp(1), *pair]
    return Bench(traces, groups=GROUPS)


def test_ranks_of_unequal_speed_block_each_other_in_one_slot_and_not_on_two_streams() -> None:
    one = verify(crossed(streams=False))
    assert [(found.rank, found.node, found.rule) for found in one.defects] == [(0, 2, "deadlock")]
    two = verify(crossed(streams=True))
    assert two.ok
    (warning,) = two.warnings
    assert (warning.rank, warning.node, warning.rule) == (0, 2, "one-slot")
    assert warning.message == (
        f"{ONE_AT_A_TIME}; where all nodes take equally long it waits in ALL_REDUCE of 4096 bytes on group 1 for rank 1, "
        "which waits in node 3 (ALL_REDUCE of 4096 bytes on group 5) for rank 3, "
        "which waits in node 2 (ALL_REDUCE of 4096 bytes on group 2) for rank 2, "
        "which waits in node 3 (ALL_REDUCE of 4096 bytes on group 4) for rank 0"
    )
    even = verify(crossed(streams=True, slow=()))
    assert [(found.rank, found.rule, found.message) for found in even.warnings] == [
        (None, "one-slot", ONE_AT_A_TIME)
    ]


def test_streams_that_cross_between_ranks_are_a_deadlock() -> None:
    """Chains of one rank alone do not help where data orders two streams one way here and the other way there."""
    bench = crossed(streams=True, slow=())
    bench.groups = {"1": [0, 1], "2": [2, 3], "4": [0, 1], "5": [2, 3]}
    for rank in range(4):
        names = ("1", "4") if rank < 2 else ("2", "5")
        for ident, name in zip((2, 3), names, strict=True):
            bench.attribute(rank, ident, "pg_name", "string_val", name)
    assert verify(bench).ok
    bench.change(0, 3, lambda node: replace(node, data_deps=(2,)))
    bench.traces[1] = [replace(n, data_deps=(3,)) if n.id == 2 else n for n in bench.traces[1]]
    bench.traces[1].sort(key=lambda node: (node.id == 2, node.id))
    assert [found.rule for found in verify(bench).defects] == ["deadlock"]


def test_order_on_one_stream_is_asked_for_and_of_one_group_too() -> None:
    bench = crossed(streams=True, slow=())
    for rank in range(4):
        bench.attribute(rank, 3, "stream", "string_val", "tp")
    assert {found.rule for found in verify(bench).warnings} == {"comm-unchained"}
    bench = crossed(streams=True, slow=())
    for rank in range(4):
        bench.attribute(rank, 3, "pg_name", "string_val", CROSSED["tp"][rank])
    report = verify(bench)
    assert [found.node for found in report.warnings if found.rule == "comm-unchained"] == [3] * 4


def several_chains(chance: random.Random, rank: int, events: Sequence[tuple[int, Row]]) -> RankRecord:
    """A rank whose communications are on one of three streams each, chained there, with computations in between."""
    kinds: list[int] = []
    parents: list[list[int]] = []
    columns: list[Row] = []
    last: dict[int, int] = {}
    streams: dict[int, str] = {}
    for kind, row in events:
        for _ in range(chance.randint(0, 2)):
            parents.append(sorted(chance.sample(range(len(kinds)), min(len(kinds), chance.randint(0, 2)))))
            kinds.append(COMP)
        stream = row[3] % 3
        found = set(chance.sample(range(len(kinds)), min(len(kinds), chance.randint(0, 2))))
        found |= {last[stream]} if stream in last else set()
        last[stream] = len(kinds)
        streams[len(kinds)] = str(stream)
        parents.append(sorted(found))
        kinds.append(kind)
        columns.append(row)
    made = record(rank, kinds, parents, columns)
    return replace(made, structure=replace(made.structure, streams=streams))


def whole(found: RankRecord) -> Plan:
    structure = found.structure
    count = len(structure.ids)
    return build(
        structure, range(count), [structure.parents_of(at) for at in range(count)], None, structure.streams
    )


def test_plan_of_several_chains_runs_or_blocks_as_the_whole_program_does() -> None:
    chance = random.Random(7)  # noqa: S311 - seeded test data
    outcomes = {True: 0, False: 0}
    for _ in range(600):
        events: list[list[tuple[int, Row]]] = [[] for _ in range(3)]
        for group in range(1, chance.randint(2, 9)):
            for own in events:
                own.append((COLL, (COLL, 0, 8, group, 0, 0)))
        for own in events:
            at = chance.randrange(len(own))
            if at:
                own[at - 1], own[at] = own[at], own[at - 1]
        records = {rank: several_chains(chance, rank, own) for rank, own in enumerate(events)}
        members = {group: list(records) for group in range(1, 9)}
        plans = {rank: make_plan(found.structure) for rank, found in records.items()}
        assert all(plan.unchained is None and COMP not in plan.kinds for plan in plans.values())
        full = {rank: whole(found) for rank, found in records.items()}
        short, long = run_together(records, plans, members), run_together(records, full, members)
        assert (short is None) == (long is None)
        outcomes[short is None] += 1
    assert min(outcomes.values()) > 100, "both outcomes are tried"


def test_a_set_says_what_its_streams_risk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tp": 2, "dp": 4}
    single, several = (
        traces_of("llama3-8b", "megatron_sp", options, streams) for streams in (None, "per-axis")
    )
    assert (single.warnings, several.warnings) == ([], [ONE_AT_A_TIME])
    assert single.manifest["streams"] == "single"
    assert several.manifest["streams"] == "per-axis"
    assert traces_of("llama3-8b", "ddp", {"dp": 2}, "per-axis").warnings == [], "all are over dp"
    system = system_for_export(load_system("h100"), 8)
    for name, traces in (("one", single), ("more", several)):
        traces.write(tmp_path / name)
        assert export_astra_sim(tmp_path / name, tmp_path / f"{name}-kit", system) == traces.warnings
    assert export_astra_sim(several, tmp_path / "kit", system) == [ONE_AT_A_TIME]
    assert not several_streams({}, [{"communication": [{"kind": "all_gather", "axes": ["tp"]}]}])


def test_other_streams_are_refused() -> None:
    with pytest.raises(StrategyError) as caught:
        request("llama3-8b", "megatron", streams="per-axes")
    assert str(caught.value) == (
        "strategy megatron: streams is 'per-axes' (did you mean 'per-axis'?); known: single, per-axis"
    )


def test_a_rank_without_streams_has_one() -> None:
    found = record(0, [COLL, COMP, COLL], [[], [0], [1]], [(COLL, 0, 8, 1, 0, 0)] * 2)
    plan = make_plan(found.structure)
    assert (plan.slots, list(plan.streams)) == (1, [0, 0])
    assert np.array_equal(plan.positions, [0, 2])
