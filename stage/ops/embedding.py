"""Token embedding: a gather of rows, never a matrix multiplication.

With the vocabulary sharded each device gathers the rows it has and zeros for the others, so the vocabulary is
a reduced factor and the result pending (Megatron-LM's vocabulary-parallel embedding).
"""

from collections.abc import Callable, Sequence
from typing import Any

from stage.ops.registry import Attrs, Op, Tape, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["EMBEDDING", "EMBEDDING_BACKWARD"]


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    ids, table = inputs
    return [((*ids.dims, *table.dims[1:]), "compute")]


def _flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return outputs[0].elements


def _bytes(
    attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: Callable[[str], int]
) -> Size:
    """Rows, not the table: read once, written once."""
    return inputs[0].elements * width(inputs[0].dtype) + 2 * outputs[0].elements * width(outputs[0].dtype)


def _backward_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return inputs[0].elements


def _backward_bytes(
    attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: Callable[[str], int]
) -> Size:
    """The cotangent is read; the rows of the gradient it is added to are read and written."""
    dy, ids = inputs[:2]
    return dy.elements * (width(dy.dtype) + 2 * width(outputs[0].dtype)) + ids.elements * width(ids.dtype)


def _transpose(tape: Tape, node: Any) -> None:
    ids, table = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("embedding_backward", [cotangent, tape.saved(ids)], [table])


EMBEDDING = register(Op("embedding", _infer, _transpose, _flops, bytes=_bytes))
EMBEDDING_BACKWARD = register(
    Op("embedding_backward", _infer, None, _backward_flops, bytes=_backward_bytes, accumulates=True)
)
