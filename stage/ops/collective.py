"""Steps of a reshard as ops of a graph, so that differentiation transposes them like any other.

The attribute `step` says which axes take part and between which states; its transpose is the collective of
the backward pass. `slice`, `vary` and `pad` move nothing between devices and make no node in a trace.
"""

from collections.abc import Sequence
from typing import Any

from stage.ops.registry import Attrs, Op, Tape, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["COLLECTIVES", "is_collective"]

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter")
_VIEWS = ("pad", "slice", "vary")


def is_collective(op: str) -> bool:
    """Whether an op of this name moves data between devices."""
    return op in COLLECTIVES


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(inputs[0].dims, inputs[0].dtype)]


def _flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return 0


def _transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    step = node.attrs["step"].transpose()
    tape.emit(step.kind, [cotangent], [node.inputs[0]], step=step, suffix=step.kind)


for _name in (*COLLECTIVES, *_VIEWS):
    register(Op(_name, _infer, _transpose, _flops, kernel=_name in COLLECTIVES))
