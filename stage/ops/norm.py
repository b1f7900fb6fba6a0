"""Layer norm and RMS norm: one kernel forward, one backward (which also makes the weights' gradients).

The dimension of the weight is the normalized one and can not be sharded. The weight's gradient sums over all
others, so wherever these are sharded it is pending: over the data axes, and over `tp` under sequence
parallelism.
"""

from collections.abc import Sequence
from typing import Any

from stage.ops.registry import Attrs, Factors, Op, Tape, dim_factors, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["NORM", "NORM_BACKWARD"]


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    x = inputs[0]
    rows = tuple(dim for dim in x.dims if dim.name != attrs["over"])
    statistics = 1 if attrs["kind"] == "rms" else 2
    return [(x.dims, x.dtype), *[(rows, "fp32")] * statistics]


def _factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    names = dim_factors(attrs, inputs, outputs)
    return Factors(names.operands, names.results, fixed=frozenset({attrs["over"]}))


def _flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return inputs[0].elements * (4 if attrs["kind"] == "rms" else 7)


def _backward_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return inputs[0].elements * (9 if attrs["kind"] == "rms" else 14)


def _transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    x, *weights = node.inputs
    saved = [tape.saved(x), *(tape.saved(w) for w in weights[:1]), *(tape.saved(s) for s in node.outputs[1:])]
    wanted = [t for t in node.inputs if tape.wants(t)]
    tape.emit("norm_backward", [cotangent, *saved], wanted, over=node.attrs["over"], kind=node.attrs["kind"])


NORM = register(Op("norm", _infer, _transpose, _flops, factors=_factors))
NORM_BACKWARD = register(Op("norm_backward", _infer, None, _backward_flops, factors=_factors))
