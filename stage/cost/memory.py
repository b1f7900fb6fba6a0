"""Memory of a rank over the order of its program, by category, and its peak.

A rank runs the actions of its schedule one after the other, and an action the blocks of a chunk. What a block holds is
known once for its kind (`stage.cost.block_memory`); here are sums over micro-batches in flight, as numpy columns over
actions. What a category costs is said in `docs/cost.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stage.cost.block_memory import BlockMemory
from stage.cost.chunk_memory import CATEGORIES, ChunkMemory
from stage.cost.runtime import Runtime
from stage.cost.stored_memory import Stored, stored_memory
from stage.pipeline.schedule import Action
from stage.pipeline.schedules import order
from stage.trace.plan import StagePlan, StepPlan

__all__ = ["Peak", "RankMemory", "rank_memory"]

Ints = NDArray[np.int64]

ACTIVATIONS, TEMPORARIES = CATEGORIES.index("activations"), CATEGORIES.index("temporaries")


@dataclass(frozen=True, slots=True)
class Peak:
    """Where a rank holds most.

    The bytes by category; the action (as `0B3`: chunk, kind, micro-batch), the kind of block, its layer (-1 for
    embedding and head) and the node that runs; the largest tensors of that block there; and the bytes of activations
    that micro-batches in flight had before the action, by chunk and micro-batch.
    """

    categories: Mapping[str, int]
    action: str
    block: str
    layer: int
    node: str
    tensors: tuple[tuple[str, int], ...]
    in_flight: Mapping[tuple[int, int], int]

    @property
    def bytes(self) -> int:
        """What the allocator has handed out."""
        return sum(self.categories.values())


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank: what it stores, and what it holds `after` each action and at `most` within it.

    The columns of both are `CATEGORIES`, in bytes.
    """

    stored: Stored
    actions: tuple[Action, ...]
    after: Ints
    most: Ints
    chunks: tuple[ChunkMemory, ...]
    runtime: Runtime

    @cached_property
    def peak(self) -> Peak:
        """The first action at which most is held."""
        at = int(np.argmax(self.most.sum(axis=1)))
        action = self.actions[at]
        where = self.chunks[action.chunk].peak(action.kind)
        return Peak(
            dict(zip(CATEGORIES, self.most[at].tolist(), strict=True)),
            str(action),
            where.block,
            where.layer,
            where.node,
            where.tensors,
            self._in_flight(at),
        )

    @property
    def reserved(self) -> int:
        """Bytes that the device must have: what comes and goes with the allocator's slack, and what it never sees."""
        fleeting = self.peak.bytes - self.stored.total
        return round(self.peak.bytes + self.runtime.fraction_reserved * fleeting) + self.runtime.context

    @property
    def kept_chunks(self) -> int:
        """The most chunks of activations that are kept at once."""
        changes = [{"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in self.actions]
        return int(np.cumsum(changes).max())

    def curve(self) -> dict[str, list[int]]:
        """Bytes by category after each action."""
        return {name: self.after[:, i].tolist() for i, name in enumerate(CATEGORIES)}

    def _in_flight(self, at: int) -> dict[tuple[int, int], int]:
        """Activations of the micro-batches that are between their forward and their backward before an action."""
        held: dict[tuple[int, int], int] = {}
        for action in self.actions[:at]:
            key = action.chunk, action.micro_batch
            held[key] = held.get(key, 0) + int(self.chunks[action.chunk].change(action.kind))
        return {key: size for key, size in held.items() if size}


def rank_memory(
    plan: StagePlan, step: StepPlan, blocks: Sequence[BlockMemory], runtime: Runtime
) -> RankMemory:
    """The memory of the ranks of a stage, whose `blocks` are those of `plan.units`."""
    stored = stored_memory(plan, step)
    chunks = tuple(ChunkMemory(plan, step, blocks, number) for number in range(len(plan.chunks)))
    actions = tuple(order(step.schedule, step.pipeline, plan.rank).actions)
    base = np.zeros(len(CATEGORIES), np.int64)
    base[:3] = stored.parameters, stored.gradients, stored.optimizer
    base[0] += sum(block.weights for block in blocks)
    base[TEMPORARIES] = runtime.workspace + _placeholders(plan, step, runtime)
    changes = np.array([chunks[action.chunk].change(action.kind) for action in actions], np.int64)
    most = np.array([chunks[action.chunk].peak(action.kind).bytes for action in actions], np.int64)
    level = np.zeros((len(actions), len(CATEGORIES)), np.int64)
    level[:, ACTIVATIONS] = np.cumsum(changes)
    before = np.roll(level, 1, axis=0)
    before[0] = 0
    during, after = base + before + most, base + level
    for chunk in chunks:
        lasting = chunk.lasting(actions)
        during, after = during + lasting[0], after + lasting[1]
    return RankMemory(stored, actions, after, during, chunks, runtime)


def _placeholders(plan: StagePlan, step: StepPlan, runtime: Runtime) -> int:
    """Bytes of the empty gradients that stay allocated, one for each shape of a layer's weights."""
    if not runtime.fused_accumulation or step.sharding.zero == 3:
        return 0
    shapes: set[tuple[int, int]] = set()
    for unit in plan.units:
        if unit.layer < 0:
            continue
        fused: dict[str, list[tuple[int, int]]] = {}
        for p in unit.parameters:
            if p.columns > 1:
                fused.setdefault(p.fused, []).append((p.rows // p.parts, p.columns))
        shapes |= {(sum(rows for rows, _ in own), own[0][1]) for own in fused.values()}
    return sum(rows * columns for rows, columns in shapes) * step.widths["compute"]
