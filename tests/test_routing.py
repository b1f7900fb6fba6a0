"""Tokens one by one: routed to their experts and moved over the mesh, they are as many as the formulas say."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from stage.errors import StrategyError
from stage.graph import Graph, Node
from stage.layout import Layout
from stage.passes.backward import Differentiated
from stage.request import Request
from stage.synthesis import sharded_block, symbol_values
from stage.trace.concrete import Concrete
from stage.trace.exchange import EXCHANGES, Exchange
from stage.trace.lower import Lowered, lower
from stage.trace.routing import Routing, holds_tokens, make_routing, variant_atoms
from stage.trace.template import TemplateNode
from tests.small import name_of, request

EXPERTS, TOP_K = 8, 2
WIDTH = 2
CASES: list[tuple[str, dict[str, int]]] = [
    ("megatron_moe", {"dp": 4, "ep": 2}),
    ("megatron_moe", {"dp": 2, "tp": 2, "ep": 4}),
    ("megatron_moe", {"dp": 2, "cp": 2, "tp": 2, "ep": 8}),
    ("megatron_moe", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
    ("megatron", {"dp": 2, "tp": 2, "ep": 4}),
    ("megatron", {"dp": 2, "tp": 4, "ep": 4, "etp": 2}),
    ("ddp", {"dp": 2}),
]
Place = Mapping[str, int]


@dataclass(frozen=True)
class Slot:
    """One visit of a token to an expert: where it came from, and which of the expert's slots it takes."""

    expert: int
    source: Place
    index: int
    of: int


@dataclass(frozen=True)
class Case:
    """A block of experts on a mesh under a load."""

    job: Request
    both: Differentiated
    routing: Routing

    @property
    def sizes(self) -> dict[str, int]:
        return symbol_values(self.job)

    @property
    def graphs(self) -> tuple[Graph, Graph]:
        return self.both.forward, self.both.backward

    def places(self) -> Iterator[dict[str, int]]:
        for at in np.ndindex(*(degree for _, degree in self.job.mesh.atoms)):
            yield dict(zip(self.job.mesh.names, at, strict=True))

    def concrete(self, place: Place, *, pairwise: bool = False) -> Concrete:
        dtypes = {"compute": self.job.dtype, "gradient": self.job.grad_dtype}
        return Concrete(
            self.sizes, self.job.mesh, dtypes, place=place, routing=self.routing, pairwise=pairwise
        )


def case(strategy: str, mesh: dict[str, int], load: str = "zipf:1.5", **options: Any) -> Case:
    sizes = {"experts": EXPERTS, "top_k": TOP_K}
    job = request(
        "mixtral-8x7b", strategy, sizes=sizes, **mesh, batch=8, micro_batch=2, expert_load=load, **options
    )
    both = sharded_block(job, job.model.layers[0])
    assert job.expert_load is not None
    factor, padded = job.strategy.capacity_factor, job.strategy.pad_to_capacity
    graphs = (both.forward, both.backward)
    routing = make_routing(
        job.expert_load.row(0), graphs, symbol_values(job), job.mesh, factor, padded=padded
    )
    return Case(job, both, routing)


def atoms_of_sources(case: Case) -> tuple[str, ...]:
    """The atoms by which tokens are sharded before they are dispatched, major first."""
    node = next(n for n in case.both.forward.nodes if n.op == "permute_tokens")
    return case.both.forward.layouts[node.outputs[0]].dims[1]


def route(case: Case) -> list[Slot]:
    """Route every token of every source to different experts, and number the slots of each expert by source."""
    mesh, atoms = case.job.mesh, atoms_of_sources(case)
    parts = case.routing.sources // mesh.degree(atoms)
    tokens = case.job.sizes["batch"] * case.job.sizes["seq"] // case.routing.sources
    dealt = np.repeat(np.arange(EXPERTS), case.routing.slots)
    taken: Counter[int] = Counter()
    total = Counter({e: int(n) * case.routing.sources for e, n in enumerate(case.routing.slots)})
    found = []
    for at in np.ndindex(*(mesh.degree(atom) for atom in atoms)):
        source = dict(zip(atoms, at, strict=True))
        for _ in range(parts):
            for token in range(tokens):
                experts = dealt[token::tokens].tolist()
                assert len(set(experts)) == len(experts) <= TOP_K
                for expert in experts:
                    found.append(Slot(expert, source, taken[expert], total[expert]))
                    taken[expert] += 1
    assert taken == +total
    return found


def is_shard(number: int, of: int, atoms: Sequence[str], place: Place, case: Case) -> bool:
    """Whether element `number` of `of` is in the shard of a place, counted in order."""
    own = 0
    for atom in atoms:
        own = own * case.job.mesh.degree(atom) + place[atom]
    return number * case.job.mesh.degree(atoms) // of == own


def has(slot: Slot, layout: Layout, place: Place, case: Case) -> bool:
    """Whether the device at a place holds a slot: its expert, and the source it came from or its part of the slots."""
    experts, slots = layout.dims[:2]
    if not is_shard(slot.expert, EXPERTS, experts, place, case):
        return False
    if set(slots) <= set(slot.source):
        return all(place[atom] == slot.source[atom] for atom in slots)
    return is_shard(slot.index, slot.of, slots, place, case)


def token_nodes(case: Case) -> Iterator[tuple[Graph, Node]]:
    """Nodes that move tokens between devices, once for each tensor with a hidden size."""
    for graph in case.graphs:
        for node in graph.nodes:
            tensor = graph.tensors[node.inputs[0]]
            if (
                "step" in node.attrs
                and node.op in EXCHANGES
                and holds_tokens(tensor)
                and len(tensor.dims) == 3
            ):
                yield graph, node


def lowered(case: Case, place: Place, *, pairwise: bool = False) -> Lowered:
    return lower(case.both, case.concrete(place, pairwise=pairwise))


def named(templates: Lowered, name: str) -> TemplateNode:
    return next(n for n in (*templates.forward.nodes, *templates.backward.nodes) if n.name == name)


@pytest.mark.parametrize(("strategy", "mesh"), CASES, ids=name_of)
def test_what_is_exchanged_is_what_tokens_one_by_one_move(strategy: str, mesh: dict[str, int]) -> None:
    asked = case(strategy, mesh)
    slots, names = route(asked), asked.job.mesh.names
    by_place = {tuple(place.values()): lowered(asked, place) for place in asked.places()}
    hidden = asked.sizes["d_model"] * WIDTH
    checked = 0
    for graph, node in token_nodes(asked):
        before, after = graph.layouts[node.inputs[0]], graph.layouts[node.outputs[0]]
        axes = node.attrs["step"].axes
        for place in asked.places():
            found = named(by_place[tuple(place.values())], node.name)
            others = [tuple(dict(zip(names, r, strict=True)).items()) for r in members(place, axes, asked)]
            expected = [
                (
                    count(slots, before, place, after, dict(other), asked),
                    count(slots, before, dict(other), after, place, asked),
                )
                for other in others
            ]
            assert found.in_splits == tuple(sent * hidden for sent, _ in expected)
            assert found.out_splits == tuple(received * hidden for _, received in expected)
            held = [
                sum(has(slot, layout, dict(other), asked) for slot in slots)
                for other in others
                for layout in (before, after)
            ]
            assert found.bytes == max(held) * hidden
        checked += 1
    assert checked == (0 if strategy == "ddp" else 4) or strategy == "megatron"


def members(place: Place, axes: Sequence[str], case: Case) -> list[tuple[int, ...]]:
    """The places of the group over `axes` that a place belongs to, the last axis varying fastest."""
    coordinates = np.ndindex(*(case.job.mesh.degree(atom) for atom in axes))
    return [tuple({**place, **dict(zip(axes, at, strict=True))}.values()) for at in coordinates]


def count(slots: Sequence[Slot], before: Layout, here: Place, after: Layout, there: Place, case: Case) -> int:
    return sum(has(slot, before, here, case) and has(slot, after, there, case) for slot in slots)


@pytest.mark.parametrize(("strategy", "mesh"), CASES, ids=name_of)
def test_experts_work_on_the_tokens_that_they_get(strategy: str, mesh: dict[str, int]) -> None:
    asked = case(strategy, mesh)
    slots, job = route(asked), asked.job
    graph = asked.both.forward
    node = next(n for n in graph.nodes if n.name == "moe.experts.down_proj")
    layout = graph.layouts[node.inputs[0]]
    hidden = job.sizes["expert_d_ff"] // job.degrees["etp"]
    total = 0
    for place in asked.places():
        here = [slot for slot in slots if has(slot, layout, place, asked)]
        kernels = [n for n in lowered(asked, place).forward.nodes if n.name == node.name]
        assert len(kernels) == (1 if here else 0)
        if here:
            (kernel,) = kernels
            assert kernel.flops == kernel.model_flops == 2 * len(here) * hidden * job.sizes["d_model"]
            weights = len({slot.expert for slot in here}) * hidden * job.sizes["d_model"]
            rows = len(here) * (hidden + job.sizes["d_model"])
            assert kernel.bytes == WIDTH * (weights + rows)
            total += kernel.flops
    copies = job.mesh.world // job.mesh.degree((*layout.sharding,))
    assert total == copies * 2 * len(slots) * job.sizes["expert_d_ff"] * job.sizes["d_model"]


@pytest.mark.parametrize(("strategy", "mesh"), CASES, ids=name_of)
@pytest.mark.parametrize("pairwise", [False, True])
def test_devices_differ_over_the_variant_atoms_alone(
    strategy: str, mesh: dict[str, int], pairwise: bool
) -> None:
    asked = case(strategy, mesh)
    atoms = variant_atoms(asked.graphs, asked.routing, pairwise=pairwise)
    seen: dict[tuple[int, ...], Lowered] = {}
    for place in asked.places():
        key = tuple(place[atom] for atom in sorted(atoms))
        found = lowered(asked, place, pairwise=pairwise)
        assert seen.setdefault(key, found) == found
    assert len({str(templates) for templates in seen.values()}) > 1 or len(seen) == 1, "devices do differ"


@pytest.mark.parametrize(("strategy", "mesh"), CASES, ids=name_of)
def test_messages_of_a_pairwise_exchange_are_its_splits(strategy: str, mesh: dict[str, int]) -> None:
    asked = case(strategy, mesh, "zipf:4")
    whole = {tuple(place.values()): lowered(asked, place) for place in asked.places()}
    for place in asked.places():
        single, apart = (
            [node for part in (found.forward, found.backward) for node in part.nodes]
            for found in (whole[tuple(place.values())], lowered(asked, place, pairwise=True))
        )
        assert not [node for node in apart if node.kind in EXCHANGES]
        for node in (n for n in single if n.kind in EXCHANGES):
            n = len(node.in_splits)
            own = members(place, node.axes, asked).index(tuple(place.values()))
            expected = []
            for k in range(1, n):
                to, source = (own + k) % n, (own - k) % n
                expected += [("send", k, node.in_splits[to])] * (node.in_splits[to] > 0)
                expected += [("recv", n - k, node.out_splits[source])] * (node.out_splits[source] > 0)
            found = messages_of(node.name, apart)
            assert [(m.kind, m.peer.offset, m.bytes) for m in found if m.peer] == expected
            assert {m.peer.atoms for m in found if m.peer} <= {node.axes}
            assert len({m.tag_offset for m in found}) <= 1
        tags = Counter((m.tag_offset, m.peer, m.kind) for m in apart if m.peer is not None)
        assert not tags or max(tags.values()) == 1


def messages_of(collective: str, nodes: Sequence[TemplateNode]) -> list[TemplateNode]:
    """The messages that stand for a collective."""
    return [
        n
        for n in nodes
        if n.peer is not None and re.fullmatch(r"(send|recv)\d+", n.name.removeprefix(f"{collective}."))
    ]


def test_an_idle_device_has_no_kernel_and_no_message_but_takes_part_in_collectives() -> None:
    asked = case("megatron_moe", {"dp": 4, "ep": 4}, "zipf:20", seed=1)
    idle = next(
        place
        for place in asked.places()
        if not asked.routing.slots[2 * place["dp"] : 2 * place["dp"] + 2].any()
    )
    nodes = [n for part in (lowered(asked, idle).forward, lowered(asked, idle).backward) for n in part.nodes]
    assert not [n for n in nodes if n.kind == "compute" and ("experts" in n.name or "sort" in n.name)]
    assert all(n.flops > 0 and n.bytes > 0 for n in nodes if n.kind == "compute")
    dispatch = named(lowered(asked, idle), "moe.permute.all_to_all")
    assert sum(dispatch.out_splits) == 0 < sum(dispatch.in_splits) < dispatch.bytes
    apart = lowered(asked, idle, pairwise=True)
    messages = [n for part in (apart.forward, apart.backward) for n in part.nodes if n.peer is not None]
    assert all(n.bytes > 0 for n in messages)
    assert {n.kind for n in messages_of("moe.permute.all_to_all", messages)} == {"send"}
    assert {n.kind for n in messages_of("moe.unsort.all_to_all", messages)} == {"recv"}


def test_dropped_and_padded_tokens() -> None:
    mesh = {"dp": 4, "ep": 2}
    free, dropped = case("megatron_moe", mesh), case("megatron_moe", mesh, capacity_factor=1.25)
    padded = case("megatron_moe", mesh, capacity_factor=1.25, pad_to_capacity=True)
    tokens = free.job.sizes["batch"] * free.job.sizes["seq"] // free.routing.sources
    capacity = -(-5 * tokens * TOP_K // (4 * EXPERTS))
    assert free.routing.slots.sum() == tokens * TOP_K
    assert dropped.routing.slots.tolist() == [min(n, capacity) for n in free.routing.slots.tolist()]
    assert padded.routing.slots.tolist() == [capacity] * EXPERTS
    assert padded.routing.filled.tolist() == dropped.routing.slots.tolist()
    work = {}
    for name, asked in (("free", free), ("dropped", dropped), ("padded", padded)):
        nodes = [named(lowered(asked, place), "moe.experts.down_proj") for place in asked.places()]
        work[name] = sum(n.flops for n in nodes), sum(n.model_flops for n in nodes)
    assert work["dropped"][0] * int(free.routing.slots.sum()) == work["free"][0] * int(
        dropped.routing.slots.sum()
    )
    assert work["dropped"][0] == work["dropped"][1] == work["padded"][1]
    assert work["padded"][0] == 4 * capacity * EXPERTS * 2 * 64 * 32


def test_tokens_that_do_not_divide_by_their_sources_are_refused() -> None:
    asked = case("megatron_moe", {"dp": 2, "tp": 2, "ep": 2})
    sizes = {**asked.sizes, "batch": 1, "seq": 30}
    with pytest.raises(
        StrategyError, match=r"^30 tokens of a micro-batch do not divide by the 4 ranks that route "
    ):
        make_routing((1,) * EXPERTS, asked.graphs, sizes, asked.job.mesh, None, padded=False)


def test_an_exchange_scales_to_bytes() -> None:
    assert Exchange((1, 2), (0, 3), 1).scaled(4) == Exchange((4, 8), (0, 12), 1)
