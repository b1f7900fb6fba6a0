"""The program of one pipeline rank: its schedule's actions, each a run through the blocks of one of its chunks.

Program order is the order of issue on every rank of the same stages, so collectives have one order on all members of a
group. Each kind of action is recorded when it first comes up and replayed ever after.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from stage.pipeline.schedule import Action
from stage.pipeline.schedules import order
from stage.trace.actions import Boundary, TapedAction, record_action
from stage.trace.data_parallel import DataParallel
from stage.trace.plan import StagePlan, StepPlan
from stage.trace.program import PIPELINE_PHASES, Assembly, Program
from stage.trace.tape import Symbol

__all__ = ["stage_program"]

EARLIER = {"B": "F", "I": "F", "W": "I"}
"""The kind of action of the same chunk and micro-batch that another goes on from, once."""

Done = tuple[TapedAction, Sequence[int]]
"""An action that is placed, with the values of its symbols."""


class _Rank:
    """A rank's program while it is put together; `done` are actions that others go on from."""

    def __init__(self, plan: StagePlan, step: StepPlan) -> None:
        self.plan, self.step = plan, step
        self.assembly = Assembly()
        self.data = DataParallel(plan, step, self.assembly)
        self.taped: dict[Hashable, TapedAction] = {}
        self.done: dict[tuple[str, int, int], Done] = {}
        self.handed: dict[tuple[Boundary, int], int] = {}

    def program(self) -> Program:
        phases = order(self.step.schedule, self.step.pipeline, self.plan.rank)
        for step in range(self.step.steps):
            self.assembly.step = step
            for name, actions in zip(phases._fields, phases, strict=True):
                self.assembly.pipeline_phase = PIPELINE_PHASES.index(name)
                for action in actions:
                    self._act(action)
            self.assembly.pipeline_phase, self.assembly.chunk = 0, 0
            self.data.finish()
        for taped in self.taped.values():
            taped.tape.unroll()
        return self.assembly.program()

    def _act(self, action: Action) -> None:
        chunk, i = action.chunk, action.micro_batch
        earlier = self.done.pop((EARLIER.get(action.kind, ""), chunk, i), None)
        before = None if earlier is None else earlier[0]
        key = (action.kind, chunk, self.data.begin(action), id(before))
        if key not in self.taped:
            self.taped[key] = record_action(self.data, self.assembly, action, before)
        taped = self.taped[key]
        values = self._values(taped.tape.symbols, action, earlier)
        for boundary, number in taped.handed.items():
            self.handed[boundary, i] = taped.tape.value(number, values)
        self.data.whole = {unit: taped.tape.value(number, values) for unit, number in taped.whole.items()}
        taped.tape.replay(self.assembly, values)
        self.done[action.kind, chunk, i] = taped, values

    def _values(self, symbols: Sequence[Symbol], action: Action, earlier: Done | None) -> list[int]:
        """What the symbols of the tape of an action are for the one that comes next."""
        known = {
            "own": self.assembly.nodes,
            "step": self.assembly.step,
            "pipeline_phase": self.assembly.pipeline_phase,
            "micro_batch": action.micro_batch,
            "updated": self.data.updated,
        }
        return [
            known[symbol[0]] if symbol[0] in known else self._value(*symbol, action=action, earlier=earlier)
            for symbol in symbols
        ]

    def _value(self, name: str, of: Any, *, action: Action, earlier: Done | None) -> int:
        """What one of the symbols is that are of something."""
        match name:
            case "last":
                return self.assembly.last(of)
            case "count":
                before = self.assembly.step * self.step.pipeline.micro_batches
                return int(of) * (before + action.micro_batch)
            case "handed":
                return self.handed.pop((of, action.micro_batch))
            case "whole":
                return self.data.whole[of]
        assert earlier is not None, f"{action} goes on from nothing, but asks for {name} {of}"
        taped, values = earlier
        return values[taped.tape.symbols.index(of)]


def stage_program(plan: StagePlan, step: StepPlan) -> Program:
    """The program of every rank that holds these stages."""
    return _Rank(plan, step).program()
