"""Cross entropy of a head whose vocabulary may be sharded: the logits are never gathered.

    loss = log(sum_v exp(logit_v - m)) + m - logit_label,        m = max_v logit_v

`logits_max`, `target_logit` and `sum_exp` reduce over the vocabulary, so each is pending where it is sharded
and becomes one all-reduce of batch x seq numbers (three in all, as in Megatron-LM's vocabulary-parallel
loss). The maximum takes no part in differentiation. Backward, `softmax_backward` writes exp(logit - m) / sum,
and `target_backward` subtracts one at the label, in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

from stage.ops.registry import Attrs, Factors, Op, Tape, dim_factors, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["LOGITS_MAX", "LOSS", "SUM_EXP", "TARGET_LOGIT"]


def _rows(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(tuple(dim for dim in inputs[0].dims if dim.name != "vocab"), "fp32")]


def _held(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    names = dim_factors(attrs, inputs, outputs)
    return Factors(names.operands, names.results, held=frozenset({"vocab"}))


def _times(count: int, operand: int = 0) -> Any:
    def flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
        return inputs[operand].elements * count

    return flops


def _target_bytes(
    attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: Callable[[str], int]
) -> Size:
    """One logit a row is read, one number a row written."""
    labels = inputs[1]
    return labels.elements * (width(labels.dtype) + width(inputs[0].dtype) + 4)


def _sum_exp_transpose(tape: Tape, node: Any) -> None:
    logits, maximum = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("softmax_backward", [cotangent, tape.saved(logits), tape.saved(maximum)], [logits])


def _target_transpose(tape: Tape, node: Any) -> None:
    logits, labels = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("target_backward", [cotangent, tape.saved(labels)], [logits])


def _loss_transpose(tape: Tape, node: Any) -> None:
    _, total, target = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("loss_backward", [cotangent, tape.saved(total)], [total, target])


def _target_backward_bytes(
    attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: Callable[[str], int]
) -> Size:
    """Adds at one logit a row: label and cotangent read, one element read and written."""
    dy, labels = inputs[:2]
    return labels.elements * (width(labels.dtype) + width(dy.dtype) + 2 * width(outputs[0].dtype))


LOGITS_MAX = register(Op("logits_max", _rows, None, _times(1), reduction="max"))
TARGET_LOGIT = register(Op("target_logit", _rows, _target_transpose, _times(1, 1), bytes=_target_bytes))
SUM_EXP = register(Op("sum_exp", _rows, _sum_exp_transpose, _times(3)))
LOSS = register(Op("loss", _rows, _loss_transpose, _times(4), factors=_held))
LOSS_BACKWARD = register(Op("loss_backward", _rows, None, _times(2), factors=_held))
SOFTMAX_BACKWARD = register(Op("softmax_backward", _rows, None, _times(4, 1)))
TARGET_BACKWARD = register(
    Op("target_backward", _rows, None, _times(1), bytes=_target_backward_bytes, accumulates=True)
)
