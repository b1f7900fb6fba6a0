"""The rows of expert axes, each with its collectives, counts and bytes as formulas.

The sparse view `edp ep etp` is laid over the ranks of `dp cp tp`, innermost first, so `ep` takes in tp, cp and dp as
it grows. tok = micro_batch x seq / (cp tp) tokens of a rank (under SP); each goes to top_k = 2 experts.
"""

from collections import Counter
from typing import Any

import pytest

from stage.ops import get_op
from stage.trace.node import TraceNode
from stage.traceset import TraceSet
from tests.test_closed_forms import BF16, FP32, INT64, SHAPES, communication
from tests.test_closed_forms import job as tiny
from tests.test_numerics import compare

EXPERTS, TOP_K, HIDDEN = 8, 2, 48

OVER: dict[str, dict[str, int]] = {
    "part of dp": {"dp": 4, "ep": 2},
    "dp": {"dp": 4, "ep": 4},
    "tp": {"dp": 2, "tp": 2, "ep": 2},
    "dp x cp": {"dp": 2, "cp": 2, "ep": 4},
    "dp x cp, beside tp in edp": {"dp": 2, "cp": 2, "tp": 2, "ep": 4},
    "dp x cp x tp": {"dp": 2, "cp": 2, "tp": 2, "ep": 8},
    "dp x cp x tp / etp": {"dp": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 2},
    "dp x cp x tp / (edp x etp)": {"dp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2},
    "etp alone": {"tp": 2, "etp": 2},
}


def routed(shape: dict[str, int], degrees: dict[str, int]) -> int:
    """Tokens of a rank, each counted once for each of its experts."""
    tokens = shape["micro_batch"] * shape["seq"]
    return TOP_K * tokens // (degrees.get("cp", 1) * degrees.get("tp", 1))


def synthesized(shape: dict[str, int], degrees: dict[str, int], **options: Any) -> TraceSet:
    return tiny(shape, "mixtral-8x7b", strategy="megatron_moe", **degrees, **options)


def of_experts(traces: TraceSet) -> list[TraceNode]:
    """Collectives of a step's experts, but for reductions of gradients."""
    return [n for n in communication(traces) if "moe" in n.name and n.get("phase") in ("forward", "backward")]


def expected(shape: dict[str, int], degrees: dict[str, int]) -> Counter[tuple[str, str, int]]:
    """Phase, op and bytes of the collectives of experts (groundtruth: "MoE alltoall" and "MoE with etp").

    Counts of tokens are gathered over ep x etp, tokens and their probabilities go out and tokens come back over ep;
    over etp tokens and probabilities are gathered before the experts and their shares scattered after them.
    """
    ep, etp, layers = degrees.get("ep", 1), degrees.get("etp", 1), shape["layers"]
    sent, hidden = routed(shape, degrees) * BF16, routed(shape, degrees) * shape["d_model"] * BF16
    found: Counter[tuple[str, str, int]] = Counter()
    if ep * etp > 1:
        found["forward", "all_gather", EXPERTS * INT64] += layers
    if ep > 1:
        for phase in ("forward", "backward"):
            found[phase, "all_to_all", hidden] += 2 * layers
            found[phase, "all_to_all", sent] += layers
    if etp > 1:
        found["forward", "all_gather", hidden] += layers
        found["forward", "all_gather", sent] += layers
        found["forward", "reduce_scatter", etp * hidden] += layers
        found["backward", "all_gather", hidden] += layers
        found["backward", "reduce_scatter", etp * hidden] += layers
        found["backward", "reduce_scatter", etp * sent] += layers
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("degrees", OVER.values(), ids=OVER)
def test_dispatch_and_combine(shape: dict[str, int], degrees: dict[str, int]) -> None:
    traces = synthesized(shape, degrees)
    found = Counter(
        (str(n.get("phase")), str(n.get("op")), int(str(n.get("comm_size")))) for n in of_experts(traces)
    )
    assert found == expected(shape, degrees)


@pytest.mark.parametrize("degrees", OVER.values(), ids=OVER)
def test_members_of_an_all_to_all_are_neighbours(degrees: dict[str, int]) -> None:
    """ep x etp consecutive ranks hold all experts once; every etp-th of them is one group of the all-to-all."""
    traces = synthesized(SHAPES[0], degrees)
    ep, etp = degrees.get("ep", 1), degrees.get("etp", 1)
    for rank in traces.ranks:
        first = rank // (ep * etp) * ep * etp
        groups = {"all_to_all": [*range(first + rank % etp, first + ep * etp, etp)]}
        for n in communication(traces, rank):
            if n.get("op") in groups:
                assert traces.groups[str(n.get("pg_name"))] == groups[str(n.get("op"))]


@pytest.mark.parametrize("degrees", OVER.values(), ids=OVER)
def test_gradients_of_experts_are_reduced_over_edp(degrees: dict[str, int]) -> None:
    """Those of a rank's experts over the ranks that have the same ones; those of all else over dp x cp."""
    shape = SHAPES[1]
    traces = synthesized(shape, degrees, zero=0, bucket_size=0)
    world = 1
    for axis in ("dp", "cp", "tp"):
        world *= degrees.get(axis, 1)
    ep, etp = degrees.get("ep", 1), degrees.get("etp", 1)
    edp, data = world // (ep * etp), degrees.get("dp", 1) * degrees.get("cp", 1)
    own = shape["layers"] * 3 * (EXPERTS // ep) * shape["d_model"] * (HIDDEN // etp) * FP32
    buckets = [n for n in communication(traces) if "bucket" in n.name]
    sizes = {len(traces.groups[str(n.get("pg_name"))]): n.get("comm_size") for n in buckets}
    assert len(buckets) == (edp > 1) + (data > 1)
    if edp > 1:
        assert own in [n.get("comm_size") for n in buckets]
        assert edp == data or sizes[edp] == own


@pytest.mark.parametrize("degrees", OVER.values(), ids=OVER)
def test_experts_are_grouped_matrix_multiplications(degrees: dict[str, int]) -> None:
    """Gate, up and down are one kernel each (gate and up together under fuse), however many experts a rank has.

    Each rank's work is that of its share of routed tokens: 2 x top_k tok x d_model x hidden a projection.
    """
    shape = SHAPES[1]
    traces = synthesized(shape, degrees)
    work = 2 * routed(shape, degrees) * shape["d_model"] * HIDDEN
    found = Counter(
        (str(n.get("phase")), int(str(n.get("num_ops"))))
        for n in traces.nodes(0)
        if "experts" in n.name and get_op(str(n.get("op"))).is_matmul
    )
    layers = shape["layers"]
    assert found == {
        ("forward", 2 * work): layers,
        ("forward", work): layers,
        ("backward", 2 * work): 2 * layers,
        ("backward", work): 2 * layers,
    }


NUMERIC = {name: OVER[name] for name in ("dp", "dp x cp", "dp x cp x tp", "dp x cp x tp / etp")}


@pytest.mark.parametrize("degrees", NUMERIC.values(), ids=NUMERIC)
@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
def test_experts_compute_what_one_device_does(model: str, degrees: dict[str, int]) -> None:
    compare(model, "megatron_moe", degrees, sizes={"experts": EXPERTS})
