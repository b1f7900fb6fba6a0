"""What an action of a schedule places: a run through the blocks of a chunk, and the messages before and after it.

An action is recorded (`stage.trace.tape`): of what differs between micro-batches it knows symbols. Receives stand right
before their use, and from each stage they have one order; sends stand right after what they send.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

from stage.pipeline.schedule import Action, Pipeline
from stage.trace.data_parallel import DataParallel
from stage.trace.peer import Peer
from stage.trace.program import NO_EARLIER, Assembly
from stage.trace.scaling import scaling_template
from stage.trace.streams import chain
from stage.trace.tape import Recorder, Tape
from stage.trace.template import COMPUTE, Ref, Template, TemplateNode

__all__ = ["Boundary", "TapedAction", "record_action"]

FORWARD, BACKWARD = 0, 1

Boundary = tuple[int, int]
"""The stage before a boundary between two, and the direction in which something passes it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A block's run on a micro-batch: the bases of its instances, and what made its input and its cotangent."""

    forward: int
    x: int
    input: int = -1
    dy: int = -1


@dataclass(frozen=True, slots=True)
class TapedAction:
    """A recorded action, whose numbers are those of its tape.

    `runs` are those of its blocks, `handed` what it hands to another chunk of the rank, and `whole` the parameters that
    are whole after it.
    """

    tape: Tape
    runs: Mapping[int, Run]
    handed: Mapping[Boundary, int]
    whole: Mapping[int, int]


class _Recording:
    """An action while it is recorded; `earlier` is the one before it on the same chunk and micro-batch."""

    def __init__(
        self, data: DataParallel, assembly: Assembly, action: Action, earlier: TapedAction | None
    ) -> None:
        self.recorder = Recorder(assembly)
        self.recorder.chunk = action.chunk
        self.plan, self.step, self.pipeline = data.plan, data.step, data.step.pipeline
        self.data = copy(data)
        self.data.assembly, self.data.updated = self.recorder, self.recorder.symbol("updated")
        self.data.whole = {unit: self.recorder.symbol("whole", unit) for unit in data.whole}
        self.action, self.units = action, self.plan.chunks[action.chunk]
        self.micro_batch = self.recorder.symbol("micro_batch")
        self.runs = (
            {}
            if earlier is None
            else {at: self._known(run, earlier.tape) for at, run in earlier.runs.items()}
        )
        self.handed: dict[Boundary, int] = {}

    def _known(self, run: Run, tape: Tape) -> Run:
        """A run of the action before, in symbols of this one."""
        numbers = (run.forward, run.x, run.input, run.dy)
        return Run(*(self.recorder.renamed(tape, number, "earlier") for number in numbers))

    def taped(self) -> TapedAction:
        {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}[self.action.kind]()
        return TapedAction(self.recorder.tape(), self.runs, self.handed, self.data.whole)

    def _forward(self) -> None:
        i = self.micro_batch
        x, ahead = self._receive(FORWARD), self.step.prefetch
        weights = {at: self._gather_forward(at) for at in self.units[:ahead]}
        for at in self.units:
            if not ahead:
                weights[at] = self._gather_forward(at)
            before = self.recorder.last(COMPUTE)
            once, template = self.plan.units[at].templates.once, self.plan.units[at].templates.forward
            if once is not None and self.data.first:
                self._place(at, once, NO_EARLIER, weights=weights[at])
            base = self._place(at, template, NO_EARLIER, x=x, weights=weights[at])
            self.runs[at] = Run(base, x)
            x = _output(template, base, x)
            if ahead:
                weights[at + ahead] = self.data.gather(at + ahead, i, "forward", before)
        self._rescale("forward")
        self._send(FORWARD, x)

    def _backward(self) -> None:
        """A whole backward (`B`), or the part that makes the cotangent of the input (`I`)."""
        dy, ahead, units = self._receive(BACKWARD), self.step.prefetch, self.units[::-1]
        weights = {at: self._gather_backward(at) for at in units[:ahead]}
        for at in units:
            weights[at - ahead] = self._gather_backward(at - ahead)
            run, template = self.runs[at], self._backward_template(at)
            base = -1
            if template.nodes:
                base = self._place(at, template, (run.forward, -1), x=run.x, dy=dy, weights=weights[at])
            self.runs[at] = replace(run, input=base, dy=dy)
            if template.nodes:
                dy = _output(template, base, dy, run.forward)
            self.data.release(at)
            if self.action.kind == "B":
                self.data.complete(at, self.micro_batch)
        self._rescale("backward")
        self._send(BACKWARD, dy)

    def _rescale(self, phase: str) -> None:
        """With delayed scaling, new scales of all products of the rank."""
        products = sum(unit.templates.products for unit in self.plan.units)
        if self.step.delayed_scaling and products:
            template = scaling_template(products, self.step, phase)
            self.recorder.place(template, -1, self.micro_batch)

    def _weights(self) -> None:
        for at in reversed(self.units):
            run, template = self.runs[at], self.plan.units[at].templates.weight
            assert template is not None, "a schedule with W has split backwards"
            if template.nodes:
                self._place(at, template, (run.forward, run.input), x=run.x, dy=run.dy)
            self.data.complete(at, self.micro_batch)

    def _backward_template(self, at: int) -> Template:
        templates = self.plan.units[at].templates
        template = templates.backward if self.action.kind == "B" else templates.input
        assert template is not None, "a schedule with I has split backwards"
        return template

    def _gather_forward(self, at: int) -> int:
        return self.data.gather(at, self.micro_batch, "forward", self.recorder.last(COMPUTE))

    def _gather_backward(self, at: int) -> int:
        if at not in self.units or not self._backward_template(at).nodes:
            return -1
        return self.data.gather(at, self.micro_batch, "backward", self.recorder.last(COMPUTE))

    def _place(self, at: int, template: Template, earlier: tuple[int, ...], **ports: int) -> int:
        tag, layer = self._first_tag(at), self.plan.units[at].layer
        return self.recorder.place(template, layer, self.micro_batch, earlier, tag=tag, **ports)

    def _first_tag(self, at: int) -> int:
        """The first tag of a block's messages; all that a block can have are its own, and behind the pipeline's."""
        messages = max((unit.templates.messages for unit in self.plan.units), default=0)
        if not messages:
            return 0
        pipeline = 2 * self.step.steps * self.pipeline.micro_batches * self.pipeline.chunks
        return self.recorder.symbol("count", len(self.plan.units) * messages) + pipeline + at * messages

    def _receive(self, direction: int) -> int:
        """What makes the tensor that the stage before (or, backward, after) a chunk hands on; -1 at the ends."""
        return self._exchange("recv", direction, -1 if direction == FORWARD else 1)

    def _send(self, direction: int, source: int) -> None:
        self._exchange("send", direction, 1 if direction == FORWARD else -1, source)

    def _exchange(self, kind: str, direction: int, towards: int, source: int = -1) -> int:
        """A message over the boundary between two stages; where both are on this rank, what would be sent."""
        rank, chunk = self.plan.rank, self.action.chunk
        stage = self.pipeline.stage(rank, chunk)
        if not 0 <= stage + towards < self.pipeline.stages:
            return -1
        boundary = min(stage, stage + towards), direction
        peer, _ = self.pipeline.place(stage + towards)
        if peer == rank:
            if kind == "recv":
                return self.recorder.symbol("handed", boundary)
            self.handed[boundary] = source
            return source
        template = _message(
            kind,
            peer - rank,
            direction,
            chunk,
            self.pipeline,
            self.step.message,
            self.step.dtype,
            self.step.streams,
        )
        return self.recorder.place(template, -1, self.micro_batch, tag=self._tag(*boundary), data=source)

    def _tag(self, boundary: int, direction: int) -> int:
        """A number of its own for each message between two ranks: step, micro-batch, boundary and direction."""
        first = self.recorder.symbol("count", 2 * self.pipeline.chunks)
        return first + 2 * (boundary // self.pipeline.ranks) + direction


def record_action(
    data: DataParallel, assembly: Assembly, action: Action, earlier: TapedAction | None
) -> TapedAction:
    """The tape of an action as it would now be placed into `assembly`, which it leaves as it is.

    Its symbols are those of `Recorder`; `micro_batch`; `count` times a number, which is how many micro-batches there
    were before; `updated` and `whole` of `data`; what is `handed` over a boundary; and those of the `earlier` action.
    """
    return _Recording(data, assembly, action, earlier).taped()


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
        name,
        kind,
        kind,
        size,
        peer=Peer(("pp",), distance),
        channel=channel,
        deps=deps,
        dtype=dtype,
        phase="pipeline",
    )
    block = f"chunk{chunk}" if pipeline.chunks > 1 else "pipeline"
    return Template(block, "pipeline", chain([node], streams), numbers=("micro_batch", *pipeline.marks))
