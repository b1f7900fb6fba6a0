"""Where the time of a step goes: computing, communication that nothing hides, and waiting.

At each moment of a track's step exactly one holds: it computes; it does not compute but communicates (**exposed**
communication); or it does neither, because it waits for another device (the **bubble**). A moment in which several
kinds of communication are exposed belongs to the one that began first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage.cost.timeline import Span

__all__ = ["Breakdown", "Intervals", "break_down", "total", "union", "without"]

Floats = NDArray[np.float64]

Intervals = NDArray[np.float64]
"""Rows of starts and ends, in seconds, that do not overlap and ascend."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one track's step: `compute + sum(exposed) + bubble` is the step.

    `communication` are the seconds of each kind of communication, hidden or not.
    """

    step: float
    compute: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble: float


def union(spans: Intervals) -> Intervals:
    """The moments in any of these spans, which may overlap.

    >>> union(np.array([[2.0, 3.0], [0.0, 1.0], [0.5, 2.0]])).tolist()
    [[0.0, 3.0]]
    """
    spans = spans[spans[:, 1] > spans[:, 0]]
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return spans
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], reach[last]], axis=1)


def without(spans: Intervals, holes: Intervals) -> Intervals:
    """The moments in `spans` and not in `holes`, which are both unions.

    >>> without(np.array([[0.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 5.0]])).tolist()
    [[0.0, 1.0], [2.0, 3.0]]
    """
    points = np.unique(np.concatenate([spans.ravel(), holes.ravel()]))
    if len(points) < 2:
        return spans[:0]
    middle = (points[:-1] + points[1:]) / 2
    kept = _inside(middle, spans) & ~_inside(middle, holes)
    return union(np.stack([points[:-1][kept], points[1:][kept]], axis=1))


def _inside(moments: Floats, spans: Intervals) -> NDArray[np.bool_]:
    """Whether each moment lies in one of the spans."""
    at = np.searchsorted(spans[:, 0], moments, side="right") - 1
    return (at >= 0) & (moments < spans[np.maximum(at, 0), 1]) if len(spans) else np.zeros(len(moments), bool)


def total(spans: Intervals) -> float:
    """Seconds of spans that do not overlap."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def break_down(span: Span, kinds: Sequence[str], which: NDArray[np.int64], step: float) -> Breakdown:
    """Where the step of a track goes.

    `which[n]` is the place in `kinds` of the communication that node n is, -1 for a kernel. `step` is the end of the
    whole job.
    """
    rows = np.stack([span.start, span.end], axis=1)
    busy = union(rows[which < 0])
    found, exposed = {}, {}
    own = [(kind, union(rows[which == number])) for number, kind in enumerate(kinds)]
    covered = busy
    for kind, spans in sorted(own, key=lambda item: item[1][0, 0] if len(item[1]) else step):
        if not len(spans):
            continue
        open_ = without(spans, covered)
        found[kind], exposed[kind] = total(spans), total(open_)
        covered = union(np.concatenate([covered, open_]))
    compute = total(busy)
    return Breakdown(step, compute, found, exposed, step - compute - sum(exposed.values()))
