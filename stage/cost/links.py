"""Generations of links: what share of its bandwidth a collective reaches, and what its steps cost beside the bytes.

A `[[network]]` tier names its link. The figures of protocols are NCCL's own, by which it chooses among them
(`src/graph/tuning.cc` at 5067397, https://github.com/NVIDIA/nccl: baseLatencies, hwLatencies, llMaxBws, and the
shares in ncclTopoTuneModel), and the rest is set by these rows, mostly messages of 256 MiB and more:

* `efficiency` of nvlink3, nvlink4, nvlink5: all_gather, reduce_scatter and all_reduce (of INT8, which no switch adds)
  on 8 A100, H100 and B200, NCCL 2.27.3 and 2.29.2, in the tables of aiconfigurator-core 0.12.0; on A100 also vTrain's
  all_reduce on 8, https://github.com/VIA-Research/vTrain at f8dda847;
* `reduction`: all_reduce of FP16 there, on 8 H100 and B200; `direct`: all_to_all there, 0.93, 0.92 and 0.86 of a ring;
* pcie: SimuMax's fits for 2 and 4 A100 on PCIe, https://github.com/MooreThreads/SimuMax at 4dcaae513b;
* network: 16 GPUs on 16 nodes in SimAI's table, https://github.com/aliyun/SimAI at cef83f9d.

By messages of all sizes on 8 GPUs a step on A100 and B200 takes twice what NCCL says, on H100 as long. That all-to-alls
of up to 16 KiB use the low-latency protocol, and `FILL`, are from the small ones there; what the ends of a pipeline
cost (`stage.cost.collectives`) is from 2, 4 and 8 GPUs. The form of the model was chosen with all of these tables in
view, so how well it meets them is no prediction; of H200, GB200 and GB300 nothing was used. Links of other vendors are
assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

__all__ = ["FILL", "LINKS", "PLAIN", "Link", "Protocol"]

US, GB = 1e-6, 1e9


PLAIN = "plain"
"""The name of links of which nothing is known, and of their protocol."""

FILL = 24 * US
"""Seconds until data flow through all of a pipeline, or the time of the bytes if they are few."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A way to move messages: `ring` and `tree` are the shares of the bandwidth that it leaves, at most `cap` bytes/s.

    `ring_base` and `tree_base` are seconds before the first step; a step takes `ring_step` or `tree_step` seconds
    beside the latency of the tier. `fill` is how long its pipeline takes to fill.
    """

    ring: float
    tree: float
    cap: float
    ring_base: float
    tree_base: float
    ring_step: float
    tree_step: float
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A generation of links.

    `efficiency` is the share of a tier's bandwidth that a ring reaches with large messages, `direct` the share of
    that when each sends to each. Of a switch that adds, `reduction` is the share of the bandwidth at which data go
    through it, and `reduction_step` the seconds that a use takes beside the latency. `post` is the seconds to
    post one message (`getNetOverhead`).
    """

    protocols: Mapping[str, Protocol]
    efficiency: float
    direct: float = 0.9
    reduction: float = 0.6
    reduction_step: float = 24.4 * US
    post: float = 1 * US


def _nccl(cap: float, steps: Mapping[str, tuple[float, float]], tree128: float = 1.0) -> dict[str, Protocol]:
    """NCCL's protocols, by the us of a step of a ring and of a tree beside the latency; LL may send `cap` GB/s."""
    shares = {"LL": (0.5, 1 / 3.8), "LL128": (0.92, tree128), "Simple": (1.0, 1.0)}
    bases = {"LL": (6.6, 6.8), "LL128": (14.0, 14.0), "Simple": (8.4, 8.4)}
    return {
        name: Protocol(
            shares[name][0],
            0.92 * shares[name][1],
            cap * GB if name == "LL" else inf,
            bases[name][0] * US,
            bases[name][1] * US,
            ring * US,
            tree * US,
            FILL if name == "Simple" else 0.0,
        )
        for name, (ring, tree) in steps.items()
    }


_NVLINK = {"LL": (0.0, 0.0), "LL128": (1.3, 0.65), "Simple": (2.8, 3.4)}
_TWICE = {"LL": (0.6, 0.6), "LL128": (3.2, 1.9), "Simple": (6.2, 7.4)}
_PCIE = {"LL": (0.0, 0.0), "Simple": (4.7, 3.0)}
_NETWORK = {"LL": (0.0, 2.3), "LL128": (1.3, 5.8), "Simple": (11.3, 11.3)}

LINKS: Mapping[str, Link] = {
    "nvlink3": Link(_nccl(87.7, _TWICE, 7 / 9), 0.785),
    "nvlink4": Link(_nccl(141, _NVLINK, 7 / 9), 0.82, reduction=0.65),
    "nvlink5": Link(_nccl(282, _TWICE, 7 / 9), 0.81, reduction=0.52),
    "pcie": Link(_nccl(87.7, _PCIE), 0.66),
    "network": Link(_nccl(20, _NETWORK, 120 / 128), 0.96, reduction_step=18.2 * US),
    "infinity_fabric": Link(_nccl(87.7, _NVLINK, 7 / 9), 0.75),
    PLAIN: Link({PLAIN: Protocol(1.0, 0.92, inf, 6.6 * US, 6.8 * US, 0.0, 0.0, FILL)}, 0.85),
}
"""By the name that a tier gives; `plain` is any other link: one protocol, whose steps take the tier's latency."""
