"""Ring attention written out: its text, its work, what goes round, and what waits for what."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stage.errors import StageError
from stage.graph import Graph, format_graph
from stage.passes.backward import Differentiated
from stage.request import Request
from stage.strategy import parse_strategy
from stage.synthesis import job, sharded_block
from stage.trace.peer import Peer
from stage.trace.template import Template, TemplateNode
from tests.small import name_of, request
from tests.test_passes_legality import blocks, checker

CONTEXTS: list[tuple[str, dict[str, int]]] = [
    ("ring", {"cp": 2}),
    ("ring", {"cp": 4, "tp": 2}),
    ("ring", {"cp": 2, "tp": 4}),
    ("ulysses", {"cp": 2, "tp": 2}),
    ("ulysses", {"cp": 4}),
    ("ring:2x2", {"cp": 4, "tp": 1}),
    ("ring:4x2", {"cp": 8}),
]
MODELS = ("llama3-8b", "gpt-oss-20b", "deepseek-v3")


def layer(job: Request) -> Differentiated:
    return sharded_block(job, job.model.layers[-1])


def core(graph: Graph) -> str:
    """The lines of a graph that have to do with the attention core."""
    return "\n".join(line for line in format_graph(graph).splitlines() if "core" in line)


@pytest.mark.parametrize("context", ["ring", "ulysses", "ring:2x2"])
def test_a_core_is_written_out_as_written_down(context: str, golden: Callable[[str, str], None]) -> None:
    pair = layer(request("llama3-8b", "megatron", cp=4, context=context))
    name = context.replace(":", "-")
    golden(f"context/{name}.txt", f"{core(pair.forward)}\n\n{core(pair.backward)}\n")


def test_one_rank_is_no_ring() -> None:
    for context in ("ring", "ulysses"):
        plain, other = (
            layer(request("llama3-8b", "megatron", tp=2, context=x)) for x in ("all_gather", context)
        )
        assert format_graph(plain.forward) == format_graph(other.forward)
        assert format_graph(plain.backward) == format_graph(other.backward)


@pytest.mark.parametrize(("context", "mesh"), CONTEXTS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_every_node_is_legal(model: str, context: str, mesh: dict[str, int], policy: str) -> None:
    one = request(model, "megatron_sp", **mesh, context=context, recompute=policy)
    for _, both in blocks(one):
        assert [*checker(one).defects(both.forward), *checker(one).defects(both.backward)] == []


def nodes(one: Request, part: str) -> Iterator[TemplateNode]:
    """The nodes of one part of the attention layers of rank 0, each block once."""
    kinds = {block.kind for block in one.model.layers}
    for template in job(one).programs[0].templates:
        if template.block in kinds and (template.phase, template.part) == (part, ""):
            yield from template.nodes


@pytest.mark.parametrize(("context", "mesh"), CONTEXTS, ids=name_of)
@pytest.mark.parametrize("options", [{}, {"mask": "full"}, {"seq": 64}], ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_the_work_of_the_steps_is_that_of_the_whole(
    model: str, context: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    """Exactly, although a window leaves each step another part of the pairs."""
    for part in ("forward", "backward"):
        sums = []
        for name in ("all_gather", context):
            own = nodes(request(model, "megatron", **mesh, context=name, **options), part)
            cores = [node for node in own if node.op in ("attention", "attention_backward")]
            sums.append((sum(n.flops for n in cores), sum(n.model_flops for n in cores), len(cores)))
        assert sums[0][:2] == sums[1][:2]
        ring = request(model, "megatron", **mesh, context=context).strategy.contexts.circulates
        assert (sums[1][2] > sums[0][2]) == ring


def test_steps_in_which_nobody_meets_a_key_are_skipped_but_blocks_pass_on() -> None:
    pair = layer(
        request("gpt-oss-20b", "megatron", cp=8, context="ring", sizes={"layers": 1, "window": 1}, seq=64)
    )
    windowed = [n.attrs["block"].step for n in pair.forward.nodes if n.op == "attention"]
    assert windowed == [0, 1, 7]
    assert sum(n.op == "ring_exchange" for n in pair.forward.nodes) == 7
    assert sum(n.op == "ring_exchange" for n in pair.backward.nodes) == 7 + 8


def exchanged(one: Request, part: str) -> list[tuple[str, tuple[str, ...], str, int]]:
    """What the core of a layer of rank 0 sends: kind, axes, dtype and bytes."""
    own = {id(node): node for node in nodes(one, part)}
    along = set(one.mesh.expand("cp"))
    found = [n for n in own.values() if not n.is_compute and n.kind != "recv" and along & set(n.axes)]
    return [(n.kind, n.axes, n.dtype, n.bytes) for n in found]


SIZES = {"heads": 8, "kv_heads": 4, "layers": 1}
B, S, H, KV, D = 1, 32, 8, 4, 8  # those of the sizes above


def small(**options: Any) -> Request:
    return request("llama3-8b", "megatron", sizes=SIZES, seq=S, **options)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_all_gather(n: int, tp: int) -> None:
    """K and V each gathered forward, and their gradients scattered backward."""
    one = small(cp=n, tp=tp, context="all_gather")
    shard = B * S * KV * D * 2 // (n * tp)
    assert exchanged(one, "forward") == [("all_gather", ("cp",), "bf16", shard)] * 2
    assert exchanged(one, "backward") == [("reduce_scatter", ("cp",), "bf16", shard * n)] * 2


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ring(n: int, tp: int) -> None:
    """PyTorch's record: forward n - 1 permutes of K and V; backward as many, and n of their gradients in fp32."""
    one = small(cp=n, tp=tp, context="ring")
    block = 2 * B * S * KV * D * 2 // (n * tp)
    keys, gradients = ("send", ("cp",), "bf16", block), ("send", ("cp",), "fp32", 2 * block)
    assert exchanged(one, "forward") == [keys] * (n - 1)
    assert exchanged(one, "backward") == [keys, gradients] * (n - 1) + [gradients]
    ends = {(node.kind, node.peer) for node in nodes(one, "backward") if node.peer is not None}
    assert ends == {("send", Peer(("cp",), 1)), ("recv", Peer(("cp",), -1))}


@pytest.mark.parametrize(("n", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_ulysses(n: int, tp: int) -> None:
    """Four all-to-alls of a shard each way, where the ranks have KV heads enough."""
    one = small(cp=n, tp=tp, context="ulysses")
    queries, keys = (B * S * heads * D * 2 // (n * tp) for heads in (H, KV))
    ways = [("all_to_all", ("cp",), "bf16", size) for size in (queries, keys, keys, queries)]
    assert sorted(exchanged(one, "forward")) == sorted(exchanged(one, "backward")) == sorted(ways)


def test_ulysses_with_fewer_kv_heads() -> None:
    """Keys and values are exchanged over as many ranks as they have heads, then gathered over those that share one."""
    one = small(cp=4, tp=2, context="ulysses")
    queries, keys = (B * S * heads * D * 2 // 8 for heads in (H, KV))
    both: list[tuple[str, tuple[str, ...], str, int]] = [
        ("all_to_all", ("cp_kv",), "bf16", keys),
        ("all_gather", ("cp_rep",), "bf16", keys),
    ]
    heads = [("all_to_all", axes, "bf16", queries) for axes in (("cp_kv", "cp_rep"), ("cp_rep", "cp_kv"))]
    assert sorted(exchanged(one, "forward")) == sorted([*both, *both, *heads])
    back = [("all_to_all", ("cp_kv",), "bf16", keys), ("reduce_scatter", ("cp_rep",), "bf16", 2 * keys)]
    assert sorted(exchanged(one, "backward")) == sorted([*back, *back, *heads])
    whole = small(cp=2, tp=4, context="ulysses")
    assert [n[:2] for n in exchanged(whole, "forward") if n[0] == "all_gather"] == [
        ("all_gather", ("cp",))
    ] * 2


def test_ring_of_ulysses() -> None:
    """Heads are exchanged inside, so what goes round outside is a part of the heads of a longer part of the sequence."""
    one = small(cp=4, context="ring:2x2")
    queries, keys = (B * S * heads * D * 2 // 4 for heads in (H, KV))
    ways = [("all_to_all", ("cp_ulysses",), "bf16", size) for size in (queries, keys, keys, queries)]
    block, gradients = (("send", ("cp_ring",), *rest) for rest in (("bf16", 2 * keys), ("fp32", 4 * keys)))
    assert sorted(exchanged(one, "forward")) == sorted([*ways, block])
    assert sorted(exchanged(one, "backward")) == sorted([*ways, block, gradients, gradients])


def behind(template: Template, index: int) -> set[int]:
    """The nodes of an instance that must have run before one of them."""
    found: set[int] = set()
    stack = [index]
    while stack:
        for ref in template.nodes[stack.pop()].deps:
            if ref.kind == "self" and int(ref.target) not in found:
                found.add(int(ref.target))
                stack.append(int(ref.target))
    return found


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_goes_round_does_not_wait_for_the_step_at_hand(phase: str) -> None:
    """The block of the next step is sent and received beside the work on this one, and each step waits for its own."""
    one = small(cp=4, context="ring")
    template = next(
        t
        for t in job(one).programs[0].templates
        if t.block.startswith("layer") and (t.phase, t.part) == (phase, "")
    )
    names = {node.name: i for i, node in enumerate(template.nodes)}
    prefix = "attn.core" + (".backward" if phase == "backward" else "")
    for step in range(3):
        work = names[f"{prefix}.step{step}"]
        for way in ("send", "recv"):
            assert work not in behind(template, names[f"{prefix}.kv{step + 1}.{way}"])
        assert names[f"{prefix}.kv{step + 1}.recv"] in behind(template, names[f"{prefix}.step{step + 1}"])
        assert names[f"{prefix}.kv{step + 1}.recv"] not in behind(template, work)


def test_the_part_for_weights_of_a_split_backward_has_no_messages() -> None:
    programs = job(
        request("llama3-8b", "megatron", cp=2, pp=2, batch=4, schedule="zb-h1", context="ring")
    ).programs
    parts: dict[str, set[str]] = {}
    for program in programs:
        for template in program.templates:
            if template.block.startswith("layer"):
                parts.setdefault(template.part, set()).update(n.kind for n in template.nodes)
    assert {"send", "recv"} <= parts["input"]
    assert not {"send", "recv"} & parts["weight"]


ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"context": "star"},
        "strategy megatron: context is 'star'; known: all_gather, ring, ulysses, or ring:AxB with A x B = cp",
    ),
    (
        {"context": "ring:2x3", "cp": 4},
        "context = ring:2x3 is for cp = 6, but cp = 4; set cp to that, or choose degrees that multiply to it",
    ),
    (
        {"context": "ring", "cp": 2, "attention": "unfused"},
        "context = ring merges the results of a fused attention kernel, but attention is unfused; "
        "choose fused attention, or context all_gather or ulysses",
    ),
    (
        {"context": "ulysses", "cp": 8, "tp": 2},
        "heads = 8 of llama3-8b does not divide by tp x ulysses = 16; choose a tp x ulysses that divides it, "
        "or other heads",
    ),
    (
        {"context": "ulysses", "cp": 4, "sizes": {"heads": 24, "kv_heads": 6}},
        "kv_heads = 6 and tp x ulysses = 4 do not divide one another; choose a tp x ulysses that divides "
        "kv_heads, or is a multiple of it",
    ),
    (
        {"context": "ring", "cp": 4, "seq": 12},
        "seq = 12 does not divide by 2 x ring = 8, the chunks of a zig-zag; choose a seq that does, "
        "or context all_gather",
    ),
    (
        {"context": "ring", "cp": 2, "strategy": "no_cp"},
        "strategy no_cp: context = ring, but the row seq of [shard] has no cp; add it there",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), ERRORS, ids=lambda value: name_of(value) if isinstance(value, dict) else ""
)
def test_what_can_not_be_done_is_said_in_one_line(options: dict[str, Any], message: str) -> None:
    strategy: Any = options.pop("strategy", "megatron") if "strategy" in options else "megatron"
    if strategy == "no_cp":
        strategy = parse_strategy('mesh = ["cp", "tp"]\n[shard]\nheads = ["cp", "tp"]', "no_cp", "no_cp.toml")
    sizes = SIZES | options.pop("sizes", {})
    with pytest.raises(StageError) as caught:
        job(request("llama3-8b", strategy, sizes=sizes, **options))
    assert str(caught.value) == message
