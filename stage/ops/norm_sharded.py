"""A norm over a sharded dimension: its sums in one kernel, the scaling in another, a reduction between the two.

With s = sum of x^2 over a dimension of n elements, an RMS norm is y = w x / sqrt(s / n); a layer norm needs the
sum of x too, from the same pass (its variance is the mean of squares less the square of the mean). The sums are one
or two numbers a row, pending where the dimension is sharded, so what is reduced is batch x seq numbers and not the
activation (Xu et al. 2021, Optimus, section 3.2.2). The cotangent of the sums is reduced likewise.
"""

from collections.abc import Sequence
from typing import Any

from stage.ops.registry import Attrs, Op, Tape, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["NORM_SCALE", "NORM_SUMS"]

MOMENTS = Dim("moments", 2)
"""The sums of x and of x^2."""


def _sums_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    rows = tuple(dim for dim in inputs[0].dims if dim.name != attrs["over"])
    return [(rows if attrs["kind"] == "rms" else (*rows, MOMENTS), "fp32")]


def _scale_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(inputs[0].dims, inputs[0].dtype)]


def _each(rms: int, layer: int) -> Any:
    """Operations an element of the larger operand."""

    def flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
        x = next(t for t in inputs if attrs["over"] in t.dim_names)
        return x.elements * (rms if attrs["kind"] == "rms" else layer)

    return flops


def _attrs(node: Any) -> dict[str, Any]:
    return {"over": node.attrs["over"], "kind": node.attrs["kind"]}


def _sums_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    x = node.inputs[0]
    tape.emit("norm_sums_backward", [cotangent, tape.saved(x)], [x], **_attrs(node))


def _scale_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    saved = [tape.saved(t) for t in node.inputs[:3]]
    tape.emit("norm_scale_backward", [cotangent, *saved], list(node.inputs), **_attrs(node))


NORM_SUMS = register(Op("norm_sums", _sums_infer, _sums_transpose, _each(2, 3)))
NORM_SCALE = register(Op("norm_scale", _scale_infer, _scale_transpose, _each(2, 4)))
NORM_SUMS_BACKWARD = register(Op("norm_sums_backward", _scale_infer, None, _each(2, 3), accumulates=True))
NORM_SCALE_BACKWARD = register(Op("norm_scale_backward", _scale_infer, None, _each(7, 11)))
