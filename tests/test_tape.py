"""Tapes: what is recorded once with symbols is, replayed, what would have been placed."""

import numpy as np
import pytest

from stage.trace.program import Assembly, Program
from stage.trace.streams import chain
from stage.trace.tape import Recorder
from stage.trace.template import Ref, Template, TemplateNode

NODES = [
    TemplateNode("first", "compute", "matmul", 8, flops=1, deps=(Ref("port", "x"),)),
    TemplateNode("sum", "all_reduce", "all_reduce", 8, axes=("tp",), deps=(Ref("self", 0),)),
]
FORWARD = Template("layer", "forward", chain(NODES), Ref("self", 1))
BACKWARD = Template("layer", "backward", chain(NODES), Ref("self", 1))


def forward(assembly: Assembly, micro_batch: int, x: int, layers: int = 3) -> list[int]:
    bases = []
    for layer in range(layers):
        bases.append(assembly.place(FORWARD, layer, micro_batch, x=x))
        x = bases[-1] + 1
    return bases


def directly(micro_batches: int) -> Program:
    assembly = Assembly()
    for i in range(micro_batches):
        bases = forward(assembly, i, -1)
        for layer, base in reversed(list(enumerate(bases))):
            assembly.place(BACKWARD, layer, i, (base, -1), x=base)
    return assembly.program()


def replayed(micro_batches: int) -> Program:
    assembly = Assembly()
    ahead = Recorder(assembly)
    bases = forward(ahead, ahead.symbol("micro_batch"), -1)
    first = ahead.tape()
    behind = Recorder(assembly)
    for layer, base in reversed(list(enumerate(bases))):
        known = behind.renamed(first, base, "earlier")
        behind.place(BACKWARD, layer, behind.symbol("micro_batch"), (known, -1), x=known)
    second = behind.tape()
    before: list[int] = []
    for i in range(micro_batches):
        given = {"micro_batch": i, "step": 0, "pipeline_phase": 0}
        for tape in (first, second):
            values: list[int] = []
            for name, *of in tape.symbols:
                numbers = {**given, "own": assembly.nodes, "last": assembly.last(str(of[0])) if of else -1}
                values.append(before[first.symbols.index(of[0])] if name == "earlier" else numbers[name])
            before = values
            tape.replay(assembly, values)
    first.unroll()
    second.unroll()
    return assembly.program()


@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_a_replay_is_what_would_have_been_placed(micro_batches: int) -> None:
    wanted, found = directly(micro_batches), replayed(micro_batches)
    assert found.templates == wanted.templates
    assert found.nodes == wanted.nodes == 12 * micro_batches
    for a, b in zip(found.instances, wanted.instances, strict=True):
        assert np.array_equal(a, b)


def test_recording_leaves_the_program_as_it_is() -> None:
    assembly = Assembly()
    forward(assembly, 0, -1)
    before = assembly.nodes, assembly.last("compute"), assembly.last("comm")
    recorder = Recorder(assembly)
    forward(recorder, 1, recorder.last("compute"))
    recorder.tape()
    assert (assembly.nodes, assembly.last("compute"), assembly.last("comm")) == before
    assert len(assembly.rows(FORWARD).placed) == 3
