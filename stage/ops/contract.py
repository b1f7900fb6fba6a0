"""Contractions: every matrix multiplication, batched, grouped or not, as a named einsum.

`contract(x[batch, seq, d_model], w[d_model, d_ff]) -> [batch, seq, d_ff]`: dimensions that the result lacks
are summed over. The attribute `factors` renames dimensions to factors where names alone do not say it: the
keys of attention have their own sequence, and a block of `heads` shares one of `kv_heads`. An optional third
operand is a bias, added by the kernel's epilogue.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from stage.ops.masks import keys_per_query
from stage.ops.registry import Attrs, Factor, Factors, Op, Tape, dim_factors, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["CONTRACT", "contract_factors"]


def contract_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    given: Factors | None = attrs.get("factors")
    if given is None:
        return dim_factors(attrs, inputs, outputs)
    by_dim = dict(zip(outputs[0].dim_names, given.results[0], strict=True))
    extra = tuple(tuple(by_dim[name] for name in t.dim_names) for t in inputs[len(given.operands) :])
    return Factors((*given.operands, *extra), given.results)


def _infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    out: Sequence[str] = attrs["out"]
    given: Factors | None = attrs.get("factors")
    names = given.operands if given is not None else tuple(t.dim_names for t in inputs)
    dims = [(f, dim) for t, fs in zip(inputs, names, strict=False) for f, dim in zip(fs, t.dims, strict=True) if f]
    sizes = {f: dim.size for f, dim in sorted(dims, key=lambda pair: pair[0] == pair[1].name)}
    sizes |= {dim.name: dim.size for t in inputs for dim in t.dims if dim.name not in sizes}
    return [(tuple(Dim(name, sizes[name]) for name in out), attrs.get("dtype", "compute"))]


def _flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """2 for each multiply-add: 2 x the product of the sizes of all factors; masked pairs are skipped."""
    factors = contract_factors(attrs, inputs, outputs)
    sizes: dict[Factor, Size] = {}
    for tensor, names in zip((*inputs, *outputs), (*factors.operands, *factors.results), strict=True):
        for name, dim in zip(names, tensor.dims, strict=True):
            if name is not None and (name not in sizes or dim.name == name):
                sizes[name] = dim.size
    if "mask" in attrs:
        sizes["kv_seq"] = keys_per_query(sizes["kv_seq"], attrs["mask"], attrs.get("window"))
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
