"""Every plan is right on simulated devices: in values, in what is sent, and transposed."""

import itertools
import random

import numpy as np
import pytest

from stage.errors import LayoutError
from stage.layout import Layout
from stage.mesh import Mesh, build_mesh
from stage.reshard import Step, elements_sent, plan_reshard, transpose_plan, volumes
from tests.cheapest import cheapest, naive_plan
from tests.oracle import Array, collect, layouts, place, reachable, run_plan

CUBE = Mesh((("a", 2), ("b", 2), ("c", 2)), ())
Pair = tuple[Layout, Layout]


def follow(plan: tuple[Step, ...], layout: Layout, unordered: frozenset[int] = frozenset()) -> list[Layout]:
    found = [layout]
    for step in plan:
        found.append(step.apply(found[-1], unordered=unordered))
    return found


def check_values_and_bytes(plan: tuple[Step, ...], src: Layout, dst: Layout, mesh: Mesh, x: Array) -> None:
    """The plan leads from src to dst, keeps the tensor, and sends what its steps say."""
    rng = np.random.default_rng(0)
    assert follow(plan, src)[-1] == dst
    local, sent = run_plan(place(x, src, mesh, rng), plan, mesh)
    assert (collect(local, dst, mesh) == x).all(), plan
    assert sent == [
        step.sent(mesh.degree(step.axes), volume) for step, volume in volumes(plan, src, mesh, x.size)
    ]
    assert sum(sent) == elements_sent(plan, src, mesh, x.size)


def check_both_ways(src: Layout, dst: Layout, mesh: Mesh, x: Array) -> tuple[Step, ...]:
    """A reshard keeps the tensor, so the gradient of <g, reshard(x)> with respect to x is g itself."""
    plan = plan_reshard(src, dst, mesh)
    check_values_and_bytes(plan, src, dst, mesh, x)
    back = transpose_plan(plan)
    assert transpose_plan(back) == plan
    check_values_and_bytes(back, dst.dual(mesh.names), src.dual(mesh.names), mesh, x)
    return plan


def check_divisors(
    plan: tuple[Step, ...], src: Layout, dst: Layout, mesh: Mesh, **options: frozenset[int]
) -> None:
    for layout in follow(plan, src, **options):
        for now, first, last in zip(layout.dims, src.dims, dst.dims, strict=True):
            assert mesh.degree(first) % mesh.degree(now) == 0 or mesh.degree(last) % mesh.degree(now) == 0


def pairs(mesh: Mesh, rank: int, count: int | None = None, seed: int = 0) -> list[Pair]:
    """Pairs of layouts between which a reshard exists: all of them, or `count` drawn ones."""
    found = layouts(mesh.names, rank)
    if count is None:
        return [pair for pair in itertools.product(found, found) if reachable(*pair)]
    draw = random.Random(seed)  # noqa: S311  # nothing here is a secret
    result: list[Pair] = []
    while len(result) < count:
        pair = (draw.choice(found), draw.choice(found))
        if reachable(*pair):
            result.append(pair)
    return result


def tensor(mesh: Mesh, rank: int) -> Array:
    """Different numbers, in a shape that every product of degrees divides."""
    return np.arange(mesh.world**rank, dtype=np.int64).reshape([mesh.world] * rank)


@pytest.mark.slow
def test_every_pair_on_three_axes() -> None:
    x = tensor(CUBE, 2)
    for src, dst in pairs(CUBE, 2):
        plan = check_both_ways(src, dst, CUBE, x)
        check_divisors(plan, src, dst, CUBE)
        naive = tuple(naive_plan(src, dst))
        assert follow(naive, src)[-1] == dst
        assert elements_sent(plan, src, CUBE, x.size) <= elements_sent(naive, src, CUBE, x.size)


@pytest.mark.parametrize(
    ("mesh", "rank", "count"),
    [
        (Mesh((("a", 3), ("b", 2)), ()), 3, 600),
        (Mesh((("a", 2), ("b", 3), ("c", 2)), ()), 2, 500),
        (Mesh((("a", 4), ("b", 2), ("c", 4)), ()), 2, 400),
        (CUBE, 3, 600),
        (Mesh((("a", 2), ("b", 2), ("c", 2), ("d", 2)), ()), 2, 500),
    ],
)
def test_drawn_pairs(mesh: Mesh, rank: int, count: int) -> None:
    x = tensor(mesh, rank)
    for src, dst in pairs(mesh, rank, count):
        plan = plan_reshard(src, dst, mesh)
        check_divisors(plan, src, dst, mesh)
        naive = tuple(naive_plan(src, dst))
        assert elements_sent(plan, src, mesh, x.size) <= elements_sent(naive, src, mesh, x.size)
        check_both_ways(src, dst, mesh, x)


@pytest.mark.parametrize(("degrees", "least"), [((2, 2, 2), 0.97), ((4, 2, 4), 0.96), ((2, 3, 4), 0.96)])
def test_plans_send_as_little_as_the_best_short_plan(degrees: tuple[int, int, int], least: float) -> None:
    """Nearly always; where order has to be undone the planner weighs two plans, not all."""
    mesh = Mesh(tuple(zip("abc", degrees, strict=True)), ())
    total = mesh.world**3
    drawn = pairs(mesh, 2, 250, seed=1)
    best = 0
    for src, dst in drawn:
        sent, bound = (
            elements_sent(plan_reshard(src, dst, mesh), src, mesh, total),
            cheapest(src, dst, mesh, total),
        )
        assert sent >= bound
        best += sent == bound
    assert best >= least * len(drawn)


def lay(*dims: str, pending: str = "", invariant: str = "") -> Layout:
    return Layout(
        tuple(tuple(dim.split()) for dim in dims), frozenset(pending.split()), frozenset(invariant.split())
    )


def text(plan: tuple[Step, ...]) -> list[str]:
    return [f"{step.kind}({' '.join(step.axes)}) {step.src}->{step.dst}" for step in plan]


HYBRID = build_mesh(dp=8, dp_shard=4, cp=2, tp=4, kv_heads=2)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (lay("cp", ""), lay("cp", ""), []),
        (lay("", "", pending="cp"), lay("", ""), ["all_reduce(cp) P->R"]),
        (lay("", "", pending="cp"), lay("", "", invariant="cp"), ["all_reduce(cp) P->I"]),
        (lay("", "", pending="cp"), lay("", "cp"), ["reduce_scatter(cp) P->1"]),
        (lay("", "cp"), lay("", ""), ["all_gather(cp) 1->R"]),
        (lay("", "cp"), lay("", "", invariant="cp"), ["all_gather(cp) 1->I"]),
        (lay("", "", invariant="cp"), lay("", ""), ["vary(cp) I->R"]),
        (lay("", "", invariant="cp"), lay("cp", ""), ["slice(cp) I->0"]),
        (lay("", ""), lay("cp", ""), ["slice(cp) R->0"]),
        (lay("cp", ""), lay("", "cp"), ["all_to_all(cp) 0->1"]),
        (lay("dp_replicate cp", ""), lay("cp dp_replicate", ""), ["permute(dp_replicate cp) 0->0"]),
        (lay("dp_replicate", "cp"), lay("cp", "dp_replicate"), ["permute(dp_replicate cp) 0->0"]),
        # several atoms, one collective
        (lay("", "dp_shard cp"), lay("", ""), ["all_gather(dp_shard cp) 1->R"]),
        (lay("", "cp tp_kv tp_rep"), lay("", "cp"), ["all_gather(tp_kv tp_rep) 1->R"]),
        (
            lay("", "cp", pending="tp_kv tp_rep"),
            lay("", "cp tp_kv tp_rep"),
            ["reduce_scatter(tp_kv tp_rep) P->1"],
        ),
        (
            lay("", "", pending="tp_kv tp_rep"),
            lay("", "cp tp_kv tp_rep"),
            ["slice(cp) R->1", "reduce_scatter(tp_kv tp_rep) P->1"],
        ),
        (
            lay("", "", pending="dp_replicate dp_shard cp"),
            lay("dp_shard", ""),
            ["reduce_scatter(dp_shard) P->0", "all_reduce(dp_replicate cp) P->R"],
        ),
        (lay("tp_kv tp_rep", ""), lay("", "tp_kv tp_rep"), ["all_to_all(tp_kv tp_rep) 0->1"]),
        # what is left pending is reduced at once, and becomes R or I without more
        (
            lay("", "", pending="cp tp_kv", invariant="tp_rep"),
            lay("", "", invariant="cp"),
            ["all_reduce(cp tp_kv) P->I", "vary(tp_kv tp_rep) I->R"],
        ),
        # slice early, gather last
        (
            lay("tp_kv", "", pending="cp"),
            lay("", "dp_shard"),
            ["slice(dp_shard) R->1", "all_reduce(cp) P->R", "all_gather(tp_kv) 0->R"],
        ),
        # an atom that is not the minor-most leaves after a permute
        (lay("dp_shard cp", ""), lay("cp", ""), ["permute(dp_shard cp) 0->0", "all_gather(dp_shard) 0->R"]),
        (lay("dp_shard cp", "", pending="tp_kv"), lay("dp_shard cp", "", pending="tp_kv"), []),
    ],
)
def test_plans(src: Layout, dst: Layout, expected: list[str]) -> None:
    assert text(plan_reshard(src, dst, HYBRID)) == expected


def test_fsdp_over_tp_gathers_the_storage_shard_only() -> None:
    axes = HYBRID.expand
    stored, used = Layout((axes(["tp", "dp_shard"]), ())), Layout((axes("tp"), ()))
    gather = plan_reshard(stored, used, HYBRID)
    assert text(gather) == ["all_gather(dp_shard) 0->R"]
    assert text(transpose_plan(gather)) == ["reduce_scatter(dp_shard) P->0"]


SPARSE = build_mesh(dp=8, dp_shard=4, cp=2, tp=4, ep=8, etp=2)


def expert_layouts() -> tuple[frozenset[int], Layout, Layout]:
    """The unordered dims, and the layouts of (experts, slots, d_model) before and after dispatch."""
    axes = SPARSE.expand
    slots = Layout(((), axes(["edp", "ep", "etp"]), ()))
    return frozenset({1}), slots, Layout((axes("ep"), axes(["edp", "etp"]), ()))


def test_expert_dispatch_is_one_all_to_all() -> None:
    mesh, (unordered, slots, experts) = SPARSE, expert_layouts()
    dispatch = plan_reshard(slots, experts, mesh, unordered=unordered)
    assert [(step.kind, step.axes, step.src, step.dst) for step in dispatch] == [
        ("all_to_all", mesh.expand("ep"), 1, 0)
    ]
    combine = plan_reshard(experts, slots, mesh, unordered=unordered)
    assert [(step.kind, step.axes, step.src, step.dst) for step in combine] == [
        ("all_to_all", mesh.expand("ep"), 0, 1)
    ]
    gathered = Layout((mesh.expand("ep"), mesh.expand("edp"), ()))
    assert [(step.kind, step.axes) for step in plan_reshard(slots, gathered, mesh, unordered=unordered)] == [
        ("all_to_all", mesh.expand("ep")),
        ("all_gather", mesh.expand("etp")),
    ]


def test_order_costs_a_permute_where_it_matters() -> None:
    _, slots, experts = expert_layouts()
    kinds = [step.kind for step in plan_reshard(slots, experts, SPARSE)]
    assert kinds == ["permute", "all_to_all"]


def test_unordered_dims_hold_the_same_elements() -> None:
    """In an unordered dim the result equals the target up to order, and freedom of order never costs."""
    rng = np.random.default_rng(5)
    x = rng.permutation(16 * 16).reshape(16, 16)
    unordered = frozenset({1})
    for src, dst in pairs(CUBE, 2, 1500, seed=2):
        plan = plan_reshard(src, dst, CUBE, unordered=unordered)
        found = follow(plan, src, unordered)[-1]
        assert found.dims[0] == dst.dims[0]
        assert set(found.dims[1]) == set(dst.dims[1])
        assert (found.pending, found.invariant) == (dst.pending, dst.invariant)
        check_divisors(plan, src, dst, CUBE, unordered=unordered)
        local, sent = run_plan(place(x, src, CUBE, rng), plan, CUBE)
        assert (np.sort(collect(local, found, CUBE), axis=1) == np.sort(x, axis=1)).all()
        stated = volumes(plan, src, CUBE, x.size, unordered=unordered)
        assert sent == [step.sent(CUBE.degree(step.axes), volume) for step, volume in stated]
        ordered = plan_reshard(src, dst, CUBE)
        assert sum(sent) <= elements_sent(ordered, src, CUBE, x.size)


def test_reordering_an_unordered_dim_takes_no_step() -> None:
    assert plan_reshard(lay("", "a b"), lay("", "b a"), CUBE, unordered=frozenset({1})) == ()


def test_factored_axes_of_a_real_mesh() -> None:
    mesh = build_mesh(dp=4, dp_shard=2, tp=4, kv_heads=2, ep=4)
    assert len(mesh.names) == 4
    for src, dst in pairs(mesh, 2, 400, seed=3):
        check_both_ways(src, dst, mesh, tensor(mesh, 2))


def test_a_pending_maximum_is_reduced_as_a_maximum() -> None:
    rng = np.random.default_rng(6)
    x = rng.integers(-99, 99, (16, 16))
    for src, dst in pairs(CUBE, 2, 1500, seed=4):
        if not src.pending or dst.pending:
            continue
        top = Layout(src.dims, src.pending, src.invariant, "max")
        plan = plan_reshard(top, dst, CUBE)
        local, _ = run_plan(place(x, top, CUBE, rng), plan, CUBE)
        assert (collect(local, dst, CUBE) == x).all()
        with pytest.raises(LayoutError, match=r"max over .* has no transpose in"):
            transpose_plan(plan)


def test_what_stays_pending_stays_pending() -> None:
    plan = plan_reshard(lay("", "", pending="a b"), lay("b", "", pending="a"), CUBE)
    assert text(plan) == ["reduce_scatter(b) P->0"]


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (
            lay("", ""),
            lay("", "", invariant="b"),
            "b is R and should become I in a reshard; replicas used for different work are not one computation, "
            "so keep the target R over b or produce the tensor as I",
        ),
        (
            lay("", ""),
            lay("", "", pending="b"),
            "b is R and should become pending in a reshard; only an op makes a pending sum, "
            "so give the target another state over b",
        ),
        (
            lay("", "b"),
            lay("", "", pending="b"),
            "b is a shard of dim 1 and should become pending in a reshard; only an op makes a pending sum, "
            "so give the target another state over b",
        ),
        (
            Layout(((), ()), frozenset("ab"), reduction="max"),
            lay("", "", pending="a"),
            "a pending max over a, b should become a pending sum in a reshard; reduce it first",
        ),
    ],
)
def test_what_cannot_be_reached_is_an_error(src: Layout, dst: Layout, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        plan_reshard(src, dst, CUBE)
    assert str(caught.value) == message


def test_exactly_the_unreachable_targets_are_errors() -> None:
    found = layouts("ab", 2)
    mesh = Mesh((("a", 2), ("b", 2)), ())
    for src, dst in itertools.product(found, found):
        if reachable(src, dst):
            plan_reshard(src, dst, mesh)
        else:
            with pytest.raises(LayoutError):
                plan_reshard(src, dst, mesh)


def test_an_all_to_all_may_change_the_order_of_atoms() -> None:
    x = np.arange(16 * 16, dtype=np.int64).reshape(16, 16)
    plan = check_both_ways(lay("a b c", ""), lay("", "b a c"), CUBE, x)
    assert text(plan) == ["all_to_all(b a c) 0->1"]
    assert transpose_plan(plan)[0].axes == ("a", "b", "c")
