"""Attention: one fused kernel (FlashAttention's work and traffic), and softmax for the unfused form.

Work of one sequence: every query meets `keys` keys, each pair costs a multiply-add per element of the two
products q.k and p.v. A causal mask leaves half of the pairs, a sliding window of W at most W - W^2/(2 S) a
query. The fused backward runs five products where the forward runs two (the scores are made again), so for
equal head dimensions it executes 2.5 times the forward's work; a FLOP count of the model credits it with
twice (Dao et al., FlashAttention-2, 2023, section 3).

With the attribute `ring` the keys of a rank are those of its own part of the sequence, and what the op needs of the
others comes round (`stage.passes.ring`). One step of that has the attribute `block`, and meets one rank's keys.
"""

from collections.abc import Sequence
from typing import Any

from stage.ops.masks import met_keys
from stage.ops.registry import Attrs, Factor, Factors, Op, Tape, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["ATTENTION", "SOFTMAX"]


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    q, _, v = inputs[:3]
    rows = q.dims[:-1]
    return [((*rows, v.dims[-1]), q.dtype), (rows, "fp32")]


def _q(tensor: Tensor) -> tuple[Factor, ...]:
    return (*(name for name in tensor.dim_names[:-1]), None)


def _kv(tensor: Tensor, attrs: Attrs) -> tuple[Factor, ...]:
    rename = {"kv_heads": "heads"} | ({} if attrs.get("ring") else {"seq": "kv_seq"})
    return (*(rename.get(name, name) for name in tensor.dim_names[:-1]), None)


def _sinks(tensors: Sequence[Tensor]) -> list[tuple[Factor, ...]]:
    return [t.dim_names for t in tensors]


def _factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    q, k, v, *sinks = inputs
    o, lse = outputs
    return Factors(
        (_q(q), _kv(k, attrs), _kv(v, attrs), *_sinks(sinks)),
        (_q(o), lse.dim_names),
        fixed=frozenset({"kv_seq"}),
    )


def _pairs(attrs: Attrs, q: Tensor, k: Tensor) -> Size:
    """(query, key) pairs of all heads that one device works on."""
    return _rows(q) * met_keys(k.size("seq"), attrs)


def _rows(q: Tensor) -> Size:
    total: Size = 1
    for dim in q.dims[:-1]:
        total = total * dim.size
    return total


def _flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    q, k, v = inputs[:3]
    return 2 * _pairs(attrs, q, k) * (q.dims[-1].size + v.dims[-1].size)


def _transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    saved = [tape.saved(x) for x in (*node.inputs, *node.outputs)]
    attrs = {key: node.attrs[key] for key in ("mask", "window", "ring") if key in node.attrs}
    tape.emit("attention_backward", [cotangent, *saved], list(node.inputs), **attrs)


def _backward_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    do, q, k, v, *rest = inputs
    *sinks, o, lse = rest
    dq, dk, dv, *dsinks = outputs
    return Factors(
        (_q(do), _q(q), _kv(k, attrs), _kv(v, attrs), *_sinks(sinks), _q(o), lse.dim_names),
        (_q(dq), _kv(dk, attrs), _kv(dv, attrs), *_sinks(dsinks)),
        fixed=frozenset({"kv_seq"}),
    )


def _backward_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """q.k again, then dv, dp (head_dim of v), dq, dk (head_dim of q)."""
    _, q, k, v = inputs[:4]
    return 2 * _pairs(attrs, q, k) * (3 * q.dims[-1].size + 2 * v.dims[-1].size)


def _backward_model_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    _, q, k, v = inputs[:4]
    return 4 * _pairs(attrs, q, k) * (q.dims[-1].size + v.dims[-1].size)


ATTENTION = register(Op("attention", _infer, _transpose, _flops, _flops, factors=_factors))
ATTENTION_BACKWARD = register(
    Op("attention_backward", _infer, None, _backward_flops, _backward_model_flops, factors=_backward_factors)
)


def _softmax_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(inputs[0].dims, inputs[0].dtype)]


def _softmax_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    operands, results = tuple(t.dim_names for t in inputs), tuple(t.dim_names for t in outputs)
    return Factors(operands, results, fixed=frozenset({"kv_seq"}))


def _softmax_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return inputs[0].elements * 5


def _softmax_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("attention_softmax_backward", [cotangent, tape.saved(node.outputs[0])], list(node.inputs))


SOFTMAX = register(
    Op("attention_softmax", _softmax_infer, _softmax_transpose, _softmax_flops, factors=_softmax_factors)
)
SOFTMAX_BACKWARD = register(
    Op("attention_softmax_backward", _softmax_infer, None, _softmax_flops, factors=_softmax_factors)
)
