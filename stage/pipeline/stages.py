"""Cutting a model into pipeline stages, of which there are as many as ranks and their chunks.

The embedding is on the first stage and the head on the last, always; layers are shared out evenly, or as asked. A first
or last stage without layers is the embedding or the head alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stage.errors import StrategyError
from stage.model import Block, Model
from stage.pipeline.schedule import Pipeline

__all__ = ["Unit", "cut"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A block at its place: `layer` counts from 0 over the model; embedding and head have none (-1)."""

    block: Block
    layer: int = -1


def cut(model: Model, pipeline: Pipeline, stage_layers: Sequence[int] | None = None) -> list[list[Unit]]:
    """The units of each stage, in order.

    A `StrategyError` if the layers do not divide by the stages and `stage_layers` does not say how to share them.
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
    units, first = [], 0
    for stage, n in enumerate(stage_layers):
        own = [Unit(model.layers[i], i) for i in range(first, first + n)]
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
