"""Memory of one action: a run through the blocks of a chunk, and what data parallelism holds meanwhile.

Forward, the blocks before a running one keep their activations; backward, those not yet run still do. Under FSDP a
running block has its parameters gathered and those that are prefetched, its gradients whole, and the input of the
reduce-scatter of the block before. Under ZeRO 2 the bucket that fills up is whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stage.cost.block_memory import BlockMemory
from stage.cost.lifetimes import KINDS
from stage.pipeline.schedule import Action
from stage.trace.fsdp import parameter_groups, shard_elements
from stage.trace.parameters import Parameter
from stage.trace.plan import StagePlan, StepPlan

__all__ = ["CATEGORIES", "ActionPeak", "ChunkMemory"]

Ints = NDArray[np.int64]

CATEGORIES = ("parameters", "gradients", "optimizer", *KINDS)
"""What memory is for: what is stored, what is kept for backward, what comes and goes, and buffers of collectives."""

PARAMETERS, GRADIENTS, COMMUNICATION = (
    CATEGORIES.index(n) for n in ("parameters", "gradients", "communication")
)
LARGEST = 8


@dataclass(frozen=True)
class ActionPeak:
    """The node of an action at which most is held, by the block it is of, and bytes there by category.

    Bytes are more than what was held before the action; `tensors` are the largest of the block's own.
    """

    bytes: Ints
    block: str
    layer: int
    node: str
    tensors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ChunkMemory:
    """The memory of the actions of one of a rank's chunks; `blocks` are those of all its units."""

    plan: StagePlan
    step: StepPlan
    blocks: Sequence[BlockMemory]
    number: int

    @property
    def units(self) -> range:
        """The positions of its blocks on the rank."""
        return self.plan.chunks[self.number]

    @cached_property
    def kept(self) -> dict[int, int]:
        """Bytes of activations that each block keeps for its backward."""
        return {at: sum(self.blocks[at].kept.values()) for at in self.units}

    @cached_property
    def handed(self) -> dict[int, int]:
        """Bytes that each block keeps for the second part of a split backward."""
        return {at: sum(self.blocks[at].handed.values()) for at in self.units}

    def change(self, kind: str) -> int:
        """By how many bytes of activations more are held after an action than before."""
        return sum(self._left(at, kind) for at in self.units)

    def peak(self, kind: str) -> ActionPeak:
        """The most that an action of a kind holds above what was held before."""
        if kind not in self._peaks:
            self._peaks[kind] = self._found(kind)
        return self._peaks[kind]

    @cached_property
    def _peaks(self) -> dict[str, ActionPeak]:
        return {}

    def _found(self, kind: str) -> ActionPeak:
        best, where = np.zeros(len(CATEGORIES), np.int64), (self.units.start, -1)
        for at, beside in self._beside(kind):
            levels = self.blocks[at].runs[kind].levels
            if not len(levels):
                continue
            node = int(np.argmax(levels.sum(axis=1)))
            total = beside.copy()
            total[-len(KINDS) :] += levels[node]
            if where[1] < 0 or total.sum() > best.sum():
                best, where = total, (at, node)
        at, node = where
        unit, run = self.plan.units[at], self.blocks[at].runs[kind]
        if node < 0:
            return ActionPeak(best, unit.kind, unit.layer, "", ())
        alive, messages = run.alive(node), self._messages(at, kind)
        for span in alive:
            if span.tensor in messages:
                best[span.kind - len(KINDS)] -= span.bytes
                best[COMMUNICATION] += span.bytes
        tensors = tuple((span.tensor, span.bytes) for span in alive[:LARGEST])
        return ActionPeak(best, unit.kind, unit.layer, run.nodes[node], tensors)

    def _messages(self, at: int, kind: str) -> frozenset[str]:
        """Tensors that a block is about to send to another rank, or was sent and will not keep."""
        given, handed = self.blocks[at].ends(kind)
        found = frozenset[str]()
        if kind in "BI" and at == self.units[-1] and self._leaves(1):
            found |= given
        end, towards = (self.units[-1], 1) if kind == "F" else (self.units[0], -1)
        return found | handed if kind != "W" and at == end and self._leaves(towards) else found

    def _leaves(self, towards: int) -> bool:
        """Whether the stage before or behind this one is on another rank."""
        pipeline = self.step.pipeline
        there = pipeline.stage(self.plan.rank, self.number) + towards
        return 0 <= there < pipeline.stages and pipeline.place(there)[0] != self.plan.rank

    def _beside(self, kind: str) -> Iterator[tuple[int, Ints]]:
        """Each block of an action, and what is held beside its own run, less what was held before the action."""
        activations = CATEGORIES.index("activations")
        units = self.units if kind == "F" else self.units[::-1]
        held = 0
        for at in units:
            beside = np.zeros(len(CATEGORIES), np.int64)
            beside[activations] = held - (0 if kind == "F" else self._start(at, kind))
            beside += self._data_parallel(at, kind)
            yield at, beside
            held += self._left(at, kind)

    def _start(self, at: int, kind: str) -> int:
        """What a block's backward finds, which its own run counts."""
        return self.handed[at] if kind == "W" else self.kept[at]

    def _left(self, at: int, kind: str) -> int:
        """By how many bytes the run of a block changes what is kept."""
        handed = self.handed[at] if kind in "IW" else 0
        return {"F": self.kept[at], "B": -self.kept[at], "I": handed - self.kept[at], "W": -handed}[kind]

    def _data_parallel(self, at: int, kind: str) -> Ints:
        """Parameters gathered, gradients whole and buffers of collectives while a block runs."""
        found, step = np.zeros(len(CATEGORIES), np.int64), self.step
        if step.sharding.zero == 3:
            towards = 1 if kind == "F" else -1
            ahead = [at + towards * i for i in range(1, step.prefetch + 1)]
            found[PARAMETERS] = sum(self._between(i) for i in self.units if i != at) + self.gathered(at)
            if kind != "W":
                found[COMMUNICATION] = sum(self.gathered(i) for i in ahead if i in self.units)
            if kind in "BW":
                found[GRADIENTS] = self.whole(at) * step.widths["compute"]
                if step.per_micro_batch and at + 1 in self.units:
                    found[COMMUNICATION] += self.whole(at + 1) * step.widths["gradient"]
        elif step.sharding.zero == 2 and step.per_micro_batch and kind in "BW":
            found[GRADIENTS] = self._buckets * step.widths["gradient"]
        return found

    def gathered(self, at: int) -> int:
        """Bytes of a block's gathered parameters."""
        found = 0
        for _, axes, _, group in parameter_groups(self.plan.units[at].reads, self.step):
            if axes:
                found += sum(self._elements([p]) * self.step.widths[p.dtype] for p in group)
        return found

    def whole(self, at: int) -> int:
        """Elements of the gradients of a block that are scattered, before they are."""
        return self._elements(self.plan.units[at].parameters)

    def _elements(self, parameters: Sequence[Parameter]) -> int:
        mesh = self.step.mesh
        groups = parameter_groups(parameters, self.step)
        return sum(shard_elements(group, self.step, axes) * mesh.degree(axes) for _, axes, _, group in groups)

    @cached_property
    def _buckets(self) -> int:
        """Elements of the two largest buckets of a chunk: one that is reduced, and one that fills up."""
        own = [b.elements - b.owned(self.step.mesh) for b in self.plan.buckets if b.unit in self.units]
        return sum(sorted(own)[-2:])

    def _between(self, at: int) -> int:
        """Bytes of a block's parameters that stay gathered from its forward to its backward."""
        if self.plan.units[at].head or self.step.reshard == ():
            return self.gathered(at)
        return (
            0 if self.step.reshard is None else self.gathered(at) // self.step.mesh.degree(self.step.reshard)
        )

    def lasting(self, actions: Sequence[Action]) -> tuple[Ints, Ints]:
        """What lasts over actions under FSDP: parameters that stay gathered, and gradients that are not yet scattered.

        Bytes by category during each action, besides those of the action itself, and after it.
        """
        during, after = (np.zeros((len(actions), len(CATEGORIES)), np.int64) for _ in range(2))
        if self.step.sharding.zero < 3:
            return during, after
        own = np.array([action.chunk == self.number for action in actions])
        turns = np.arange(1, len(actions) + 1)
        gathered = np.array([action.kind == "F" for action in actions]) & own
        given_up = np.array([action.kind in "BI" for action in actions]) & own
        whole = np.maximum.accumulate(turns * gathered) > np.maximum.accumulate(turns * given_up)
        after[:, PARAMETERS] = whole * sum(map(self._between, self.units))
        during[:, PARAMETERS] = after[:, PARAMETERS] * ~own
        if not self.step.per_micro_batch and self.step.pipeline.micro_batches > 1:
            begun = np.cumsum(np.array([action.kind in "BW" for action in actions]) & own) > 0
            summed = begun * sum(map(self.whole, self.units)) * self.step.widths["gradient"]
            during[:, GRADIENTS] = after[:, GRADIENTS] = summed
        return during, after
