"""Changes of view: splitting a tensor in parts and joining parts.

`split` hands out parts of its operand without moving a byte. Its transpose and `join` write a new tensor.
Parts may lack a dimension of the result (`k_rope` is shared by all heads); they are broadcast along it.
"""

from collections.abc import Sequence
from typing import Any

from stage.ops.registry import Attrs, Factors, Op, Tape, dim_factors, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["JOIN", "SPLIT"]


def _split_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    x = inputs[0]
    return [((*x.dims[:-1], part), x.dtype) for part in attrs["parts"]]


def _last_whole(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    names = dim_factors(attrs, inputs, outputs)
    return Factors(
        tuple((*n[:-1], None) for n in names.operands), tuple((*n[:-1], None) for n in names.results)
    )


def _elements(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return outputs[0].elements


def _split_transpose(tape: Tape, node: Any) -> None:
    parts = [tape.cotangent(out) for out in node.outputs]
    assert all(part is not None for part in parts), "every part of a split takes part in differentiation"
    tape.emit("join", [part for part in parts if part is not None], list(node.inputs))


def _join_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [((*inputs[0].dims[:-1], attrs["last"]), inputs[0].dtype)]


def _join_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("split_backward", [cotangent], list(node.inputs))


SPLIT = register(Op("split", _split_infer, _split_transpose, _elements, factors=_last_whole, kernel=False))
JOIN = register(Op("join", _join_infer, _join_transpose, _elements, factors=_last_whole))
SPLIT_BACKWARD = register(Op("split_backward", _split_infer, None, _elements, factors=_last_whole))
