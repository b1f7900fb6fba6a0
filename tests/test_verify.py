"""A valid hand-made set, broken in every way; each breach is found with its rule, its rank and its node."""

import dataclasses
import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stage.errors import TraceError
from stage.io.chakra import open_directory, write_directory
from stage.trace import wire
from stage.trace.node import Attribute, CommType, NodeType, TraceNode
from stage.trace.report import Defect, Report
from stage.trace.verify import verify

Nodes = list[TraceNode]
GROUPS: Mapping[str, Sequence[int]] = {"1": [0, 1], "2": [2, 3], "3": [0, 1, 2, 3]}
CPU = {"is_cpu_op": Attribute("bool_val", value=False)}


def comp(ident: int, *deps: int) -> TraceNode:
    attrs = {"num_ops": Attribute("int64_val", 1000), "tensor_size": Attribute("uint64_val", 64)}
    return TraceNode(ident, f"comp{ident}", NodeType.COMP, deps, attrs={**CPU, **attrs})


def coll(
    ident: int, *deps: int, kind: int = CommType.ALL_REDUCE, size: int = 4096, group: str | None
) -> TraceNode:
    attrs = {"comm_type": Attribute("int64_val", int(kind)), "comm_size": Attribute("int64_val", size)}
    if group is not None:
        attrs["pg_name"] = Attribute("string_val", group)
    return TraceNode(ident, f"coll{ident}", NodeType.COMM_COLL, deps, attrs={**CPU, **attrs})


def message(
    ident: int, kind: NodeType, peer: int, deps: tuple[int, ...], *, size: int, tag: int
) -> TraceNode:
    attrs = {
        "comm_size": Attribute("int64_val", size),
        "comm_tag": Attribute("int32_val", tag),
        "comm_dst" if kind == NodeType.COMM_SEND else "comm_src": Attribute("int32_val", peer),
    }
    return TraceNode(ident, f"message{ident}", kind, deps, attrs={**CPU, **attrs})


def send(ident: int, *deps: int, to: int, size: int = 512, tag: int = 1) -> TraceNode:
    return message(ident, NodeType.COMM_SEND, to, deps, size=size, tag=tag)


def recv(ident: int, *deps: int, of: int, size: int = 512, tag: int = 1) -> TraceNode:
    return message(ident, NodeType.COMM_RECV, of, deps, size=size, tag=tag)


def encode(nodes: Sequence[TraceNode], version: str = "1.0.0") -> bytes:
    return b"".join(map(wire.frame, (wire.encode_metadata(version), *map(wire.encode_node, nodes))))


@dataclass
class Bench:
    """A set in memory; `raw` overrides the bytes of a rank."""

    traces: dict[int, Nodes]
    groups: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=lambda: dict(GROUPS))
    world: int = 4
    raw: dict[int, bytes] = dataclasses.field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.traces)

    def rank(self, rank: int, /) -> bytes:
        return self.raw[rank] if rank in self.raw else encode(self.traces[rank])

    def change(self, rank: int, ident: int, change: Callable[[TraceNode], TraceNode]) -> None:
        self.traces[rank] = [change(node) if node.id == ident else node for node in self.traces[rank]]

    def drop(self, rank: int, ident: int) -> None:
        """Drop a node and hang its children on its parents."""
        gone = next(node for node in self.traces[rank] if node.id == ident)
        kept = [node for node in self.traces[rank] if node is not gone]
        for at, node in enumerate(kept):
            if ident in node.data_deps:
                deps = dict.fromkeys((*gone.data_deps, *(dep for dep in node.data_deps if dep != ident)))
                kept[at] = dataclasses.replace(node, data_deps=tuple(deps))
        self.traces[rank] = kept

    def attribute(self, rank: int, ident: int, name: str, member: str | None, value: Any = None) -> None:
        """Set or, with no member, remove an attribute of a node."""

        def change(node: TraceNode) -> TraceNode:
            attrs = {key: found for key, found in node.attrs.items() if key != name}
            if member is not None:
                attrs[name] = Attribute(member, value)
            return dataclasses.replace(node, attrs=attrs)

        self.change(rank, ident, change)


@pytest.fixture
def bench() -> Bench:
    """Two stages of two ranks: each reduces within its group; the first sends, the second receives and answers."""
    traces: dict[int, Nodes] = {}
    for rank in range(2):
        peer = rank + 2
        traces[rank] = [
            comp(1),
            coll(2, 1, group="1"),
            comp(3, 2),
            send(4, 3, to=peer),
            recv(5, 4, of=peer, tag=2, size=256),
            coll(6, 4, 5, group="1", kind=CommType.ALL_GATHER, size=64),
            coll(7, 6, group="3"),
        ]
        traces[peer] = [
            comp(1),
            recv(2, of=rank),
            comp(3, 1, 2),
            coll(4, 3, group="2"),
            comp(5, 4),
            send(6, 5, 4, to=rank, tag=2, size=256),
            coll(7, 6, group="2", kind=CommType.REDUCE_SCATTER),
            coll(8, 7, group="3"),
        ]
    return Bench(traces)


def only(report: Report) -> Defect:
    assert len(report.defects) == 1, report.defects
    return report.defects[0]


def found(report: Report) -> tuple[str, int | None, int | None]:
    defect = only(report)
    assert "\n" not in defect.message
    return defect.rule, defect.rank, defect.node


def test_valid_set_is_proved(bench: Bench) -> None:
    assert verify(bench) == Report((), (), (), 4, 30)
    assert verify(bench).ok


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: b"", "the trace is empty: write it again"),
        (lambda data: gzip.compress(data, mtime=0), "the trace is compressed with gzip: unpack it first"),
        (lambda data: data[:-1], "byte 500: a message of 76 bytes starts here but only 75 bytes follow"),
        (lambda _: random.Random(7).randbytes(500), "byte 1: wire type 4"),  # noqa: S311 - seeded test data
        (lambda data: data[8:], "byte 1: field 1 of the message here has wire type 0, not 2"),
        (
            lambda data: data + b"\x02\x08",
            "byte 577: a message of 2 bytes starts here but only 1 bytes follow",
        ),
        (lambda data: data + b"\x02\x0a\x00", "byte 578: field 1 of the message here has wire type 2, not 0"),
    ],
    ids=["empty", "gzip", "truncated", "random", "no metadata", "cut node", "metadata again"],
)
def test_file(bench: Bench, change: Callable[[bytes], bytes], text: str) -> None:
    bench.raw[2] = change(bench.rank(2))
    report = verify(bench)
    assert found(report) == ("file", 2, None)
    assert only(report).message.startswith(text)
    assert (
        report.unchecked[0]
        == "1 rank with defects of their own (the first: 2): not compared with the other ranks"
    )
    assert (report.ranks, report.nodes) == (3, 22)


def test_metadata_version(bench: Bench) -> None:
    bench.raw[1] = encode(bench.traces[1], version="")
    report = verify(bench)
    assert found(report) == ("metadata-version", 1, None)
    assert only(report).message == "the metadata has no version: write 0.0.4 or 1.0.0"
    bench.raw[1] = encode(bench.traces[1], version="2.0")
    assert verify(bench).ok
    assert verify(bench).warnings[0].rule == "metadata-version"


def test_rank_range(bench: Bench) -> None:
    bench.traces[4] = [comp(1)]
    assert found(verify(bench)) == ("rank-range", 4, None)


def test_no_nodes() -> None:
    lone = Bench({0: [comp(1)], 1: []}, {}, 2)
    assert found(verify(lone)) == ("no-nodes", 1, None)


def test_many_free_nodes_are_a_warning() -> None:
    report = verify(Bench({0: [comp(at) for at in range(3000)], 1: [comp(1)]}, {}, 2))
    assert report.ok
    assert [(warning.rule, warning.rank) for warning in report.warnings] == [("many-free", 0)]


# ------------------------------------------------------------------------------------ dependencies


def deps(*data: int, ctrl: tuple[int, ...] = ()) -> Callable[[TraceNode], TraceNode]:
    return lambda node: dataclasses.replace(node, data_deps=data, ctrl_deps=ctrl)


def test_id_repeated(bench: Bench) -> None:
    bench.traces[1].append(comp(3, 2))
    report = verify(bench)
    assert found(report) == ("id-repeated", 1, 3)
    assert (
        only(report).message == "messages 3 and 8 behind the metadata have this id: give every node its own"
    )
    assert report.unchecked == (
        "deadlock: not looked for, since dependencies of 1 rank (the first: 1) are broken",
    )


def test_dep_repeated(bench: Bench) -> None:
    bench.change(0, 3, deps(2, 1, 2))
    assert found(verify(bench)) == ("dep-repeated", 0, 3)
    assert only(verify(bench)).message == "'comp3' has node 2 in data_deps more than once: list it once"
    bench.change(0, 3, deps(2, ctrl=(2, 2)))
    assert found(verify(bench)) == ("dep-repeated", 0, 3)


@pytest.mark.parametrize("change", [deps(2, 3), deps(3), deps(2, ctrl=(3,))])
def test_dep_self(bench: Bench, change: Callable[[TraceNode], TraceNode]) -> None:
    bench.change(0, 3, change)
    assert found(verify(bench)) == ("dep-self", 0, 3)


@pytest.mark.parametrize("change", [deps(2, 99), deps(2, ctrl=(99,))])
def test_dep_unknown(bench: Bench, change: Callable[[TraceNode], TraceNode]) -> None:
    bench.change(0, 3, change)
    assert found(verify(bench)) == ("dep-unknown", 0, 3)


def test_dep_order(bench: Bench) -> None:
    nodes = bench.traces[0]
    nodes[0], nodes[1] = nodes[1], nodes[0]
    report = verify(bench)
    assert found(report) == ("dep-order", 0, 2)
    assert (
        only(report).message == "depends on node 1, which stands behind it in the file: write parents first"
    )


def test_dep_cycle(bench: Bench) -> None:
    bench.change(0, 2, deps(1, 6))
    report = verify(bench)
    assert found(report) == ("dep-cycle", 0, 2)
    assert (
        only(report).message
        == "waits for itself through node 6, node 4, node 3, node 2: no node of them can start"
    )


def test_cycle_is_told_from_the_forward_dependencies_around_it() -> None:
    nodes = [comp(1, 2), comp(2), comp(3, 4), comp(4, 3), comp(5, 4), comp(6, 7, 5), comp(7)]
    report = verify(Bench({0: nodes, 1: [comp(1)]}, {}, 2))
    assert [(defect.rule, defect.node) for defect in report.defects] == [
        ("dep-order", 1),
        ("dep-cycle", 3),
        ("dep-order", 6),
    ]


def test_no_start(bench: Bench) -> None:
    bench.change(0, 1, deps(3))
    assert {(defect.rule, defect.node) for defect in verify(bench).defects} == {
        ("no-start", None),
        ("dep-cycle", 1),
    }


def test_ctrl_only(bench: Bench) -> None:
    bench.change(0, 5, deps(ctrl=(4,)))
    report = verify(bench)
    assert found(report) == ("ctrl-only", 0, 5)
    assert (
        only(report).message == "runs behind node 4 by ctrl_deps only, which some ignore: add it to data_deps"
    )


def test_ctrl_deps_that_data_deps_imply_are_sound(bench: Bench) -> None:
    bench.change(0, 5, deps(4, ctrl=(4, 2)))
    assert verify(bench).ok


# --------------------------------------------------------------------------------- nodes and attributes


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (NodeType.INVALID, "INVALID, which breaks the final statistics of the simulator"),
        (NodeType.METADATA, "METADATA, which breaks the final statistics of the simulator"),
        (NodeType.MEM_LOAD, "MEM_LOAD, which breaks the final statistics of the simulator"),
        (NodeType.MEM_STORE, "MEM_STORE, which breaks the final statistics of the simulator"),
        (9, "of type 9, which is not in the schema"),
        (-1, "of type -1, which is not in the schema"),
    ],
)
def test_node_type(bench: Bench, kind: int, name: str) -> None:
    bench.change(1, 3, lambda node: dataclasses.replace(node, type=kind))
    report = verify(bench)
    assert found(report) == ("node-type", 1, 3)
    assert only(report).message == f"'comp3' is {name}: use COMP, COMM_SEND, COMM_RECV or COMM_COLL"


MEMBERS = [
    (0, 1, "is_cpu_op", "bool_val"),
    (0, 2, "is_cpu_op", "bool_val"),
    (0, 4, "is_cpu_op", "bool_val"),
    (0, 5, "is_cpu_op", "bool_val"),
    (0, 1, "num_ops", "int64_val"),
    (0, 1, "tensor_size", "uint64_val"),
    (0, 2, "comm_type", "int64_val"),
    (0, 2, "comm_size", "int64_val"),
    (0, 4, "comm_size", "int64_val"),
    (0, 4, "comm_dst", "int32_val"),
    (0, 4, "comm_tag", "int32_val"),
    (0, 5, "comm_size", "int64_val"),
    (0, 5, "comm_src", "int32_val"),
    (0, 5, "comm_tag", "int32_val"),
]


@pytest.mark.parametrize(("rank", "node", "name", "member"), MEMBERS)
def test_attr_missing(bench: Bench, rank: int, node: int, name: str, member: str) -> None:
    bench.attribute(rank, node, name, None)
    report = verify(bench)
    assert found(report) == ("attr-missing", rank, node)
    assert only(report).message.endswith(f"has no {name}: write it as {member}")


OPTIONAL = [
    (0, 2, "pg_name", "string_val", "1"),
    (0, 2, "comm_priority", "int32_val", 0),
    (0, 4, "comm_src", "int32_val", 0),
    (0, 5, "comm_dst", "int32_val", 0),
    (0, 1, "inputs", "string_list", ("x", "64")),
    (0, 1, "outputs", "string_list", ("y", "64")),
]


@pytest.mark.parametrize(("rank", "node", "name", "member"), [*MEMBERS, *(found[:4] for found in OPTIONAL)])
def test_attr_member(bench: Bench, rank: int, node: int, name: str, member: str) -> None:
    value: Any = next(
        (found.attrs[name].value for found in bench.traces[rank] if found.id == node and name in found.attrs),
        0,
    )
    wrong = "uint32_val" if isinstance(value, int) else "bytes_val"
    bench.attribute(rank, node, name, wrong, value.encode() if isinstance(value, str) else value)
    report = verify(bench)
    assert ("attr-member", rank, node) in [
        (defect.rule, defect.rank, defect.node) for defect in report.defects
    ]
    assert f"has {name} as {wrong}: write {member}" in report.defects[0].message


@pytest.mark.parametrize("optional", OPTIONAL)
def test_optional_attributes_are_sound(bench: Bench, optional: tuple[int, int, str, str, Any]) -> None:
    bench.attribute(*optional)
    assert verify(bench).ok


def test_attribute_without_a_value(bench: Bench) -> None:
    bench.attribute(0, 1, "num_ops", "", None)
    assert only(verify(bench)).message == "'comp1' has num_ops as nothing: write int64_val"


def test_attr_repeated(bench: Bench) -> None:
    node = wire.encode_node(bench.traces[0][0]) + wire.attribute("num_ops", "int64_val", 5)
    bench.raw[0] = encode([]) + wire.frame(node) + encode(bench.traces[0][1:])[8:]
    report = verify(bench)
    assert found(report) == ("attr-repeated", 0, 1)
    assert "has more than one 'num_ops'" in only(report).message


def test_own_attributes_are_no_concern(bench: Bench) -> None:
    bench.attribute(0, 1, "layer", "int32_val", 3)
    bench.attribute(0, 2, "num_ops", "float_val", 1.0)
    assert verify(bench).ok


@pytest.mark.parametrize(
    ("node", "change", "rule"),
    [
        (1, ("is_cpu_op", "bool_val", True), "cpu-op"),
        (1, ("num_ops", "int64_val", 0), "num-ops"),
        (1, ("num_ops", "int64_val", -5), "num-ops"),
        (1, ("tensor_size", "uint64_val", 0), "tensor-size"),
        (2, ("comm_type", "int64_val", CommType.REDUCE), "comm-type"),
        (2, ("comm_type", "int64_val", CommType.BARRIER), "comm-type"),
        (2, ("comm_type", "int64_val", 77), "comm-type"),
        (2, ("pg_name", "string_val", "tp"), "group-name"),
        (2, ("pg_name", "string_val", "-1"), "group-name"),
        (2, ("pg_name", "string_val", "01"), "group-name"),
        (2, ("pg_name", "string_val", "9" * 30), "group-name"),
        (2, ("pg_name", "string_val", "9"), "group-unknown"),
        (2, ("pg_name", "string_val", "2"), "group-member"),
        (4, ("comm_tag", "int32_val", -1), "comm-tag"),
        (4, ("comm_tag", "int32_val", 500_000_000), "comm-tag"),
        (4, ("comm_dst", "int32_val", 0), "self-message"),
        (5, ("comm_src", "int32_val", 0), "self-message"),
        (4, ("comm_dst", "int32_val", 4), "peer-range"),
        (4, ("comm_dst", "int32_val", -1), "peer-range"),
        (4, ("comm_src", "int32_val", 1), "own-rank"),
        (5, ("comm_dst", "int32_val", 1), "own-rank"),
    ],
)
def test_value_of_an_attribute(bench: Bench, node: int, change: tuple[str, str, Any], rule: str) -> None:
    bench.attribute(0, node, *change)
    rules = [defect.rule for defect in verify(bench).defects if defect.rank == 0 and defect.node == node]
    assert rules[0] == rule


@pytest.mark.parametrize(("node", "size"), [(2, 0), (4, 0), (5, -3)])
def test_comm_size(bench: Bench, node: int, size: int) -> None:
    for rank in range(4):
        for found_node in bench.traces[rank]:
            if "comm_size" in found_node.attrs:
                bench.attribute(rank, found_node.id, "comm_size", "int64_val", size)
    defects = [defect for defect in verify(bench).defects if (defect.rank, defect.node) == (0, node)]
    assert [defect.rule for defect in defects] == ["comm-size"]


def test_broadcast_says_which_consumer_fails(bench: Bench) -> None:
    for rank in (0, 1):
        bench.attribute(rank, 2, "comm_type", "int64_val", int(CommType.BROADCAST))
    report = verify(bench)
    assert [(defect.rule, defect.rank, defect.node) for defect in report.defects] == [
        ("comm-type", 0, 2),
        ("comm-type", 1, 2),
    ]
    expected = (
        "'coll2' is BROADCAST: ASTRA-sim replays it from duration_micros alone; use ALL_REDUCE, ALL_GATHER"
    )
    assert report.defects[0].message.startswith(expected)


# ---------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"0": [0, 1]}, "the groups have the key '0': number them in decimals from 1"),
        ({"tp": [0, 1]}, "the groups have the key 'tp': number them in decimals from 1"),
        ({"9": [0]}, "group 9 has 1 member: list only groups of two ranks and more"),
        ({"9": [0, 1, 0]}, "group 9 lists rank 0 more than once: list each member once, in ring order"),
        ({"9": [0, 4]}, "group 9 lists rank 4, but the ranks are 0 to 3"),
        ({"9": [0, -1]}, "group 9 lists rank -1, but the ranks are 0 to 3"),
    ],
)
def test_group_table(bench: Bench, table: dict[str, list[int]], text: str) -> None:
    report = verify(bench, groups={**GROUPS, **table})
    assert found(report) == ("group-table", None, None)
    assert only(report).message == text


def test_group_of_one_rank(bench: Bench) -> None:
    bench.groups = {**GROUPS, "4": [0]}
    bench.traces[0].append(coll(9, 7, group="4"))
    assert [(defect.rule, defect.rank, defect.node) for defect in verify(bench).defects] == [
        ("group-table", None, None),
        ("group-size", 0, 9),
    ]


def test_group_of_all_ranks_of_one() -> None:
    report = verify(Bench({0: [coll(1, group=None)]}, {}, 1))
    assert found(report) == ("group-size", 0, 1)
    assert [warning.rule for warning in report.warnings] == ["one-rank"]


@pytest.mark.parametrize("name", [None, "", "0"])
def test_no_group_means_all_ranks(bench: Bench, name: str | None) -> None:
    for rank, nodes in bench.traces.items():
        nodes[-1] = coll(20, nodes[-1].id - 1, group=name)
        bench.traces[rank] = nodes
    assert verify(bench).ok
    bench.drop(3, 20)
    assert found(verify(bench)) == ("collective-count", 3, None)


def test_group_numbers_beyond_the_simulator_are_warnings(bench: Bench) -> None:
    bench.groups = {**GROUPS, "2148": [0, 1], "501": [0, 1]}
    report = verify(bench)
    assert report.ok
    assert [warning.message for warning in report.warnings] == [
        "groups 1 and 501 of rank 0 share a range of tags in ASTRA-sim",
        "group numbers up to 2148, but ASTRA-sim overflows from 2148 on",
    ]


def test_set_without_groups_is_compared_by_use(bench: Bench) -> None:
    bench.groups = {}
    report = verify(bench)
    assert report.ok
    assert report.unchecked == (
        "process groups are not given: members of a group are taken to be the ranks that use it",
    )
    bench.attribute(1, 2, "comm_size", "int64_val", 8)
    assert found(verify(bench)) == ("collective-mismatch", 1, 2)


# --------------------------------------------------------------------------------- across ranks


def test_wrong_size_on_one_rank(bench: Bench) -> None:
    bench.attribute(1, 2, "comm_size", "int64_val", 2048)
    report = verify(bench)
    assert found(report) == ("collective-mismatch", 1, 2)
    assert only(report).message == (
        "collective 1 on group 1 is ALL_REDUCE of 2048 bytes, but on rank 0 ALL_REDUCE of 4096 bytes (node 2): "
        "all members must run the same"
    )
    assert report.unchecked == (
        "deadlock: not looked for, since collectives or messages do not match already",
    )


def test_odd_rank_out_is_the_one_reported(bench: Bench) -> None:
    bench.attribute(0, 7, "comm_size", "int64_val", 2048)
    assert found(verify(bench)) == ("collective-mismatch", 0, 7)


def test_wrong_type_on_one_rank(bench: Bench) -> None:
    bench.attribute(3, 7, "comm_type", "int64_val", int(CommType.ALL_GATHER))
    assert found(verify(bench)) == ("collective-mismatch", 3, 7)


def test_swapped_collectives_of_one_group(bench: Bench) -> None:
    a, b = bench.traces[1][1], bench.traces[1][5]
    bench.change(1, 2, lambda node: dataclasses.replace(node, attrs=b.attrs))
    bench.change(1, 6, lambda node: dataclasses.replace(node, attrs=a.attrs))
    assert found(verify(bench)) == ("collective-mismatch", 1, 2)


def test_dropped_collective(bench: Bench) -> None:
    bench.drop(2, 7)
    report = verify(bench)
    assert found(report) == ("collective-count", 3, 7)
    bench.drop(1, 2)
    assert ("collective-mismatch", 1, 6) in [
        (found.rule, found.rank, found.node) for found in verify(bench).defects
    ]


def test_dropped_collective_of_a_larger_group(bench: Bench) -> None:
    bench.drop(2, 8)
    report = verify(bench)
    assert found(report) == ("collective-count", 2, None)
    assert only(report).message == (
        "runs 0 collectives on group 3, but rank 0 1: node 7 of rank 0 has no partner here"
    )


def test_collectives_in_different_order_deadlock(bench: Bench) -> None:
    nodes = bench.traces[1]
    bench.traces[1] = [
        *nodes[:5],
        coll(6, 4, 5, group="3"),
        coll(7, 6, group="1", kind=CommType.ALL_GATHER, size=64),
    ]
    report = verify(bench)
    assert found(report) == ("deadlock", 0, 6)
    assert only(report).message == (
        "waits in ALL_GATHER of 64 bytes on group 1 for rank 1, which waits in node 6 (ALL_REDUCE of 4096 bytes on "
        "group 3) for rank 0"
    )


def test_send_unmatched(bench: Bench) -> None:
    bench.drop(2, 2)
    report = verify(bench)
    assert found(report) == ("send-unmatched", 0, 4)
    assert only(report).message == "sends 512 bytes to rank 2 with tag 1, which nobody receives"


def test_recv_unmatched(bench: Bench) -> None:
    bench.drop(0, 4)
    report = verify(bench)
    assert found(report) == ("recv-unmatched", 2, 2)
    assert only(report).message == "receives 512 bytes from rank 0 with tag 1, never sent"


def test_patched_peer(bench: Bench) -> None:
    bench.attribute(0, 4, "comm_dst", "int32_val", 3)
    assert [(defect.rule, defect.rank, defect.node) for defect in verify(bench).defects] == [
        ("recv-unmatched", 2, 2),
        ("send-unmatched", 0, 4),
    ]


def test_patched_tag(bench: Bench) -> None:
    bench.attribute(2, 6, "comm_tag", "int32_val", 5)
    assert [(defect.rule, defect.rank, defect.node) for defect in verify(bench).defects] == [
        ("recv-unmatched", 0, 5),
        ("send-unmatched", 2, 6),
    ]


def test_message_size(bench: Bench) -> None:
    bench.attribute(2, 2, "comm_size", "int64_val", 500)
    report = verify(bench)
    assert found(report) == ("message-size", 0, 4)
    assert only(report).message == (
        "sends 512 bytes to rank 2 with tag 1, but node 2 there receives 500: sizes must agree"
    )


def pair(first: Nodes, second: Nodes, groups: Mapping[str, Sequence[int]] | None = None) -> Report:
    return verify(Bench({0: first, 1: second}, groups or {}, 2))


def test_message_order() -> None:
    sends = [send(1, to=1, size=8), send(2, 1, to=1, size=16)]
    assert pair(sends, [recv(1, of=0, size=8), recv(2, 1, of=0, size=16)]).ok
    report = pair(sends, [recv(1, of=0, size=16), recv(2, 1, of=0, size=8)])
    assert found(report) == ("message-order", 0, 1)


def test_messages_of_equal_size_pair_in_number() -> None:
    sends = [send(1, to=1), send(2, 1, to=1), send(3, 2, to=1)]
    report = pair(sends, [recv(1, of=0), recv(2, 1, of=0)])
    assert found(report) == ("send-unmatched", 0, 3)


def test_receives_that_wait_for_each_other_deadlock() -> None:
    report = pair([recv(1, of=1), send(2, 1, to=1)], [recv(1, of=0), send(2, 1, to=0)])
    assert found(report) == ("deadlock", 0, 1)
    assert only(report).message == (
        "waits in receive from rank 1 of 512 bytes with tag 1 for rank 1, which waits in node 1 (receive from rank 0 "
        "of 512 bytes with tag 1) for rank 0"
    )


def test_deadlock_through_a_third_rank() -> None:
    groups = {"1": [0, 1], "2": [1, 2], "3": [0, 2]}
    traces = {
        0: [coll(1, group="1"), coll(2, 1, group="3")],
        1: [coll(1, group="2"), coll(2, 1, group="1")],
        2: [coll(1, group="3"), coll(2, 1, group="2")],
    }
    report = verify(Bench(traces, groups, 3))
    assert found(report) == ("deadlock", 0, 1)
    assert only(report).message.count("which waits in") == 2


def test_deadlock_of_a_receive_against_a_collective() -> None:
    groups = {"1": [0, 1]}
    report = pair([recv(1, of=1), coll(2, 1, group="1")], [coll(1, group="1"), send(2, 1, to=0)], groups)
    assert found(report) == ("deadlock", 0, 1)


def test_computations_carry_dependencies_between_communications() -> None:
    first = [recv(1, of=1), comp(2, 1), comp(3), comp(4, 2, 3), send(5, 4, to=1, tag=2)]
    second = [recv(1, of=0, tag=2), comp(2, 1), send(3, 2, to=0)]
    assert found(pair(first, second)) == ("deadlock", 0, 1)
    assert pair(first, [send(1, to=0), recv(2, 1, of=0, tag=2)]).ok


def test_sends_that_cross_are_sound_but_for_rendezvous() -> None:
    report = pair([send(1, to=1), recv(2, 1, of=1)], [send(1, to=0), recv(2, 1, of=0)])
    assert report.ok
    assert [(warning.rule, warning.rank, warning.node) for warning in report.warnings] == [
        ("rendezvous", 0, 1)
    ]
    assert pair([send(1, to=1), recv(2, of=1)], [send(1, to=0), recv(2, of=0)]).warnings == ()


def test_unchained_collectives_are_a_warning_and_run_by_id() -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    same = [comp(1), coll(2, group="1"), coll(3, 1, group="2")]
    report = pair(same, same, groups)
    assert report.ok
    assert [(warning.rule, warning.rank, warning.node) for warning in report.warnings] == [
        ("comm-unchained", 0, 3),
        ("comm-unchained", 1, 3),
    ]
    crossed = [coll(2, group="2"), coll(3, group="1")]
    assert found(pair(same, crossed, groups)) == ("deadlock", 0, 2)


def test_free_collectives_go_by_id_not_by_place_in_the_file() -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    assert pair([coll(9, group="1"), coll(4, group="2")], [coll(1, group="2"), coll(2, group="1")], groups).ok
    sizes = [coll(9, group="1", size=8), coll(4, group="1", size=16)]
    assert pair(sizes, [coll(1, group="1", size=16), coll(2, group="1", size=8)], groups).ok
    crossed = [coll(1, group="1", size=8), coll(2, group="1", size=16)]
    assert found(pair(sizes, crossed, groups)) == ("collective-mismatch", 1, 1)


def test_collectives_that_meet_out_of_order_in_the_run() -> None:
    groups = {"1": [0, 1]}
    first = [comp(1), comp(2, 1), coll(3, 2, group="1", size=8), coll(4, group="1", size=16)]
    second = [coll(3, group="1", size=8), coll(4, 3, group="1", size=16)]
    report = pair(first, second, groups)
    assert found(report)[0] == "collective-order"
    assert "meets ALL_REDUCE of" in only(report).message


# ------------------------------------------------------------------------------------- whole sets


def test_missing_ranks_are_said_and_the_rest_is_checked(bench: Bench) -> None:
    del bench.traces[2]
    report = verify(bench)
    assert report.ok
    assert report.unchecked == (
        "1 rank of 4 without a file (the first: 2): the other side of their collectives and messages is taken to be "
        "right",
    )
    bench.attribute(1, 2, "comm_size", "int64_val", 2048)
    assert found(verify(bench)) == ("collective-mismatch", 1, 2)


def test_sample_of_a_large_set() -> None:
    traces = {rank: [comp(1), coll(2, 1, group=None)] for rank in range(100)}
    report = verify(Bench(traces, {}, 100), exhaustive=False)
    assert report.ok
    assert report.ranks == 32
    assert report.unchecked == ("68 of 100 ranks were not read",)


def test_defects_of_a_rule_are_limited_by_rank(bench: Bench) -> None:
    bench.traces[0] += [dataclasses.replace(comp(at), attrs=CPU) for at in range(100, 150)]
    report = verify(bench)
    rules = [(defect.rank, defect.rule) for defect in report.defects]
    assert rules == [(0, "attr-missing")] * 21
    assert report.defects[-1] == Defect(0, None, "attr-missing", "80 more like those above")


def test_source_that_cannot_be_read_is_a_defect(bench: Bench) -> None:
    class Broken(Bench):
        def rank(self, rank: int, /) -> bytes:
            if rank == 3:
                raise TraceError("disk on fire: call someone")
            return super().rank(rank)

    report = verify(Broken(bench.traces))
    assert report.defects == (Defect(3, None, "file", "disk on fire: call someone"),)


def test_report_as_json_and_text(bench: Bench) -> None:
    bench.attribute(1, 2, "comm_size", "int64_val", 2048)
    report = verify(bench)
    content = json.loads(report.to_json())
    assert content["ok"] is False
    assert content["defects"][0]["rule"] == "collective-mismatch"
    assert report.to_json() == verify(bench).to_json()
    assert str(report.defects[0]).startswith("rank 1 node 2: collective 1 on group 1")
    assert str(Defect(None, None, "x", "y")) == "set: y [x]"


def test_folder_is_verified(bench: Bench, tmp_path: Path) -> None:
    write_directory(tmp_path / "out", 4, range(4), bench.rank, bench.groups, {})
    assert verify(open_directory(tmp_path / "out")).ok
    (tmp_path / "out/trace.3.et").write_bytes(b"")
    report = verify(open_directory(tmp_path / "out"))
    assert found(report) == ("file", 3, None)


def test_traces_of_the_official_module_are_verified(bench: Bench) -> None:
    schema: Any = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    for rank in range(4):
        parts = [wire.frame(schema.GlobalMetadata(version="0.0.4").SerializeToString())]
        for node in bench.traces[rank]:
            theirs = schema.Node(id=node.id, name=node.name, type=node.type, data_deps=node.data_deps)
            for name, attribute in reversed(list(node.attrs.items())):
                theirs.attr.add(name=name, **{attribute.member: attribute.value})
            parts.append(wire.frame(theirs.SerializeToString()))
        bench.raw[rank] = b"".join(parts)
    assert verify(bench) == Report((), (), (), 4, 30)


def test_random_damage_never_raises(bench: Bench) -> None:
    chance = random.Random(11)  # noqa: S311 - seeded test data
    for _ in range(300):
        data = bytearray(bench.rank(1))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        verify(dataclasses.replace(bench, raw={1: bytes(data)})).to_json()
