"""Byte images: a rank's bytes decode to exactly the nodes that its program means, encoded one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from stage.synthesis import job as make_job
from stage.trace.image import COLLECTIVE_TYPES, NameStyle
from stage.trace.job import Job
from stage.trace.node import Attribute, NodeType, TraceNode
from stage.trace.peer import Peer
from stage.trace.program import COLUMNS, PIPELINE_PHASES, PORTS, Program
from stage.trace.template import EARLIER, Ref, Template, TemplateNode
from stage.trace.wire import encode_metadata, encode_node, frame, read_trace
from stage.traceset import TraceSet
from tests.small import name_of, request

JOBS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama3-8b", "megatron_sp", {"pp": 2, "dp": 2, "tp": 2, "batch": 6}),
    ("llama3-8b", "megatron", {"pp": 2, "dp": 2, "tp": 4, "batch": 24, "schedule": "gpipe", "steps": 2}),
    ("mixtral-8x7b", "megatron_moe", {"dp": 2, "tp": 2, "ep": 4, "steps": 2, "grad_reduce": "microbatch"}),
    ("mixtral-8x7b", "megatron", {"dp": 2, "tp": 2, "ep": 4}),
    (
        "gpt3-125m",
        "fsdp",
        {"pp": 3, "dp": 2, "cp": 2, "batch": 8, "stage_layers": (1, 10, 1), "sizes": {"layers": 12}},
    ),
    ("gpt3-125m", "megatron_sp", {"pp": 2, "tp": 2, "zero": 1, "recompute": "full"}),
    ("deepseek-v3", "hsdp", {"dp": 4, "dp_shard": 2, "batch": 8}),
    (
        "llama3-8b",
        "megatron_sp",
        {"pp": 2, "tp": 2, "batch": 4, "schedule": "interleaved", "steps": 2, "sizes": {"layers": 4}},
    ),
    (
        "llama3-8b",
        "fsdp",
        {"pp": 2, "dp": 2, "batch": 8, "schedule": "zb-h1", "vpp": 2, "sizes": {"layers": 4}},
    ),
    (
        "llama3-8b",
        "megatron",
        {"pp": 2, "batch": 4, "schedule": "zb-v", "recompute": "full", "sizes": {"layers": 4}},
    ),
    (
        "gpt3-125m",
        "megatron",
        {
            "pp": 2,
            "dp": 2,
            "batch": 8,
            "schedule": "dualpipe-v",
            "grad_reduce": "microbatch",
            "sizes": {"layers": 4},
        },
    ),
]


@dataclass(frozen=True)
class Instance:
    """A row of a program's columns."""

    template: Template
    numbers: Mapping[str, int]
    ports: tuple[int, ...]


def instances(program: Program) -> list[Instance]:
    """All instances, by their first ids."""
    found = [
        Instance(template, dict(zip(COLUMNS, row, strict=False)), tuple(row[PORTS:]))
        for template, rows in zip(program.templates, program.instances, strict=True)
        for row in rows.tolist()
    ]
    return sorted(found, key=lambda instance: instance.numbers["base"])


def expected(job: Job, rank: int) -> Iterator[TraceNode]:
    """The nodes of a rank, straight from its program."""
    traces = TraceSet.of(job)
    position = traces.classes.position(rank)
    program = job.programs[traces.classes.of(rank)]
    for instance in instances(program):
        for index, node in enumerate(instance.template.nodes):
            yield TraceNode(
                id=instance.numbers["base"] + index,
                name=name(node, instance, job.style),
                type=NODE_TYPES.get(node.kind, NodeType.COMM_COLL),
                data_deps=tuple(dict.fromkeys(dependencies(node, instance))),
                attrs=dict(attributes(traces, node, instance, position, job.style)),
            )


NODE_TYPES = {"compute": NodeType.COMP, "send": NodeType.COMM_SEND, "recv": NodeType.COMM_RECV}


def dependencies(node: TemplateNode, instance: Instance) -> Iterator[int]:
    ports = dict(zip(instance.template.ports, instance.ports, strict=True))

    def target(ref: Ref) -> int:
        if ref.kind == "port":
            return ports[str(ref.target)]
        assert ref.kind in ("self", *EARLIER)
        return int(ref.target) + instance.numbers["base" if ref.kind == "self" else ref.kind]

    return (found for found in map(target, node.deps) if found >= 0)


def name(node: TemplateNode, instance: Instance, style: NameStyle) -> str:
    template, numbers = instance.template, instance.numbers
    digits = {"layer": style.layer, "bucket": template.digits}
    which = "".join(f"{numbers[key]:0{n}}" for key, n in digits.items() if key in template.numbers)
    text = f"{template.block}{which}.{node.name}/{node.phase}"
    if "micro_batch" in template.numbers:
        text += f"/mb{numbers['micro_batch']:0{style.micro_batch}}"
    return text + (f"/step{numbers['step']:0{style.step}}" if style.step else "")


def attributes(
    traces: TraceSet, node: TemplateNode, instance: Instance, position: int, style: NameStyle
) -> Iterator[tuple[str, Attribute]]:
    yield "is_cpu_op", Attribute("bool_val", False)
    if node.kind == "compute":
        yield "num_ops", Attribute("int64_val", node.flops)
        yield "tensor_size", Attribute("uint64_val", node.bytes)
    elif node.kind in COLLECTIVE_TYPES:
        yield "comm_type", Attribute("int64_val", int(COLLECTIVE_TYPES[node.kind]))
        yield "comm_size", Attribute("int64_val", node.bytes)
        yield "pg_name", Attribute("string_val", group_of(traces, node.axes, position))
        yield "axes", Attribute("string_val", " ".join(node.axes))
    else:
        assert node.peer is not None
        here, there = rank_at(traces, position), rank_at(traces, peer_of(traces, position, node.peer))
        src, dst = (here, there) if node.kind == "send" else (there, here)
        yield "comm_size", Attribute("int64_val", node.bytes)
        yield "comm_src", Attribute("int32_val", src)
        yield "comm_dst", Attribute("int32_val", dst)
        yield "comm_tag", Attribute("int32_val", instance.numbers["tag"])
    texts = {"op": node.op, "phase": node.phase, "dtype": node.dtype, "shapes": node.shapes}
    texts["part"] = instance.template.part
    if "pipeline_phase" in instance.template.numbers:
        texts["pipeline_phase"] = PIPELINE_PHASES[instance.numbers["pipeline_phase"]]
    yield from ((key, Attribute("string_val", text)) for key, text in texts.items() if text)
    for key in set(instance.template.numbers) - {"bucket", "pipeline_phase"}:
        yield key, Attribute("int32_val", instance.numbers[key])
    if style.step:
        yield "step", Attribute("int32_val", instance.numbers["step"])


def rank_at(traces: TraceSet, position: int) -> int:
    placement = traces.classes.placement
    return position if placement is None else int(placement[position])


def peer_of(traces: TraceSet, position: int, peer: Peer) -> int:
    """The position so much further along some axes, found among the ranks of the group and not by formula."""
    (row,) = [row for row in traces.classes.mesh.groups(peer.atoms).tolist() if position in row]
    return int(row[(row.index(position) + peer.offset) % len(row)])


def group_of(traces: TraceSet, axes: tuple[str, ...], position: int) -> str:
    """The group over some axes that has the rank, found in the table and not by formula."""
    table, rank = traces.groups, rank_at(traces, position)
    groups = traces.classes.groups
    numbers = range(groups.first[axes], groups.first[axes] + groups.groups(axes))
    return next(str(number) for number in numbers if rank in table[str(number)])


@pytest.mark.parametrize(("model", "strategy", "options"), JOBS, ids=name_of)
def test_bytes_decode_to_the_nodes_of_the_program(model: str, strategy: str, options: dict[str, Any]) -> None:
    job = make_job(request(model, strategy, **options))
    check_ranks(job)


def test_bytes_decode_to_the_nodes_of_the_program_on_a_permuted_placement() -> None:
    placement = (5, 3, 0, 7, 1, 6, 2, 4)
    check_ranks(make_job(request("llama3-8b", "megatron_sp", pp=2, dp=2, tp=2, batch=6, placement=placement)))


def check_ranks(job: Job) -> None:
    traces = TraceSet.of(job)
    for rank in sorted({0, 1, traces.world // 2, traces.world - 1}):
        metadata, nodes = read_trace(traces.rank(rank))
        assert metadata.version == "1.0.0"
        found, wanted = list(nodes), list(expected(job, rank))
        for a, b in zip(found, wanted, strict=True):
            assert a == b


def test_an_image_is_longer_than_a_plain_encoding_by_its_padding_alone() -> None:
    job = make_job(request("llama3-8b", "megatron_sp", pp=2, dp=2, tp=2, batch=6))
    plain = frame(encode_metadata("1.0.0")) + b"".join(frame(encode_node(node)) for node in expected(job, 0))
    assert len(plain) < len(TraceSet.of(job).rank(0)) < 1.25 * len(plain)
    assert list(read_trace(plain)[1]) == list(TraceSet.of(job).nodes(0))


@pytest.mark.parametrize(("model", "strategy", "options"), JOBS, ids=name_of)
def test_ids_ascend_and_dependencies_point_back_once(
    model: str, strategy: str, options: dict[str, Any]
) -> None:
    traces = TraceSet.of(make_job(request(model, strategy, **options)))
    for rank in (0, traces.world - 1):
        ids = []
        for node in traces.nodes(rank):
            assert len(set(node.data_deps)) == len(node.data_deps)
            assert all(0 <= dep < node.id for dep in node.data_deps)
            assert not node.ctrl_deps
            ids.append(node.id)
        assert ids == list(range(len(ids)))
