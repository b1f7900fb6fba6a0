"""DualPipe-V: two chunks a rank in a V, and in the steady phase each forward beside a backward of the other chunk.

DeepSeek-AI's DualPipe (2024) cut in half by Sea AI Lab. Forward and backward that stand beside each other can hide each
other's communication; only in warm-up and cool-down are backwards split, so that weight gradients fill gaps.
"""

from stage.pipeline.schedule import Action, Phases, Pipeline, Schedule
from stage.pipeline.schedules.recipe import Recipe

__all__ = ["DUALPIPE_V"]


def dualpipe_v(pipeline: Pipeline, rank: int) -> Phases:
    """The order of a rank.

    >>> print(dualpipe_v(Pipeline(2, 4, 2, v_shaped=True), 1))
    0F0 1F0 0F1 1F1 | 0F2 1B0 1F2 0B0 0F3 1B1 1F3 0B1 | 1B2 0B2 1I3 0I3 1W3 0W3
    """
    after, recipe = pipeline.ranks - rank - 1, Recipe()
    warmup = recipe.run("0F", 2 * after) + recipe.run("0F 1F", rank + 1) + recipe.run("1I 1W 1F", after)
    steady = recipe.run("0F 1B 1F 0B", pipeline.micro_batches - 2 * pipeline.ranks + rank + 1)
    cooldown = recipe.run("1B 1F 0B", after)
    last = ["1", "0"] * (rank + 1)
    cooldown += recipe.run(" ".join(f"{chunk}B" for chunk in last[: rank + 1]))
    waiting = recipe.run(" ".join(f"{chunk}I" for chunk in last[rank + 1 :]))
    cooldown += waiting
    for _ in range(after):
        cooldown.append(_weights(waiting.pop(0)))
        waiting += recipe.run("0I")
        cooldown.append(waiting[-1])
    return Phases(warmup, steady, cooldown + [_weights(action) for action in waiting])


def _weights(action: Action) -> Action:
    """The weight gradients that an input gradient has left to be done."""
    return Action("W", action.chunk, action.micro_batch)


def _too_few(pipeline: Pipeline) -> str | None:
    if pipeline.micro_batches >= pipeline.stages:
        return None
    return (
        f"needs at least 2 pp = {pipeline.stages} micro-batches, but a step has {pipeline.micro_batches}; "
        "raise --batch, or lower --micro-batch or --pp"
    )


DUALPIPE_V = Schedule("dualpipe-v", dualpipe_v, chunks=(2, 2), v_shaped=True, splits=True, refuses=_too_few)
