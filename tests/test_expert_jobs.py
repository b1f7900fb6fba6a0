"""Jobs with loads of experts: whole trace sets that verify, do the work of the model, and agree on every exchange."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.expert_load import token_capacity, token_counts
from stage.request import Request
from stage.symbols import evaluate
from stage.synthesis import job
from stage.trace.job import Job
from stage.trace.node import CommType, NodeType, TraceNode
from stage.trace.verify import verify
from stage.trace.verify_classes import verify_classes
from stage.traceset import TraceSet
from tests.small import name_of, request
from tests.test_conservation import MATMULS, copies, forms
from tests.test_verify import Bench, found

EXPERTS, TOP_K = 8, 2
SIZES = {"experts": EXPERTS, "top_k": TOP_K}
MESHES = [
    ("megatron_moe", {"dp": 4, "ep": 2}),
    ("megatron_moe", {"dp": 2, "tp": 2, "ep": 4}),
    ("megatron_moe", {"dp": 2, "cp": 2, "ep": 2}),
    ("megatron_moe", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
    ("megatron_moe", {"pp": 2, "dp": 2, "ep": 2}),
    ("megatron", {"dp": 2, "tp": 2, "ep": 4}),
    ("megatron", {"tp": 4, "dp": 2, "ep": 4, "etp": 2}),
    ("fsdp", {"dp": 2}),
]
Splits = dict[tuple[str, int], dict[int, TraceNode]]


def asked(strategy: str, mesh: dict[str, int], **options: Any) -> Request:
    return request("mixtral-8x7b", strategy, sizes=SIZES, **mesh, **{"batch": 8, "micro_batch": 2} | options)


@cache
def made(strategy: str, mesh: tuple[tuple[str, int], ...], options: tuple[tuple[str, Any], ...]) -> TraceSet:
    return TraceSet.of(job(asked(strategy, dict(mesh), **dict(options))))


def traces(strategy: str, mesh: Mapping[str, int], **options: Any) -> TraceSet:
    return made(strategy, tuple(mesh.items()), tuple(options.items()))


def number(node: TraceNode, name: str) -> int:
    return int(str(node.get(name)))


def sizes(node: TraceNode, name: str) -> tuple[int, ...]:
    value = node.get(name)
    assert isinstance(value, tuple)
    return tuple(int(n) for n in value)


def uneven(source: TraceSet) -> Splits:
    """Every all-to-all with splits, by group and number on it: its node on each member."""
    found: Splits = defaultdict(dict)
    for rank in source.ranks:
        seen: dict[str, int] = defaultdict(int)
        for node in source.nodes(rank):
            if node.type == NodeType.COMM_COLL:
                group = str(node.get("pg_name"))
                seen[group] += 1
                if "in_splits" in node.attrs:
                    found[group, seen[group]][rank] = node
    return found


def proved(source: TraceSet) -> None:
    """Verified rank by rank and by classes, also where a send waits for its receive."""
    for report in (verify(source), verify_classes(source.classes)):
        assert report.ok, report.defects
        assert not report.unchecked
        assert not [
            warning for warning in report.warnings if warning.rule in ("rendezvous", "comm-unchained")
        ]


def work(source: TraceSet) -> int:
    """Operations of the matrix multiplications of all ranks, read off their traces."""
    return sum(
        number(n, "num_ops") for rank in source.ranks for n in source.nodes(rank) if n.get("op") in MATMULS
    )


def expected(job_: Request, slots: Sequence[int]) -> int:
    """The unsharded model's work, with experts that get so many of all slots in each layer, and what is repeated."""
    table, values, total = forms(job_.model.name, "fused"), {**job_.sizes, "sources": 1}, 0
    whole = job_.sizes["batch"] * job_.seq * TOP_K
    for layer, block in enumerate(job_.model.blocks):
        for _, name, form in table[block.kind]:
            one = evaluate(form, values) * copies(name, job_)
            if ".experts." in name:
                assert one * slots[layer - 1] % whole == 0
                one = one * slots[layer - 1] // whole
            total += one
    return total * job_.micro_batches


def sources_of(job_: Request) -> int:
    """How many ranks have their own tokens; without sequence parallelism those of tp share the slots instead."""
    parts = job_.degrees["dp"] * job_.degrees["cp"]
    if "tp" in job_.strategy.axes("seq"):
        return parts * job_.degrees["tp"]
    return parts * (job_.degrees["etp"] if job_.strategy.name == "megatron" else 1)


LOADS: list[dict[str, Any]] = [
    {"expert_load": "zipf:1.1"},
    {"expert_load": "zipf:1.1", "alltoall": "p2p"},
    {"expert_load": "zipf:20", "seed": 2, "alltoall": "p2p"},
    {"expert_load": "zipf:1.1", "capacity_factor": 1.25},
    {"expert_load": "zipf:1.1", "capacity_factor": 1.25, "pad_to_capacity": True},
    {"capacity_factor": 0.7, "alltoall": "p2p"},
    {"alltoall": "p2p"},
]


@pytest.mark.parametrize("options", LOADS, ids=name_of)
@pytest.mark.parametrize(("strategy", "mesh"), MESHES, ids=name_of)
def test_a_job_verifies_and_does_the_work_of_the_model_with_that_load(
    strategy: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    source, job_ = traces(strategy, mesh, **options), asked(strategy, mesh, **options)
    proved(source)
    sources = sources_of(job_)
    tokens = job_.sizes["batch"] * job_.seq // sources
    slots = np.full(EXPERTS, tokens * TOP_K // EXPERTS)
    if job_.expert_load is not None:
        slots = token_counts(job_.expert_load.row(0), tokens, TOP_K)
    if "capacity_factor" in options:
        capacity = token_capacity(options["capacity_factor"], tokens, TOP_K, EXPERTS)
        slots = np.full(EXPERTS, capacity) if "pad_to_capacity" in options else np.minimum(slots, capacity)
    assert work(source) == expected(job_, [int(slots.sum()) * sources] * 2)
    said = {key: source.manifest[key] for key in options}
    assert said == options
    assert ("expert_popularity" in source.manifest) == (job_.expert_load is not None)


@pytest.mark.parametrize("load", ["zipf:1.1", "zipf:20"])
@pytest.mark.parametrize(("strategy", "mesh"), MESHES[:-1], ids=name_of)
def test_what_a_member_sends_another_receives(strategy: str, mesh: dict[str, int], load: str) -> None:
    source = traces(strategy, mesh, expert_load=load)
    found = uneven(source)
    assert found
    for (group, _), nodes in found.items():
        ranks = source.groups[group]
        assert sorted(nodes) == sorted(ranks), "all members have splits"
        sent, received = (
            np.array([sizes(nodes[rank], name) for rank in ranks]) for name in ("in_splits", "out_splits")
        )
        assert (sent == received.T).all()
        assert {nodes[rank].get("comm_type") for rank in ranks} == {CommType.ALL_TO_ALL}
        assert {nodes[rank].get("comm_size") for rank in ranks} == {
            max(*sent.sum(axis=1), *received.sum(axis=1))
        }


@pytest.mark.parametrize("load", ["zipf:1.1", "zipf:20"])
@pytest.mark.parametrize(("strategy", "mesh"), MESHES[:-1], ids=name_of)
def test_messages_carry_what_the_splits_say(strategy: str, mesh: dict[str, int], load: str) -> None:
    """Each all-to-all in the order of the trace: by sends and receives the same bytes go the same ways."""
    whole = uneven(traces(strategy, mesh, expert_load=load))
    apart = traces(strategy, mesh, expert_load=load, alltoall="p2p")
    wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (group, _), nodes in whole.items():
        ranks = traces(strategy, mesh, expert_load=load).groups[group]
        for rank, node in nodes.items():
            for peer, size in zip(ranks, sizes(node, "in_splits"), strict=True):
                if size and peer != rank:
                    wanted[rank, peer].append(size)
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in apart.ranks:
        for node in apart.nodes(rank):
            if node.get("phase") == "pipeline" or node.type not in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                continue
            assert number(node, "comm_size") > 0
            ends = number(node, "comm_src"), number(node, "comm_dst")
            (sent if node.type == NodeType.COMM_SEND else received)[ends].append(number(node, "comm_size"))
    assert {ends: sorted(of) for ends, of in sent.items()} == {
        ends: sorted(of) for ends, of in wanted.items()
    }
    assert sent == received


def test_a_drawn_load_depends_on_its_seed_and_on_nothing_else() -> None:
    mesh = {"dp": 4, "ep": 4}
    one, same, other = (
        TraceSet.of(job(asked("megatron_moe", mesh, expert_load="zipf:1.1", seed=seed))) for seed in (5, 5, 6)
    )
    assert one.manifest == same.manifest
    assert one.manifest["expert_popularity"] != other.manifest["expert_popularity"]
    assert [entry["sha256"] for entry in one.manifest["classes"]] != [
        entry["sha256"] for entry in other.manifest["classes"]
    ]


def test_each_layer_may_have_a_load_of_its_own(tmp_path: Path) -> None:
    rows = [[1, 1, 1, 1], [5, 1, 1, 1], [0, 0, 1, 1]]
    file = tmp_path / "load.json"
    file.write_text(json.dumps(rows))
    job_ = request(
        "deepseek-v3", "megatron_moe", dp=4, ep=2, batch=4, expert_load=str(file), sizes={"layers": 4}
    )
    source = TraceSet.of(job(job_))
    proved(source)
    assert job_.model.moe_layers == (1, 2, 3)
    tokens, hidden = job_.seq, job_.sizes["d_model"]
    for layer in range(4):
        nodes = [
            node
            for node in source.nodes(0)
            if node.get("layer") == layer
            and "moe.permute.all_to_all/" in node.name
            and "in_splits" in node.attrs
        ]
        assert len(nodes) == (layer > 0)
        for node in nodes:
            counts = token_counts(rows[layer - 1], tokens, 2)
            assert sizes(node, "in_splits") == tuple(counts.reshape(2, 2).sum(axis=1) * hidden * 2)
    idle = [
        n
        for n in source.nodes(0)
        if n.get("layer") == 3 and ".experts." in n.name and n.type == NodeType.COMP
    ]
    assert not idle, "experts 0 and 1 of the last layer have no tokens"


def test_ranks_of_a_class_differ_in_groups_and_peers_alone() -> None:
    source = traces(
        "megatron_moe", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, expert_load="zipf:1.1", alltoall="p2p"
    )
    assert source.classes.count == 2
    work_of = [[n.get("num_ops") for n in source.nodes(rank)] for rank in source.ranks]
    for rank in source.ranks:
        assert work_of[rank] == work_of[source.classes.first(source.classes.of(rank))]
    assert work_of[0] != work_of[source.classes.first(1)]


HISTOGRAMS = st.lists(st.integers(0, 9), min_size=EXPERTS, max_size=EXPERTS).filter(
    lambda row: sum(n > 0 for n in row) >= TOP_K
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(HISTOGRAMS, min_size=2, max_size=2),
    st.sampled_from(MESHES),
    st.sampled_from(["collective", "p2p"]),
    st.sampled_from([None, 0.5, 1.0, 2.5]),
    st.sampled_from(["none", "full"]),
)
def test_any_load_verifies_and_conserves_tokens(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[list[int]],
    where: tuple[str, dict[str, int]],
    alltoall: str,
    factor: float | None,
    recompute: str,
) -> None:
    file = tmp_path_factory.mktemp("load") / "load.csv"
    file.write_text("\n".join(",".join(map(str, row)) for row in rows))
    strategy, mesh = where
    options = {"expert_load": str(file), "alltoall": alltoall, "capacity_factor": factor}
    job_ = asked(strategy, mesh, recompute=recompute, **options)
    source = TraceSet.of(job(job_))
    proved(source)
    tokens = job_.sizes["batch"] * job_.seq // sources_of(job_)
    slots = []
    for row in rows:
        counts = token_counts(row, tokens, TOP_K)
        if factor is not None:
            counts = np.minimum(counts, token_capacity(factor, tokens, TOP_K, EXPERTS))
        slots.append(int(counts.sum()) * sources_of(job_))
    if recompute == "none":
        assert work(source) == expected(job_, slots)


def bench() -> Bench:
    """A set whose nodes can be changed one by one."""
    source = traces("megatron_moe", {"dp": 4, "ep": 4}, expert_load="zipf:1.1")
    return Bench({rank: list(source.nodes(rank)) for rank in source.ranks}, source.groups, source.world)


def first_uneven(source: Bench, rank: int) -> TraceNode:
    return next(node for node in source.traces[rank] if "in_splits" in node.attrs)


def test_a_broken_split_is_found() -> None:
    source = bench()
    assert verify(source).ok
    node = first_uneven(source, 2)
    sent = list(sizes(node, "in_splits"))
    sent[0], sent[1] = sent[0] - 2, sent[1] + 2
    source.attribute(2, node.id, "in_splits", "int64_list", tuple(sent))
    report = verify(source)
    assert found(report) == ("splits", 2, node.id)
    there = sizes(first_uneven(source, 0), "out_splits")[2]
    assert (
        f"sends {sent[0]} bytes to member 0, which receives {there}: in_splits and out_splits must agree"
        in (report.defects[0].message)
    )


@pytest.mark.parametrize(
    ("name", "member", "value", "rules"),
    [
        ("in_splits", None, None, {"splits"}),
        ("in_splits", "int32_list", (0, 0, 0, 0), {"attr-member", "splits"}),
        ("in_splits", "int64_list", (1, 2, 3), {"splits"}),
        ("in_splits", "int64_list", (-1, 2, 3, 4), {"splits"}),
        ("comm_type", "int64_val", int(CommType.ALL_REDUCE), {"splits", "collective-mismatch"}),
    ],
)
def test_malformed_splits_are_found(name: str, member: str | None, value: Any, rules: set[str]) -> None:
    source = bench()
    node = first_uneven(source, 1)
    source.attribute(1, node.id, name, member, value)
    report = verify(source)
    assert {defect.rule for defect in report.defects} == rules
    assert {defect.rank for defect in report.defects} <= {0, 1}


def test_members_without_splits_of_the_wrong_number_or_size_are_found() -> None:
    for change, text in (
        (
            ("in_splits", "out_splits"),
            "has no splits, but other members have: write in_splits and out_splits on all",
        ),
        ((), "has splits for 3 members, but the group has 4: one for each"),
    ):
        source = bench()
        node = first_uneven(source, 1)
        for name in change or ("in_splits", "out_splits"):
            source.attribute(
                1, node.id, name, None if change else "int64_list", None if change else (1, 2, 3)
            )
        assert found(verify(source)) == ("splits", 1, node.id)
        assert verify(source).defects[0].message.endswith(text)
    source = bench()
    for rank in range(4):
        node = first_uneven(source, rank)
        source.attribute(rank, node.id, "comm_size", "int64_val", number(node, "comm_size") + 1)
    assert found(verify(source)) == ("splits", 0, first_uneven(source, 0).id)
    assert "but the busiest member moves" in verify(source).defects[0].message


def test_a_broken_split_is_found_by_classes() -> None:
    """Of one class, and of all alike, whose members no other class has."""
    whole = job(asked("megatron_moe", {"dp": 4, "ep": 2}, expert_load="zipf:1.1"))
    assert verify_classes(whole.classes()).ok
    broken = replace(whole, programs=(with_splits(whole, 0), *whole.programs[1:]))
    report = verify_classes(broken.classes())
    assert {defect.rule for defect in report.defects} == {"splits"}
    padded = job(asked("megatron_moe", {"dp": 4, "ep": 2}, capacity_factor=1.0, pad_to_capacity=True))
    assert len(padded.programs) == 1
    assert verify_classes(padded.classes()).ok
    broken = replace(padded, programs=(with_splits(padded, 0),))
    assert {defect.rule for defect in verify_classes(broken.classes()).defects} == {"splits"}
    assert {defect.rule for defect in verify(TraceSet.of(broken)).defects} == {"splits"}


def with_splits(job_: Job, number_: int) -> Any:
    """A program whose first all-to-all sends the same in all, but otherwise shared out."""
    program = job_.programs[number_]
    at, template = next(
        (i, t) for i, t in enumerate(program.templates) if any(node.in_splits for node in t.nodes)
    )
    first = next(i for i, node in enumerate(template.nodes) if node.in_splits)
    a, b = template.nodes[first].in_splits
    nodes = list(template.nodes)
    nodes[first] = replace(nodes[first], in_splits=(a - 2, b + 2))
    changed = replace(template, nodes=tuple(nodes))
    return replace(program, templates=(*program.templates[:at], changed, *program.templates[at + 1 :]))


def test_the_official_reader_reads_splits() -> None:
    schema: Any = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    from stage.trace.decode import read_messages

    source = traces("megatron_moe", {"dp": 4, "ep": 4}, expert_load="zipf:1.1")
    data = source.rank(3)
    bounds = list(read_messages(data))[1:]
    parsed = [schema.Node.FromString(data[start:end]) for start, end in bounds]
    ours = list(source.nodes(3))
    checked = 0
    for theirs, node in zip(parsed, ours, strict=True):
        lists = {a.name: tuple(a.int64_list.values) for a in theirs.attr if a.name.endswith("_splits")}
        assert lists == {
            name: sizes(node, name) for name in ("in_splits", "out_splits") if name in node.attrs
        }
        checked += bool(lists)
    assert checked > 0
