"""ZB-V: two chunks a rank in a V, and weight gradients held back until they fill every gap (Qi et al. 2024).

The last stage stands where the first one does, so a micro-batch comes back to where its loss is needed first, and no
rank waits between its first and its last action if F, I and W take the same time. In flight there are never more
activations than 1F1B has on its first rank.
"""

from stage.pipeline.schedule import Action, Phases, Pipeline, Schedule
from stage.pipeline.schedules.recipe import Recipe

__all__ = ["ZB_V"]


def zb_v(pipeline: Pipeline, rank: int) -> Phases:
    """The order of a rank; one of few micro-batches is that of more without those that are not there.

    >>> print(zb_v(Pipeline(2, 3, 2, v_shaped=True), 1))
    0F0 1F0 0F1 1F1 1I0 1W0 | 0F2 0I0 0W0 1F2 1I1 1W1 | 0I1 1I2 0I2 0W1 1W2 0W2
    """
    ranks, below = pipeline.ranks, pipeline.ranks - rank
    total, recipe = max(pipeline.micro_batches, 2 * ranks - 1), Recipe()
    warmup = recipe.run("0F", 2 * below - 1) + recipe.run("1F 0F", rank) + recipe.run("1F 1I 1W", below)
    alone = ranks - rank - 1  # the last forwards of the second chunk find none of the first left
    steady = recipe.run("0F 0I 0W 1F 1I 1W", total - ranks - alone) + recipe.run("0I 0W 1F 1I 1W", alone)
    cooldown = recipe.run("0I 1I", rank) + recipe.run("0I 0W", below)
    cooldown += recipe.run("1W", rank) + recipe.run("0W", rank)

    def present(actions: list[Action]) -> list[Action]:
        return [action for action in actions if action.micro_batch < pipeline.micro_batches]

    return Phases(present(warmup), present(steady), present(cooldown))


ZB_V = Schedule("zb-v", zb_v, chunks=(2, 2), v_shaped=True, splits=True)
