"""An estimate: how long a step of a job takes on a system, and where its time goes.

Every different kernel and exchange is priced by a cost model, the nodes of each rank class run in time, and the parts
of the step are measured on every class. Definitions:

* `mfu` is the FLOPs that the model needs (2 a multiply-add of its matrix multiplications, half under a causal mask,
  nothing for recomputation) over what all devices could do at the peak of the compute dtype in the time of the step;
  `hfu` counts what is executed instead, recomputation included.
* `bubble_fraction` and `exposed_communication_seconds` are means over all ranks (`stage.cost.breakdown`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage.cost.breakdown import Breakdown, break_down
from stage.cost.pricing import Prices
from stage.cost.timeline import run_tracks
from stage.cost.tracks import Nodes, job_tracks, program_nodes
from stage.errors import StageError
from stage.trace.job import Job
from stage.trace.program import Program

__all__ = ["Estimate", "estimate_job"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step and of its parts, means over ranks; `classes` has the parts of each rank class."""

    step_seconds: float
    compute_seconds: float
    exposed: Mapping[str, float]
    communication: Mapping[str, float]
    bubble_seconds: float
    mfu: float
    hfu: float
    classes: tuple[Breakdown, ...]

    @property
    def exposed_communication_seconds(self) -> float:
        """Communication that nothing hides."""
        return sum(self.exposed.values())

    @property
    def bubble_fraction(self) -> float:
        """The share of the step in which a rank neither computes nor communicates."""
        return self.bubble_seconds / self.step_seconds


def estimate_job(job: Job, prices: Prices, peak: float, steps: int = 1) -> Estimate:
    """The estimate of a job whose work has these prices, on devices that could do `peak` FLOP/s.

    Of several `steps` all are run, and a step is their mean.
    """
    host = None if prices.launches is None else prices.host
    nodes = [program_nodes(program) for program in job.programs]
    spans = run_tracks(job_tracks(job, nodes, prices.seconds, host))
    whole = max(float(span.end.max()) for span in spans)
    if not whole > 0:
        raise StageError("no work of the job takes any time: check the cost model")
    parts = tuple(
        break_down(span, *_kinds(program, own), whole)
        for program, own, span in zip(job.programs, nodes, spans, strict=True)
    )
    done = [_flops(program) for program in job.programs]  # classes have equally many ranks
    could = peak * whole * len(parts)
    return Estimate(
        whole / steps,
        _mean([part.compute for part in parts]) / steps,
        _means([part.exposed for part in parts], steps),
        _means([part.communication for part in parts], steps),
        _mean([part.bubble for part in parts]) / steps,
        sum(model for model, _ in done) / could,
        sum(executed for _, executed in done) / could,
        parts,
    )


def _kinds(program: Program, nodes: Nodes) -> tuple[list[str], Ints]:
    """The kinds of communication of a program, with the axes they are over, and which of them each node is."""
    names: dict[str, int] = {}
    values = []
    for template in program.templates:
        own = [
            -1 if n.is_compute else names.setdefault(f"{n.kind} {' '.join(n.axes) or 'pp'}", len(names))
            for n in template.nodes
        ]
        values.append(np.array(own, np.int64))
    column: Ints = nodes.expand(values).astype(np.int64)
    return list(names), column


def _flops(program: Program) -> tuple[int, int]:
    """What a program's matrix multiplications do for the model, and in all."""
    model = executed = 0
    for template, count in zip(program.templates, program.counts(), strict=True):
        model += count * sum(node.model_flops for node in template.nodes)
        executed += count * sum(node.flops for node in template.nodes if node.matmul)
    return model, executed


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _means(parts: list[Mapping[str, float]], steps: int) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _mean([part.get(name, 0.0) for part in parts]) / steps for name in names}
