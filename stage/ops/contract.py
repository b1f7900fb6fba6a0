"""Contractions: every matrix multiplication, batched, grouped or not, as a named einsum.

`contract(x[batch, seq, d_model], w[d_model, d_ff]) -> [batch, seq, d_ff]`: dimensions that the result lacks
are summed over. The attribute `factors` renames dimensions to factors where names alone do not say it: the
keys of attention have their own sequence, and a block of `heads` shares one of `kv_heads`. An optional third
operand is a bias, added by the kernel's epilogue.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from stage.ops.masks import met_keys
from stage.ops.registry import Attrs, Factor, Factors, Op, Tape, dim_factors, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["CONTRACT", "contract_factors"]


def contract_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    """The letters of the einsum: names of dimensions, or what the attribute `factors` says instead."""
    given: Factors | None = attrs.get("factors")
    if given is None:
        return dim_factors(attrs, inputs, outputs)
    by_dim = dict(zip(outputs[0].dim_names, given.results[0], strict=True))
    extra = tuple(tuple(by_dim[name] for name in t.dim_names) for t in inputs[len(given.operands) :])
    return Factors((*given.operands, *extra), given.results)


def _sizes(names: Sequence[tuple[Factor, ...]], tensors: Sequence[Tensor]) -> dict[Factor, Size]:
    """The size of each factor: that of the dimension of its own name, where there is one.

    A factor stands for a smaller dimension of another name where that is repeated: `heads` that share `kv_heads`.
    """
    sizes: dict[Factor, Size] = {}
    for factors, tensor in zip(names, tensors, strict=True):
        for factor, dim in zip(factors, tensor.dims, strict=True):
            if factor is not None and (factor not in sizes or dim.name == factor):
                sizes[factor] = dim.size
    return sizes


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    out: Sequence[str] = attrs["out"]
    given: Factors | None = attrs.get("factors")
    names = tuple(t.dim_names for t in inputs) if given is None else given.operands
    results = tuple(out) if given is None else given.results[0]
    sizes = _sizes(names, inputs[: len(names)])
    dims = tuple(Dim(name, sizes[factor]) for name, factor in zip(out, results, strict=True))
    return [(dims, attrs.get("dtype", "compute"))]


def _flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """2 for each multiply-add: 2 x the product of the sizes of all factors; masked pairs are skipped."""
    factors = contract_factors(attrs, inputs, outputs)
    sizes = _sizes((*factors.operands, *factors.results), (*inputs, *outputs))
    if "mask" in attrs:
        sizes["kv_seq"] = met_keys(sizes["kv_seq"], attrs)
    return 2 * prod(sizes.values(), start=1)


def _transpose(tape: Tape, node: Any) -> None:
    x, w, *bias = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    given: Factors | None = node.attrs.get("factors")

    def swapped(operands: tuple[int, int], result: int) -> dict[str, Any]:
        """The attributes of the contraction whose operands are (dy, other) and whose result is x or w."""
        attrs = {key: node.attrs[key] for key in ("mask", "window") if key in node.attrs}
        if given is not None:
            names = (*given.operands[:2], given.results[0])
            attrs["factors"] = Factors(tuple(names[i] for i in operands), (names[result],))
        return attrs

    if tape.wants(x):
        tape.emit("contract", [cotangent, tape.saved(w)], [x], suffix="dgrad", **swapped((2, 1), 0))
    if tape.wants(w):
        tape.emit("contract", [tape.saved(x), cotangent], [w], suffix="wgrad", **swapped((0, 2), 1))
    for b in bias:
        tape.emit("reduce", [cotangent], [b], suffix="bgrad")


CONTRACT = register(
    Op("contract", _infer, _transpose, _flops, _flops, factors=contract_factors, accumulates=True)
)
