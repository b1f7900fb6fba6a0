"""Cutting a model into pipeline stages, of which there are as many as ranks and their chunks.

The embedding is on the first stage and the head on the last, always; layers are shared out evenly, or as asked. A first
or last stage without layers is the embedding or the head alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stage.errors import StrategyError
from stage.model import Block, Model
from stage.pipeline.schedule import Pipeline
from stage.recomputation import NO_RECOMPUTATION, Recomputation

__all__ = ["Unit", "cut"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A block at its place: `layer` counts from 0 over the model; embedding and head have none (-1).

    A `recomputed` one keeps less for its backward, as the policy says.
    """

    block: Block
    layer: int = -1
    recomputed: bool = False

    @property
    def kind(self) -> tuple[Block, bool]:
        """What units that run alike have in common."""
        return self.block, self.recomputed


def cut(
    model: Model,
    pipeline: Pipeline,
    stage_layers: Sequence[int] | None = None,
    recomputation: Recomputation = NO_RECOMPUTATION,
) -> list[list[Unit]]:
    """The units of each stage, in order.

    A `StrategyError` if the layers do not divide by the stages and `stage_layers` does not say how to share them, or if
    no stage has a layer that the `recomputation` chooses.
    """
    count, stages = len(model.layers), pipeline.stages
    name = "pp" if pipeline.chunks == 1 else "pp x vpp"
    if stage_layers is None:
        if count % stages:
            raise StrategyError(
                f"{count} layers of {model.name} do not divide by {name} = {stages}; "
                f"choose a {name} that divides them, "
                f"or give --stage-layers with {stages} numbers that add up to {count}"
            )
        stage_layers = [count // stages] * stages
    if len(stage_layers) != stages or sum(stage_layers) != count or min(stage_layers) < 0:
        raise StrategyError(
            f"stage layers {','.join(map(str, stage_layers))} are {len(stage_layers)} numbers that add up to "
            f"{sum(stage_layers)}; give {stages} numbers ({name}) that add up to the {count} layers of {model.name}"
        )
    if recomputation.every > max(stage_layers):
        raise StrategyError(
            f"recompute is '{recomputation}', but no stage of {model.name} has more than {max(stage_layers)} layers; "
            "choose a smaller number"
        )
    units, first = [], 0
    for stage, n in enumerate(stage_layers):
        own = [Unit(model.layers[first + i], first + i, recomputation.chooses(i)) for i in range(n)]
        own = (
            ([Unit(model.embedding)] if stage == 0 else [])
            + own
            + ([Unit(model.head)] if stage == stages - 1 else [])
        )
        if not own:
            raise StrategyError(
                f"stage {stage} of {model.name} has no layers; give it at least one in --stage-layers"
            )
        units.append(own)
        first += n
    return units
