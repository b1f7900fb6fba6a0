"""The roofline by hand, its monotonicity, and measured kernels."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.cost.columns import columns_of
from stage.cost.efficiency import Efficiency
from stage.cost.gemm import tiles_of
from stage.cost.roofline import Roofline
from stage.cost.system import System, Tier
from stage.cost.system_file import list_systems, load_system
from stage.cost.work import Exchange, Kernel
from stage.errors import StageError

DATA = Path(__file__).parent / "data"

ROUND = Efficiency(
    matrix={"bf16": 0.5}, boost=1.0, operand_bandwidth=1e12, memory=0.5, reuse=0.0, kernel=1e-6, tile=1e-7,
    attention=0.5, softmax=(0.1, 0.2), block=1e-7,
)  # fmt: skip

ROUND_SYSTEM = System(
    name="round",
    title="ten units of 1 TFLOP/s",
    sources=("a sketch",),
    unit="unit",
    units=10,
    matrix_flops={"bf16": 1e13},
    vector_flops={"fp32": 1e12},
    memory_bytes=10**10,
    memory_bandwidth=1e11,
    tiers=(Tier("node", "switch", None, 1e11, 1e-6),),
    host_bandwidth=1e10,
    kernel_gap=1e-6,
    kernel_launch=2e-6,
    framework_op=5e-6,
    clock={"matrix": 1e9},
    instruction=(16, 16, 16),
    tile=(128, 128),
    efficiency=ROUND,
)
EACH = 2e-6
"""Seconds of the gap, the start and the end of a kernel of it."""


def product(m: int, n: int, k: int, groups: int = 1, dtype: str = "bf16") -> Kernel:
    moved = 2 * groups * (m * k + k * n + m * n)
    shapes = f"{groups}x{m}x{k},{groups}x{k}x{n}->{groups}x{m}x{n}"
    return Kernel("contract", dtype, 2 * groups * m * n * k, moved, shapes, matmul=True)


def stream(elements: int) -> Kernel:
    return Kernel("add", "bf16", elements, 6 * elements, f"{elements},{elements}->{elements}")


def attention(seq: int, heads: int, dim: int, *, backward: bool = False, share: float = 0.5) -> Kernel:
    tensor, pairs = f"1x{seq}x{heads}x{dim}", seq * seq * heads * share
    read = ",".join([tensor] * (4 if backward else 3))
    op, products = ("attention_backward", 5) if backward else ("attention", 2)
    moved = 2 * seq * heads * dim * (8 if backward else 4)
    flops = round(2 * products * dim * pairs)
    return Kernel(op, "bf16", flops, moved, f"{read}->{tensor}", matmul=True)


def seconds(system: System, *kernels: Kernel) -> list[float]:
    found: list[float] = Roofline(system).kernels(kernels).tolist()
    return found


def test_square_product_by_hand() -> None:
    """100 tiles of 128 x 128 in 10 waves; the power limit leaves half of the peak, which is what bounds it."""
    kernel = product(1280, 1280, 4096)
    flops = 2 * 1280 * 1280 * 4096
    stored = 0.5 * 2 * 1280 * 1280 / 5e10
    assert seconds(ROUND_SYSTEM, kernel) == pytest.approx([flops / 5e12 + stored + EACH])
    # Without the limit a unit's loop does: 128 x 128 x 4,096 at 1 TFLOP/s, or 256 x 4,096 x 2 bytes at 100 GB/s.
    free = replace(ROUND_SYSTEM, efficiency=replace(ROUND, matrix={"bf16": 1.0}))
    loop = max(2 * 128 * 128 * 4096 / 1e12, 256 * 4096 * 2 / 1e11) + 1e-7
    assert seconds(free, kernel) == pytest.approx([10 * loop + stored + EACH])


def test_tiles_and_waves_are_whole() -> None:
    free = replace(ROUND_SYSTEM, efficiency=replace(ROUND, matrix={"bf16": 1.0}, tile=1e-4))
    ten, eleven = seconds(free, product(1280, 128, 4096), product(1408, 128, 4096))
    assert eleven > 1.4 * ten  # 11 tiles of 10 units are two waves, or smaller tiles of less use
    same, more = seconds(free, product(1153, 128, 4096), product(1280, 128, 4096))
    assert same == pytest.approx(more, rel=0.01)  # 9.008 tiles are ten
    assert seconds(free, product(1280, 128, 4089))[0] == pytest.approx(
        ten, rel=1e-3
    )  # 4,089 are 256 steps of 16


def test_skinny_product_is_bound_by_memory() -> None:
    kernel = product(1, 8192, 8192)
    moved = 2 * (8192 + 8192 * 8192 + 8192)
    assert seconds(ROUND_SYSTEM, kernel) == pytest.approx([moved / 5e10 + EACH])
    # On a real device too, at less than a hundredth of its peak.
    assert kernel.flops / seconds(load_system("h100"), kernel)[0] < 0.01 * 989.4e12


def test_deep_product_of_few_tiles_is_cut_along_k() -> None:
    """One tile would leave nine units idle: eight parts of k, whose sums in fp32 are written and read, leave two."""
    system = replace(ROUND_SYSTEM, memory_bandwidth=1e15, efficiency=replace(ROUND, matrix={"bf16": 1.0}))
    kernel = product(128, 128, 65536)
    loop = 2 * 128 * 128 * (65536 // 8) / 1e12 + 1e-7
    sums = 8 * 128 * 128 * 8 / 1e12
    found = seconds(system, kernel)[0] - EACH
    assert found <= (loop + sums) * (1 + 1e-6)
    assert found < 0.15 * kernel.flops / 1e12


def test_memory_bound_op_by_hand() -> None:
    small, large = seconds(ROUND_SYSTEM, stream(10), stream(10**9))
    assert large == pytest.approx(6e9 / 5e10 + EACH)
    assert small == pytest.approx(EACH, rel=0.01)


def test_small_tensors_are_partly_in_the_cache() -> None:
    """Of b bytes a share of one half was just used, and a cache of C holds 1 - b/C of it, at the speed of the cache."""
    cached = replace(ROUND_SYSTEM, l2_bytes=6_000_000, efficiency=replace(ROUND, reuse=0.5))
    half, over = seconds(cached, stream(500_000), stream(2_000_000))
    found = 0.5 * 3e6 * 0.5
    assert half == pytest.approx((3e6 - found) / 5e10 + found / 1e12 + EACH)
    assert over == pytest.approx(12e6 / 5e10 + EACH)


def test_attention_by_hand() -> None:
    """64 blocks of 128 queries meet 512 keys in the mean and 64 more at the edge; the last ends 1/4 of the longest late."""
    pair = 4 * 64 * 10 / 5e12 + 0.1 / 1e9
    mean_block, longest = 128 * (512 + 64) * pair + 1e-7, 128 * 1024 * pair + 1e-7
    expected = 64 * mean_block / 10 + longest / 4 + EACH
    assert seconds(ROUND_SYSTEM, attention(1024, 8, 64)) == pytest.approx([expected])
    whole = 64 * longest / 10 + longest / 4 + EACH
    assert seconds(ROUND_SYSTEM, attention(1024, 8, 64, share=1)) == pytest.approx([whole])
    pair = 10 * 64 * 10 / 5e12 + 0.2 / 1e9
    mean_block, longest = 128 * (512 + 64) * pair + 1e-7, 128 * 1024 * pair + 1e-7
    expected = 64 * mean_block / 10 + longest / 4 + EACH
    assert seconds(ROUND_SYSTEM, attention(1024, 8, 64, backward=True)) == pytest.approx([expected])


def test_one_block_is_as_long_as_itself() -> None:
    block = 128 * 128 * (4 * 64 * 10 / 5e12 + 0.1 / 1e9) + 1e-7
    assert seconds(ROUND_SYSTEM, attention(128, 1, 64, share=1)) == pytest.approx([block + EACH])


def test_experts_fill_tiles_one_by_one() -> None:
    """Sixteen experts of 80 rows are sixteen tiles of 128, not ten."""
    free = replace(ROUND_SYSTEM, efficiency=replace(ROUND, matrix={"bf16": 1.0}))
    grouped, whole = seconds(free, product(80, 128, 8192, groups=16), product(1280, 128, 8192))
    assert grouped > 1.15 * whole


def test_kernels_without_shapes_are_a_plain_roofline() -> None:
    matrix = Kernel("contract", "bf16", 10**12, 10**6, matmul=True)
    vector = Kernel("adam", "fp32", 10**12, 10**6)
    foreign = Kernel("", "", 10**12, 10**6)
    moved = Kernel("", "", 1, 10**12)
    expected = [1e12 / 5e12 + EACH, 1e12 / 1e12 + EACH, 1e12 / 5e12 + EACH, 1e12 / 5e10 + EACH]
    assert seconds(ROUND_SYSTEM, matrix, vector, foreign, moved) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (product(8, 8, 8, dtype="fp8"), "system round has no peak for fp8: it has those of bf16, fp32"),
        (
            product(8, 8, 8, dtype="fp7"),
            "kernel contract multiplies 'fp7': give it one of fp64, fp32, tf32, fp16, bf16, fp8, mxfp8, fp6, fp4, int8",
        ),
        (
            Kernel("", "half", 8, 8),
            "kernel (no op) multiplies 'half': give it one of fp64, fp32, tf32, fp16, bf16, fp8, mxfp8, fp6, fp4, int8",
        ),
    ],
)
def test_dtype_that_has_no_peak(kernel: Kernel, text: str) -> None:
    with pytest.raises(StageError) as caught:
        seconds(ROUND_SYSTEM, kernel)
    assert str(caught.value) == text


def test_nothing_is_no_time() -> None:
    assert seconds(ROUND_SYSTEM) == []


def test_host_issues_op_by_op() -> None:
    work = [stream(8), product(8, 8, 8), product(64, 64, 64, groups=4)]
    eager, compiled, graph = (Roofline(ROUND_SYSTEM, issue) for issue in ("eager", "compiled", "graph"))
    assert eager.host_seconds(work).tolist() == pytest.approx(
        [5e-6, 5e-6, 4 * 5e-6]
    )  # four experts are four calls
    assert compiled.host_seconds(work).tolist() == pytest.approx([2e-6, 2e-6, 8e-6])
    assert graph.host_seconds(work).tolist() == [0, 0, 0]
    assert Roofline(load_system("tpu-v5p")).host_seconds(work).tolist() == [0, 0, 0]
    with pytest.raises(StageError) as caught:
        Roofline(ROUND_SYSTEM, "slow")
    assert str(caught.value) == "the host issues 'slow': choose one of eager, compiled, graph"


def test_exchanges_are_those_of_the_network() -> None:
    model = Roofline(load_system("h100"))
    exchange = Exchange("all_reduce", 2**20, (8,))
    assert model.exchanges([exchange]).tolist() == model.network.exchanges([exchange]).tolist()


KERNELS = st.one_of(
    st.builds(product, *[st.integers(1, 5000)] * 3, groups=st.integers(1, 9)),
    st.builds(stream, st.integers(1, 10**8)),
    st.builds(
        attention,
        st.integers(1, 64).map(lambda n: 64 * n),
        st.integers(1, 40),
        st.sampled_from([64, 128, 192]),
        backward=st.booleans(),
    ),
)
FASTER = [
    lambda s: replace(s, memory_bandwidth=1.3 * s.memory_bandwidth),
    lambda s: replace(
        s, matrix_flops={k: 1.3 * v for k, v in s.matrix_flops.items()}, clock={}, matrix_flops_per_clock={}
    ),
    lambda s: replace(
        s, vector_flops={k: 1.3 * v for k, v in s.vector_flops.items()}, vector_flops_per_clock={}
    ),
    lambda s: replace(s, kernel_gap=0.5 * s.kernel_gap),
    lambda s: replace(s, l2_bytes=2 * s.l2_bytes),
    lambda s: replace(s, efficiency=replace(s.efficiency, matrix={"bf16": 0.95})),
    lambda s: replace(s, efficiency=replace(s.efficiency, operand_bandwidth=1e14)),
    lambda s: replace(s, efficiency=replace(s.efficiency, memory=0.95)),
    lambda s: replace(s, efficiency=replace(s.efficiency, tile=0.0, block=0.0, kernel=0.0)),
]


@settings(max_examples=60, deadline=None)
@given(KERNELS, st.sampled_from(["h100", "a100-80gb-sxm", "b200"]))
def test_faster_devices_are_never_slower(kernel: Kernel, name: str) -> None:
    system = replace(load_system(name), clock={}, matrix_flops_per_clock={}, vector_flops_per_clock={})
    before = seconds(system, kernel)[0]
    for change in FASTER:
        assert seconds(change(system), kernel)[0] <= before * (1 + 1e-12)  # type: ignore[no-untyped-call]


@settings(max_examples=60, deadline=None)
@given(*[st.integers(1, 4000)] * 3, st.integers(1, 4), st.sampled_from([0, 1, 2, 3]), st.integers(1, 3000))
def test_larger_products_are_never_faster(m: int, n: int, k: int, groups: int, which: int, more: int) -> None:
    added = [more if which == at else 0 for at in range(4)]
    grown = product(m + added[0], n + added[1], k + added[2], groups + added[3])
    small, large = seconds(load_system("h100"), product(m, n, k, groups), grown)
    assert large >= small * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(KERNELS, st.integers(1, 10**12), st.integers(1, 10**10))
def test_more_flops_or_bytes_are_never_faster(kernel: Kernel, flops: int, moved: int) -> None:
    plain = replace(kernel, shapes="")
    system = load_system("h200")
    base, *more = seconds(
        system, plain, replace(plain, flops=plain.flops + flops), replace(plain, bytes=plain.bytes + moved)
    )
    assert min(more) >= base * (1 - 1e-12)
    with_shapes, more_bytes = seconds(system, kernel, replace(kernel, bytes=kernel.bytes + moved))
    assert more_bytes >= with_shapes * (1 - 1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(KERNELS, min_size=1, max_size=8))
def test_each_kernel_is_priced_for_itself(kernels: list[Kernel]) -> None:
    system = load_system("gb200")
    together = seconds(system, *kernels)
    assert together == pytest.approx([seconds(system, kernel)[0] for kernel in kernels])
    rows = np.arange(len(kernels))[::-1]
    assert Roofline(system).price(columns_of(kernels).take(rows)).tolist() == pytest.approx(together[::-1])


@pytest.mark.parametrize("name", list_systems())
def test_no_kernel_beats_the_peak(name: str) -> None:
    system = load_system(name)
    square, long = product(8192, 8192, 8192), stream(2**30)
    times = seconds(system, square, long, attention(8192, 32, 128), attention(8192, 32, 128, backward=True))
    assert 0.3 < square.flops / times[0] / system.matrix_flops["bf16"] < 1
    assert 0.6 < long.bytes / times[1] / system.memory_bandwidth < 1
    for kernel, took in zip(
        (attention(8192, 32, 128), attention(8192, 32, 128, backward=True)), times[2:], strict=True
    ):
        assert 0.1 < kernel.flops / took / system.matrix_flops["bf16"] < 1


def test_tiles_are_those_of_the_large_one_and_halves() -> None:
    assert tiles_of((256, 128))[:2] == ((256, 128), (128, 256))
    assert tiles_of((128, 128)) == ((128, 128), (128, 64), (64, 128), (64, 64))


def measured(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def errors_of_products(system: str) -> list[float]:
    model, found = Roofline(load_system(system)), []
    for row in measured("product_times.csv"):
        if row["system"] == system:
            m, n, k = (int(row[key]) for key in "mnk")
            kernel = product(m, n, k)
            if int(row["accumulates"]):  # the gradient of a weight in fp32, read and written
                kernel = replace(kernel, bytes=kernel.bytes + (8 - 2) * m * n, phase="backward", dtype="fp32")
                assert kernel.multiplies == "bf16"
            found.append(float(model.kernels([kernel])[0]) * 1e6 / float(row["microseconds"]) - 1)
    return found


# Rows of the half that no parameter of products was fitted to (docs/cost.md), of more than 16 GFLOP.
@pytest.mark.parametrize(
    ("system", "bound"),
    [("a100-80gb-sxm", 0.07), ("a100-80gb-pcie", 0.05), ("h100", 0.07), ("h200", 0.07), ("gb200", 0.12), ("gb300", 0.1), ("b200", 0.12)],
)  # fmt: skip
def test_measured_products(system: str, bound: float) -> None:
    found = errors_of_products(system)
    assert len(found) == 10
    assert median(map(abs, found)) < bound
    assert mean(map(abs, found)) < 1.5 * bound


def test_measured_attention() -> None:
    """Those of the A100 and the B200 were looked at when their clocks of softmax were chosen."""
    found: dict[str, list[float]] = {}
    for row in measured("attention_times.csv"):
        batch, seq, heads, kv_heads, dim, v_dim = (
            int(row[key]) for key in ("batch", "seq", "heads", "kv_heads", "qk_dim", "v_dim")
        )
        q, k, v = (
            f"{batch}x{seq}x{heads}x{dim}",
            f"{batch}x{seq}x{kv_heads}x{dim}",
            f"{batch}x{seq}x{kv_heads}x{v_dim}",
        )
        backward = row["op"] == "attention_backward"
        work = 2 * (3 * dim + 2 * v_dim if backward else dim + v_dim)
        shapes = f"{batch}x{seq}x{heads}x{v_dim}," * backward + f"{q},{k},{v}->{q}"
        flops = batch * heads * seq * seq // 2 * work
        kernel = Kernel(row["op"], "bf16", flops, 1, shapes, matmul=True)
        took = float(Roofline(load_system(row["system"])).kernels([kernel])[0])
        found.setdefault(row["op"], []).append(took * 1e6 / float(row["microseconds"]) - 1)
    assert [len(found[op]) for op in ("attention", "attention_backward")] == [30, 10]
    assert median(map(abs, found["attention"])) < 0.12
    assert median(map(abs, found["attention_backward"])) < 0.08
