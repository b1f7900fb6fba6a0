"""Prices of a job: every different kernel and exchange is priced once, and each node gets the price of its kind."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stage.cost.work import CostModel, Exchange, HostModel, Kernel
from stage.trace.job import Job
from stage.trace.peer import Peer
from stage.trace.template import Template, TemplateNode

__all__ = ["Prices", "Spread", "kernel_of", "price_job"]

Floats = NDArray[np.float64]

Spread = Callable[[tuple[str, ...] | Peer, int], tuple[int, ...]]
"""Where members of a group over axes, or two peers, are for the ranks of a class (`Exchange.spread`)."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of each different piece of work of a job."""

    spread: Spread
    kernels: Mapping[Kernel, float]
    exchanges: Mapping[Exchange, float]
    launches: Mapping[Kernel, float] | None = None
    _known: dict[Hashable, Floats] = field(default_factory=dict)

    def seconds(self, template: Template, number: int) -> Floats:
        """How long each node of a template takes on the ranks of a class; a receive by itself takes no time."""
        key = (id(template), number)
        if key not in self._known:
            self._known[key] = np.array([self._of(node, number) for node in template.nodes])
        return self._known[key]

    def host(self, template: Template, _number: int) -> Floats:
        """How long the host takes to issue each node; communication is issued in no time of its own."""
        launches = self.launches or {}
        return np.array([launches[kernel_of(node)] if node.is_compute else 0.0 for node in template.nodes])

    def _of(self, node: TemplateNode, number: int) -> float:
        if node.is_compute:
            return self.kernels[kernel_of(node)]
        if node.kind == "recv":
            return 0.0
        return self.exchanges[_exchange_of(node, number, self.spread)]


def kernel_of(node: TemplateNode) -> Kernel:
    """What a cost model is told of a kernel."""
    return Kernel(node.op, node.dtype, node.flops, node.bytes, node.shapes, node.matmul, node.phase)


def _exchange_of(node: TemplateNode, number: int, spread: Spread) -> Exchange:
    between = node.axes if node.peer is None else node.peer
    return Exchange(node.kind, node.bytes, spread(between, number), node.dtype)


def price_job(job: Job, model: CostModel, spread: Spread) -> Prices:
    """The prices of all work of a job."""
    kernels: dict[Kernel, float] = {}
    exchanges: dict[Exchange, float] = {}
    for number, program in enumerate(job.programs):
        for node in (node for template in program.templates for node in template.nodes):
            if node.is_compute:
                kernels[kernel_of(node)] = 0.0
            elif node.kind != "recv":
                exchanges[_exchange_of(node, number, spread)] = 0.0
    kernels = dict(zip(kernels, model.kernels(list(kernels)).tolist(), strict=True))
    exchanges = dict(zip(exchanges, model.exchanges(list(exchanges)).tolist(), strict=True))
    launches = None
    if isinstance(model, HostModel):
        launches = dict(zip(kernels, model.host_seconds(list(kernels)).tolist(), strict=True))
    return Prices(spread, kernels, exchanges, launches)
