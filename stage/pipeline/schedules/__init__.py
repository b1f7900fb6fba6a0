"""The schedules, one file each; `SCHEDULES` has them by name."""

from stage.errors import StrategyError
from stage.pipeline.schedule import Phases, Pipeline, Schedule
from stage.pipeline.schedules.dualpipe_v import DUALPIPE_V
from stage.pipeline.schedules.gpipe import GPIPE
from stage.pipeline.schedules.interleaved import INTERLEAVED
from stage.pipeline.schedules.looped_bfs import LOOPED_BFS
from stage.pipeline.schedules.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from stage.pipeline.schedules.zb_h1 import ZB_H1
from stage.pipeline.schedules.zb_v import ZB_V

__all__ = ["SCHEDULES", "get_schedule", "order", "plan_pipeline"]

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (ONE_FORWARD_ONE_BACKWARD, GPIPE, INTERLEAVED, LOOPED_BFS, ZB_H1, ZB_V, DUALPIPE_V)
}


def get_schedule(name: str) -> Schedule:
    """The schedule of that name; a `StrategyError` lists the known ones."""
    if name not in SCHEDULES:
        raise StrategyError(f"schedule {name!r} is not known; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def plan_pipeline(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Pipeline:
    """The shape of a pipeline under a schedule, which by default has as few chunks a rank as it can.

    A `StrategyError` if the schedule can not run it.

    >>> plan_pipeline("zb-v", ranks=4, micro_batches=8)
    Pipeline(ranks=4, micro_batches=8, chunks=2, v_shaped=True)
    >>> plan_pipeline("1f1b", ranks=4, micro_batches=8, chunks=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    stage.errors.StrategyError: vpp = 2, but schedule 1f1b needs vpp = 1; set --vpp 1, or --schedule to ...
    """
    schedule = get_schedule(name)
    least, most = schedule.chunks
    chunks = least if chunks is None else chunks
    if not schedule.allows(chunks):
        wanted = f"vpp = {least}" if most == least else f"vpp of at least {least}"
        others = ", ".join(other.name for other in SCHEDULES.values() if other.allows(chunks))
        raise StrategyError(
            f"vpp = {chunks}, but schedule {name} needs {wanted}; set --vpp {least}, or --schedule to one of {others}"
        )
    pipeline = Pipeline(ranks, micro_batches, chunks, schedule.v_shaped)
    refusal = schedule.refuses(pipeline)
    if refusal is not None:
        raise StrategyError(f"schedule {name} {refusal}")
    return pipeline


def order(name: str, pipeline: Pipeline, rank: int) -> Phases:
    """The actions of a rank.

    >>> print(order("interleaved", plan_pipeline("interleaved", 2, 2), 1))
    0F0 0F1 | 1F0 1B0 1F1 1B1 | 0B0 0B1
    """
    return get_schedule(name).order(pipeline, rank)
