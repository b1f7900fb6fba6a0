"""The program of one pipeline stage: its schedule's actions, each a run through the stage's blocks.

Program order is the order of issue on every rank of the stage, so collectives have one order on all members of a
group. Receives are chained among themselves and stand right before their use; sends right after what they send.
"""

from stage.pipeline.schedule import order
from stage.trace.data_parallel import DataParallel
from stage.trace.plan import StagePlan, StepPlan
from stage.trace.program import Assembly, Program
from stage.trace.template import Ref, Template, TemplateNode, chain

__all__ = ["stage_program"]

FORWARD, BACKWARD = 0, 1


class _Stage:
    """A stage's program while it is put together."""

    def __init__(self, plan: StagePlan, step: StepPlan) -> None:
        self.plan, self.step = plan, step
        self.assembly = Assembly()
        self.forwards: dict[int, list[tuple[int, int]]] = {}
        self.data = DataParallel(plan, step, self.assembly)
        ends = (("recv", -1, FORWARD), ("send", 1, FORWARD), ("recv", 1, BACKWARD), ("send", -1, BACKWARD))
        self.pipes = {(kind, peer): _message(kind, peer, direction, step) for kind, peer, direction in ends}

    def run(self) -> Program:
        actions = order(self.step.schedule, self.plan.stage, self.step.stages, self.step.micro_batches)
        for step in range(self.step.steps):
            self.assembly.step = step
            for action in actions:
                (self._forward if action.kind == "F" else self._backward)(action.micro_batch)
            self.data.finish()
        return self.assembly.program()

    def _tag(self, direction: int, micro_batch: int) -> int:
        """A number of its own for each message between two stages: step, micro-batch and direction."""
        return 2 * (self.assembly.step * self.step.micro_batches + micro_batch) + direction

    def _exchange(self, kind: str, peer: int, direction: int, micro_batch: int, source: int = -1) -> int:
        if not 0 <= self.plan.stage + peer < self.step.stages:
            return -1
        tag = self._tag(direction, micro_batch)
        return self.assembly.place(self.pipes[kind, peer], -1, micro_batch, tag=tag, data=source)

    def _forward(self, micro_batch: int) -> None:
        x = self._exchange("recv", -1, FORWARD, micro_batch)
        assembly, gather = self.assembly, self.data.gather
        weights = gather(0, micro_batch, "forward", assembly.last("compute"))
        forwards = self.forwards[micro_batch] = []
        for i, unit in enumerate(self.plan.units):
            before = assembly.last("compute")
            base = assembly.place(unit.forward, unit.layer, micro_batch, x=x, weights=weights)
            forwards.append((base, x))
            x = _output(unit.forward, base, -1, x)
            weights = gather(i + 1, micro_batch, "forward", before)
        self._exchange("send", 1, FORWARD, micro_batch, x)

    def _backward(self, micro_batch: int) -> None:
        dy = self._exchange("recv", 1, BACKWARD, micro_batch)
        assembly, gather, units = self.assembly, self.data.gather, self.plan.units
        weights = gather(len(units) - 1, micro_batch, "backward", assembly.last("compute"))
        forwards = self.forwards.pop(micro_batch)
        for i in reversed(range(len(units))):
            unit = units[i]
            ahead = gather(i - 1, micro_batch, "backward", assembly.last("compute"))
            forward, x = forwards[i]
            template = unit.backward
            base = assembly.place(template, unit.layer, micro_batch, forward, x=x, dy=dy, weights=weights)
            dy = _output(template, base, forward, dy)
            self.data.complete(i, micro_batch)
            weights = ahead
        self._exchange("send", -1, BACKWARD, micro_batch, dy)


def _output(template: Template, base: int, forward: int, given: int) -> int:
    """The node that makes what an instance hands on, -1 for none; `given` is what it was handed."""
    ref = template.output
    if ref is None:
        return -1
    if ref.kind == "port":
        return given
    return (base if ref.kind == "self" else forward) + int(ref.target)


def _message(kind: str, peer: int, direction: int, step: StepPlan) -> Template:
    """A send or receive of an activation or its cotangent, from or to the stage `peer` further."""
    what = "forward" if direction == FORWARD else "backward"
    deps = (Ref("port", "data"),) if kind == "send" else ()
    name = f"{kind}_{what}"
    node = TemplateNode(
        name, kind, kind, step.message, peer=peer, deps=deps, dtype=step.dtype, phase="pipeline"
    )
    return Template("pipeline", "pipeline", chain([node]), numbers=("micro_batch",))


def stage_program(plan: StagePlan, step: StepPlan) -> Program:
    """The program of every rank of a stage."""
    return _Stage(plan, step).run()
