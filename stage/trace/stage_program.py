"""The program of one pipeline rank: its schedule's actions, each a run through the blocks of one of its chunks.

Program order is the order of issue on every rank of the same stages, so collectives have one order on all members of a
group. Receives stand right before their use, and from each stage they have one order; sends stand right after what they
send.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from stage.pipeline.schedule import Action, Phases, Pipeline
from stage.pipeline.schedules import order
from stage.trace.data_parallel import DataParallel
from stage.trace.plan import StagePlan, StepPlan
from stage.trace.program import NO_EARLIER, PIPELINE_PHASES, Assembly, Program
from stage.trace.streams import chain
from stage.trace.template import COMPUTE, Ref, Template, TemplateNode

__all__ = ["stage_program"]

FORWARD, BACKWARD = 0, 1


@dataclass(slots=True)
class _Run:
    """A block's run on a micro-batch: the bases of its instances, and what made its input and its cotangent."""

    forward: int
    x: int
    input: int = -1
    dy: int = -1


class _Rank:
    """A rank's program while it is put together."""

    def __init__(self, plan: StagePlan, step: StepPlan) -> None:
        self.plan, self.step, self.pipeline = plan, step, step.pipeline
        self.assembly = Assembly()
        self.data = DataParallel(plan, step, self.assembly)
        self.runs: dict[tuple[int, int], _Run] = {}
        self.handed: dict[tuple[int, int, int], int] = {}

    def program(self) -> Program:
        run = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        phases = order(self.step.schedule, self.pipeline, self.plan.rank)
        for step in range(self.step.steps):
            self.assembly.step = step
            for phase, action in _with_phases(phases):
                self.assembly.pipeline_phase = phase
                self.assembly.chunk = action.chunk
                run[action.kind](action)
            self.assembly.pipeline_phase, self.assembly.chunk = 0, 0
            self.data.finish()
        return self.assembly.program()

    def _forward(self, action: Action) -> None:
        i, units = action.micro_batch, self.plan.chunks[action.chunk]
        x = self._receive(action.chunk, FORWARD, i)
        weights = self.data.gather(units.start, i, "forward", self.assembly.last(COMPUTE))
        for at in units:
            before = self.assembly.last(COMPUTE)
            template = self.plan.units[at].templates.forward
            base = self._place(at, template, i, x=x, weights=weights)
            self.runs[at, i] = _Run(base, x)
            x = _output(template, base, x)
            weights = self.data.gather(at + 1, i, "forward", before)
        self._send(action.chunk, FORWARD, i, x)

    def _backward(self, action: Action) -> None:
        """A whole backward (`B`), or the part that makes the cotangent of the input (`I`)."""
        i, units = action.micro_batch, self.plan.chunks[action.chunk]
        dy = self._receive(action.chunk, BACKWARD, i)
        weights = self._gather_backward(action, units.stop - 1)
        for at in reversed(units):
            ahead = self._gather_backward(action, at - 1)
            run, template = self.runs[at, i], self._backward_template(action, at)
            run.dy = dy
            if template.nodes:
                run.input = self._place(at, template, i, run, x=run.x, dy=dy, weights=weights)
                dy = _output(template, run.input, dy, run.forward)
            self.data.release(at)
            if action.kind == "B":
                del self.runs[at, i]
                self.data.complete(at, i)
            weights = ahead
        self._send(action.chunk, BACKWARD, i, dy)

    def _weights(self, action: Action) -> None:
        i = action.micro_batch
        for at in reversed(self.plan.chunks[action.chunk]):
            run, template = self.runs.pop((at, i)), self.plan.units[at].templates.weight
            assert template is not None, "a schedule with W has split backwards"
            if template.nodes:
                self._place(at, template, i, run, x=run.x, dy=run.dy)
            self.data.complete(at, i)

    def _backward_template(self, action: Action, at: int) -> Template:
        templates = self.plan.units[at].templates
        template = templates.backward if action.kind == "B" else templates.input
        assert template is not None, "a schedule with I has split backwards"
        return template

    def _gather_backward(self, action: Action, at: int) -> int:
        if at not in self.plan.chunks[action.chunk] or not self._backward_template(action, at).nodes:
            return -1
        return self.data.gather(at, action.micro_batch, "backward", self.assembly.last(COMPUTE))

    def _place(
        self, at: int, template: Template, micro_batch: int, run: _Run | None = None, **ports: int
    ) -> int:
        earlier = NO_EARLIER if run is None else (run.forward, run.input)
        return self.assembly.place(template, self.plan.units[at].layer, micro_batch, earlier, **ports)

    def _receive(self, chunk: int, direction: int, micro_batch: int) -> int:
        """What makes the tensor that the stage before (or, backward, after) a chunk hands on; -1 at the ends."""
        return self._exchange("recv", chunk, direction, -1 if direction == FORWARD else 1, micro_batch)

    def _send(self, chunk: int, direction: int, micro_batch: int, source: int) -> None:
        self._exchange("send", chunk, direction, 1 if direction == FORWARD else -1, micro_batch, source)

    def _exchange(
        self, kind: str, chunk: int, direction: int, towards: int, micro_batch: int, source: int = -1
    ) -> int:
        """A message over the boundary between two stages; where both are on this rank, what would be sent."""
        stage = self.pipeline.stage(self.plan.rank, chunk)
        if not 0 <= stage + towards < self.pipeline.stages:
            return -1
        boundary = min(stage, stage + towards)
        peer, _ = self.pipeline.place(stage + towards)
        if peer == self.plan.rank:
            key = (boundary, direction, micro_batch)
            return self.handed.pop(key) if kind == "recv" else self.handed.setdefault(key, source)
        distance, tag = peer - self.plan.rank, self._tag(boundary, direction, micro_batch)
        template = _message(
            kind,
            distance,
            direction,
            chunk,
            self.pipeline,
            self.step.message,
            self.step.dtype,
            self.step.streams,
        )
        return self.assembly.place(template, micro_batch=micro_batch, tag=tag, data=source)

    def _tag(self, boundary: int, direction: int, micro_batch: int) -> int:
        """A number of its own for each message between two ranks: step, micro-batch, boundary and direction."""
        count = self.assembly.step * self.pipeline.micro_batches + micro_batch
        return 2 * (count * self.pipeline.chunks + boundary // self.pipeline.ranks) + direction


def _with_phases(phases: Phases) -> Iterator[tuple[int, Action]]:
    """Each action with the number of its phase."""
    for name, actions in zip(Phases._fields, phases, strict=True):
        for action in actions:
            yield PIPELINE_PHASES.index(name), action


def _output(template: Template, base: int, given: int, forward: int = -1) -> int:
    """The node that makes what an instance hands on, -1 for none; `given` is what it was handed."""
    ref = template.output
    if ref is None:
        return -1
    if ref.kind == "port":
        return given
    return (base if ref.kind == "self" else forward) + int(ref.target)


@lru_cache(maxsize=256)  # ranks of other stages send alike, and what is one template is encoded once
def _message(
    kind: str,
    distance: int,
    direction: int,
    chunk: int,
    pipeline: Pipeline,
    size: int,
    dtype: str,
    streams: str,
) -> Template:
    """A send or receive of an activation or its cotangent, to or from the rank `distance` further."""
    deps = (Ref("port", "data"),) if kind == "send" else ()
    name = f"{kind}_{'forward' if direction == FORWARD else 'backward'}"
    channel = f"{name}.{chunk}" if kind == "recv" else ""
    node = TemplateNode(
        name, kind, kind, size, peer=distance, channel=channel, deps=deps, dtype=dtype, phase="pipeline"
    )
    block = f"chunk{chunk}" if pipeline.chunks > 1 else "pipeline"
    return Template(block, "pipeline", chain([node], streams), numbers=("micro_batch", *pipeline.marks))


def stage_program(plan: StagePlan, step: StepPlan) -> Program:
    """The program of every rank that holds these stages."""
    return _Rank(plan, step).program()
