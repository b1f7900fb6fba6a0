"""Several contractions of one operand in one matrix multiplication: q, k and v, or gate and up.

Their weights stand side by side, so the operand is read once and its gradient written once. The KV heads of a group
are bound to the factor `heads`, of which each serves a block.
"""

from collections.abc import Sequence
from typing import Any

from stage.ops.contract import CONTRACT
from stage.ops.registry import Attrs, Factor, Factors, Op, Tape, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["CONTRACT_GROUP", "HEADS", "side_by_side"]

HEADS = {"kv_heads": "heads"}
"""Dims that are sharded as another dim is."""


def _names(tensor: Tensor) -> tuple[Factor, ...]:
    return tuple(HEADS.get(name, name) for name in tensor.dim_names)


def side_by_side(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    """Every dimension is a factor of its own name, but KV heads go with the heads that share them."""
    return Factors(tuple(_names(t) for t in inputs), tuple(_names(t) for t in outputs))


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    raise AssertionError("a group is made by the fuse pass, from nodes that have results")


def _flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    x, *weights = inputs[: attrs["parts"] + 1]
    return sum(CONTRACT.flops({}, [x, w], [y]) for w, y in zip(weights, outputs, strict=True))


def _dgrad_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    n = attrs["parts"]
    return sum(
        CONTRACT.flops({}, [dy, w], outputs) for dy, w in zip(inputs[:n], inputs[n : 2 * n], strict=True)
    )


def _wgrad_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    x, *cotangents = inputs
    return sum(CONTRACT.flops({}, [x, dy], [dw]) for dy, dw in zip(cotangents, outputs, strict=True))


def _transpose(tape: Tape, node: Any) -> None:
    n = node.attrs["parts"]
    x, weights, biases = node.inputs[0], node.inputs[1 : n + 1], node.inputs[n + 1 :]
    found = [tape.cotangent(out) for out in node.outputs]
    cotangents = [c for c in found if c is not None]
    assert len(cotangents) == n, f"every part of {node.name} takes part in differentiation"
    if tape.wants(x):
        saved = [tape.saved(w) for w in weights]
        tape.emit("contract_group_dgrad", [*cotangents, *saved], [x], suffix="dgrad", parts=n)
    tape.emit("contract_group_wgrad", [tape.saved(x), *cotangents], weights, suffix="wgrad", parts=n)
    for cotangent, bias in zip(cotangents, biases, strict=False):
        tape.emit("reduce", [cotangent], [bias], suffix="bgrad")


CONTRACT_GROUP = register(Op("contract_group", _infer, _transpose, _flops, _flops, factors=side_by_side))
CONTRACT_GROUP_DGRAD = register(
    Op(
        "contract_group_dgrad",
        _infer,
        None,
        _dgrad_flops,
        _dgrad_flops,
        factors=side_by_side,
        accumulates=True,
    )
)
CONTRACT_GROUP_WGRAD = register(
    Op("contract_group_wgrad", _infer, None, _wgrad_flops, _wgrad_flops, factors=side_by_side)
)
