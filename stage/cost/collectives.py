"""Seconds of collectives by algorithm, as NCCL models them to choose one: latency of the steps and bytes by bandwidth.

The formulas are those of `ncclTopoTuneModel` and `ncclTopoGetAlgoTime` in NCCL's `src/graph/tuning.cc`, with these
differences. Bandwidth is what links reach, and two things are added to the bytes: a pipeline has to fill, and the
first and last round of a ring, in which a device only sends or only receives, hide only in part: they cost `ENDS` of
a round. A ring of one member a node takes the steps of a ring, not of a tree: 16 to 64 GPUs in SimAI's table
(https://github.com/aliyun/SimAI at cef83f9d) are faster than either.

A group has `inner` members in each of `outer` nodes. Its rings go through every member and leave a node by the adapters
of all inner members, so that the slower of NVLink and those adapters together bounds the bandwidth.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf, log2

from stage.cost.levels import Level
from stage.cost.links import FILL, PLAIN, Protocol

__all__ = ["GATHERS", "Nodes", "candidates", "message", "shuffle"]

ENDS = 0.4
"""Of a round of a ring; from large all_gather, reduce_scatter and all_reduce on 2, 4 and 8 A100, H100 and B200."""

PLATEAU = 1.4
"""How much slower the steps of an all-reduce by Simple are in a ring over nodes (tuning.cc: plateau effect of ring)."""

PAT_SHARE, PAT_BASE, PAT_DEPTH, PAT_MEMBER = 0.75, 8.0e-6, 3.5, 2.8e-6
"""Of NCCL's PAT: its share of bandwidth, seconds before, overlap of the log2 n steps, and seconds for each member."""

COLLNET_STEP, COLLNET_MEMBER, COLLNET_NET = 3.1e-6, 0.4e-6, 28.3e-6
"""Seconds of NCCL's CollNetDirect: of a step within a node and of each member there, and of one across; see `Link`."""

MESSAGE_LL = 16384
"""Bytes of a message up to which NCCL sends it by LL (`NCCL_P2P_LL_THRESHOLD`); LL128 is not for messages."""

GATHERS = ("all_gather", "reduce_scatter")
REDUCED = ("", "fp64", "fp32", "tf32", "fp16", "bf16")
"""Dtypes that a switch adds; without one the network does not know it, and the default is assumed."""

TREE_SHARES = {
    "LL": (
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.7,
        0.7,
        0.7,
        0.7,
        0.6,
        0.5,
        0.4,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1,
        1,
        1,
        1,
        1,
    ),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, *(0.6,) * 6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "Simple": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
}
"""`treeCorrectionFactor`: of 64 bytes and each power of two more; between them it is interpolated here."""

Algorithm = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Nodes:
    """A group of `g` members in each of `m` nodes, over the levels within and across; None where there is one."""

    inner: Level | None
    outer: Level | None

    @property
    def g(self) -> int:
        """Members within a node."""
        return self.inner.members if self.inner else 1

    @property
    def m(self) -> int:
        """Nodes."""
        return self.outer.members if self.outer else 1

    @property
    def bandwidth(self) -> float:
        """Bytes a second through a node of all rings together."""
        inside = self.inner.bandwidth if self.inner else inf
        return min(inside, self.g * self.outer.bandwidth if self.outer else inf)

    def protocols(self) -> Iterator[tuple[str, Protocol, Protocol]]:
        """The protocols that all its links have, within and across; the same twice where there is one level."""
        for name, found in _protocols([level for level in (self.inner, self.outer) if level]):
            yield name, found[0], found[-1]


def _protocols(levels: Sequence[Level]) -> Iterator[tuple[str, list[Protocol]]]:
    """The protocols that the links of all levels have; a plain link goes along with any."""
    all_have = [level.link.protocols for level in levels]
    names = [name for have in all_have for name in have if name != PLAIN]
    for name in dict.fromkeys(names or [PLAIN]):
        if all(name in have or PLAIN in have for have in all_have):
            yield name, [have.get(name) or have[PLAIN] for have in all_have]


def candidates(kind: str, nodes: Nodes, dtype: str) -> Iterator[Algorithm]:
    """The algorithms for a collective, each seconds as a function of the bytes of its whole buffer."""
    for name, inner, outer in nodes.protocols():
        yield partial(_ring, kind, nodes, name, inner, outer)
        if kind == "all_reduce":
            yield partial(_tree, nodes, name, inner, outer)
    if kind == "all_reduce" and dtype in REDUCED:
        if nodes.inner and nodes.inner.adds:
            yield partial(_switch, nodes)
        if nodes.outer and nodes.outer.adds:
            yield partial(_collnet, nodes)
    if kind in GATHERS and nodes.outer and not nodes.inner:
        yield partial(_pat, nodes.outer)


def _ring(kind: str, nodes: Nodes, name: str, inner: Protocol, outer: Protocol, size: float) -> float:
    """Once around for a gather or a scatter, twice for an all-reduce; a broadcast passes everything on."""
    g, m = nodes.g, nodes.m
    trips = 2 if kind == "all_reduce" else 1
    rounds = g * m if kind == "broadcast" else trips * (g * m - 1) + ENDS
    bandwidth = min(outer.ring * nodes.bandwidth, outer.cap)
    latency = trips * (g * m - m) * _within(nodes, inner, simple=name == "Simple")
    if nodes.outer:
        latency += trips * (m - 1) * (nodes.outer.latency + outer.ring_step)
        latency *= PLATEAU if kind == "all_reduce" and name == "Simple" else 1.0
    return inner.ring_base + latency + rounds / (g * m) * size / bandwidth + min(outer.fill, size / bandwidth)


def _within(nodes: Nodes, protocol: Protocol, *, simple: bool) -> float:
    """Seconds of a step of a ring within a node; across nodes the proxy's posts are the shortest that it takes."""
    own = nodes.inner.latency + protocol.ring_step if nodes.inner else 0.0
    return max(own, nodes.outer.link.post * (3 if simple else 1)) if nodes.outer else own


def _tree(nodes: Nodes, name: str, inner: Protocol, outer: Protocol, size: float) -> float:
    """Two binary trees over nodes, each with half the data and chains within a node: up, and down again."""
    latency = (nodes.g - 1) * (nodes.inner.latency + inner.tree_step) if nodes.inner else 0.0
    if nodes.outer:
        latency += _depth(nodes.m) * (nodes.outer.latency + outer.tree_step)
    bandwidth = min(outer.tree * nodes.bandwidth, outer.cap) * _tree_share(name, size)
    return inner.tree_base + 2 * latency + 2 * size / bandwidth + min(outer.fill, size / bandwidth)


def _tree_share(name: str, size: float) -> float:
    """What trees reach of their bandwidth at a size."""
    shares = TREE_SHARES.get(name)
    if shares is None:
        return 1.0
    place = min(max(log2(max(size, 1) / 64), 0.0), len(shares) - 1.0)
    low, high = list(pairwise(shares))[min(int(place), len(shares) - 2)]
    return low + (high - low) * (place - min(int(place), len(shares) - 2))


def _switch(nodes: Nodes, size: float) -> float:
    """NVLink SHARP: a device sends everything and a share of the sum; across nodes in trees (NVLSTree).

    The trees carry the bytes that a node sends, all up and all down: twice the buffer, or once between two nodes.
    """
    inner, outer = nodes.inner, nodes.outer
    assert inner is not None
    link = inner.link
    through = (1 + 1 / inner.members) / (link.reduction * inner.raw)
    latency = inner.latency + link.reduction_step
    seconds = size * through
    if outer:
        latency += 2 * _depth(outer.members) * (outer.latency + outer.link.reduction_step)
        seconds = max(seconds, (1 if outer.members == 2 else 2) * size / (inner.members * outer.bandwidth))
    return latency + seconds + min(FILL, size * through)


def _collnet(nodes: Nodes, size: float) -> float:
    """Switches across nodes add (CollNetDirect): scattered and gathered within nodes, once through the adapters."""
    outer, g, seconds, latency = nodes.outer, nodes.g, 0.0, 0.0
    assert outer is not None
    if nodes.inner:
        seconds = 2 * (g - 1) / g * size / nodes.inner.bandwidth
        latency = 2 * (nodes.inner.latency + COLLNET_STEP + (g - 1) * COLLNET_MEMBER)
    seconds = max(seconds, size / (g * outer.bandwidth))
    return latency + outer.latency + COLLNET_NET + seconds + min(FILL, seconds)


def _pat(outer: Level, size: float) -> float:
    """NCCL's PAT, where every node has one member."""
    n, protocol = outer.members, outer.link.protocols.get("Simple")
    step = outer.latency + (protocol.tree_step if protocol else 0.0)
    seconds = (n - 1) / n * size / (PAT_SHARE * outer.bandwidth)
    return PAT_BASE + _depth(n) * step / PAT_DEPTH + n * PAT_MEMBER + seconds


def _depth(nodes: int) -> int:
    """Steps from the leaves of a binary tree to its root."""
    return (nodes - 1).bit_length()


def shuffle(levels: Sequence[Level], size: float) -> float:
    """All to all, each to each at once: within nodes and across them concurrently, so that the slowest level counts.

    Beside what it sends, a device copies its own share; each message across nodes has to be posted.
    """
    n = 1
    for level in levels:
        n *= level.members
    slowest, inside = 0.0, 1
    for level in levels:
        inside *= level.members
        own = ENDS * size / n / (level.bandwidth * level.link.direct) if level.innermost else 0.0
        slowest = max(slowest, own + level.shuffle * size * inside / n)
    posts = (n - levels[0].members) * levels[-1].link.post if len(levels) > 1 else 0.0
    return _least(levels, size / n, slowest) + posts


def message(level: Level, size: float) -> float:
    """One message between two devices."""
    return _least([level], size, size / level.bandwidth)


def _least(levels: Sequence[Level], each: float, seconds: float) -> float:
    """Seconds with the fastest protocol of messages of `each` bytes whose bytes take `seconds` at full bandwidth."""
    found = inf
    for name, others in _protocols(levels):
        if name == "LL128" or (name == "LL" and each > MESSAGE_LL):
            continue
        steps = max(level.latency + one.ring_step for level, one in zip(levels, others, strict=True))
        scale = max(1 / one.ring for one in others)
        caps = max(each / one.cap for one in others)
        moved = max(seconds * scale, caps)
        found = min(found, others[0].ring_base + steps + moved + min(others[-1].fill, moved))
    return found
