"""Element by element: sums, activations, dropout, rotary embeddings, and the reductions their transposes need.

Operands that lack a dimension of the first are broadcast along it (a bias, a scale); their gradient is a
sum over it. `flops` are the operations an element, as kernels execute them; these ops are bound by memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stage.ops.registry import Attrs, Factor, Factors, Op, Tape, moved_bytes, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["FUNCTIONS", "Function"]


@dataclass(frozen=True, slots=True)
class Function:
    """Operations an element of a pointwise function and of its derivative."""

    flops: int
    backward_flops: int


FUNCTIONS = {
    "gelu": Function(8, 13),
    "relu2": Function(2, 3),
    "silu": Function(4, 7),
    "swiglu": Function(5, 10),
    "clamped_swiglu": Function(9, 15),
    "mul": Function(1, 2),
    "sigmoid": Function(3, 3),
}
"""`swiglu` is silu(gate) * up (and * weight where there is a third operand), one kernel as Megatron fuses it."""


def _like_first(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(inputs[0].dims, attrs.get("dtype", inputs[0].dtype))]


def _add_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return outputs[0].elements * max(1, len(inputs) - 1)


def _add_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    dims = tape.tensor(node.outputs[0]).dim_names
    for operand in node.inputs:
        if not tape.wants(operand):
            continue
        if len(tape.tensor(operand).dims) == len(dims):
            tape.alias(operand, cotangent)
        else:
            tape.emit("reduce", [cotangent], [operand], suffix="bgrad")


def add_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    """By name, but a table of positions is a table over the sequence."""
    return Factors(tuple(_over_seq(t) for t in inputs), tuple(_over_seq(t) for t in outputs))


def _over_seq(tensor: Tensor) -> tuple[Factor, ...]:
    return tuple("seq" if name == "positions" else name for name in tensor.dim_names)


def _rows_bytes(
    attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: Callable[[str], int]
) -> Size:
    """As of any op, but of a table of positions only the rows of the sequence are touched."""
    length = inputs[0].size("seq") if "seq" in inputs[0].dim_names else None
    touched = [[_sliced(t, length) for t in group] for group in (inputs, outputs)]
    return moved_bytes(attrs, touched[0], touched[1], width)


def _sliced(tensor: Tensor, length: Size) -> Tensor:
    if "positions" not in tensor.dim_names:
        return tensor
    dims = tuple(Dim(d.name, length) if d.name == "positions" else d for d in tensor.dims)
    return tensor.named(tensor.name, dims=dims)


ADD = register(
    Op(
        "add",
        _like_first,
        _add_transpose,
        _add_flops,
        factors=add_factors,
        bytes=_rows_bytes,
        accumulates=False,
    )
)


def _reduce_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return inputs[0].elements


REDUCE = register(
    Op("reduce", _like_first, None, _reduce_flops, factors=add_factors, bytes=_rows_bytes, accumulates=True)
)


def _function_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return outputs[0].elements * FUNCTIONS[attrs["function"]].flops


def _backward_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return inputs[0].elements * FUNCTIONS[attrs["function"]].backward_flops


def _function_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    wanted = [x for x in node.inputs if tape.wants(x)]
    saved = [tape.saved(x) for x in node.inputs]
    tape.emit("pointwise_backward", [cotangent, *saved], wanted, function=node.attrs["function"])


POINTWISE = register(Op("pointwise", _like_first, _function_transpose, _function_flops))
POINTWISE_BACKWARD = register(Op("pointwise_backward", _like_first, None, _backward_flops))


def _dropout_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(inputs[0].dims, inputs[0].dtype), (inputs[0].dims, "uint8")]


def _per_element(count: int) -> Any:
    def flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
        return outputs[0].elements * count

    return flops


def _dropout_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("dropout_backward", [cotangent, tape.saved(node.outputs[1])], [node.inputs[0]])


DROPOUT = register(Op("dropout", _dropout_infer, _dropout_transpose, _per_element(3)))
DROPOUT_BACKWARD = register(Op("dropout_backward", _like_first, None, _per_element(2)))


def _rope_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("rope", [cotangent], [node.inputs[0]])


ROPE = register(Op("rope", _like_first, _rope_transpose, _per_element(3)))
