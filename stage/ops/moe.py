"""Mixture of experts: routing, and moving tokens between their order in the batch and their experts.

`permute_tokens` copies each token once per expert that wants it: x[batch, seq, d_model] -> [experts, slots,
d_model], where `slots` are the places of one expert, batch x seq x top_k / experts of them when loads are
balanced. Before it every device holds slots of all experts for its own tokens (so `slots` is sharded as batch
and seq are); for the grouped GEMM `experts` is sharded and the slots of an expert come together. The reshard
between the two **is** the all-to-all. `sort_by_expert` orders what arrived, for which it needs every source's
counts; without counts it puts them back, before a tensor-parallel expert's shares are summed.
"""

from collections.abc import Sequence
from typing import Any

from stage.ops.registry import Attrs, Factor, Factors, Op, Tape, dim_factors, register
from stage.tensor import Dim, Size, Tensor

__all__ = ["COUNT_TOKENS", "PERMUTE", "ROUTE", "SORT_BY_EXPERT", "UNPERMUTE"]

TOKENS = ("batch", "seq")


def _names(tensor: Tensor) -> tuple[Factor, ...]:
    """Slots and sources are tokens: a merge of batch and seq. Nothing is sharded over experts here."""
    merged: dict[str, Factor] = {
        "slots": TOKENS,
        "sources": TOKENS,
        "experts": None,
        "router": None,
        "top_k": None,
    }
    return tuple(merged.get(name, name) for name in tensor.dim_names)


def _token_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    return Factors(tuple(_names(t) for t in inputs), tuple(_names(t) for t in outputs))


def _moved_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    """A token moves whole, so that its slots are on the same device as those of its probabilities."""
    names = _token_factors(attrs, inputs, outputs)
    hidden = {dim for t in (inputs[0], outputs[0]) for dim in _names(t) if isinstance(dim, str)} - {*TOKENS}
    return Factors(names.operands, names.results, fixed=frozenset(hidden))


def _route_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    rows = inputs[0].dims[:-1]
    chosen = (*rows, Dim("top_k", attrs["top_k"]))
    return [(chosen, "compute"), (chosen, "int64")]


def _route_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """Softmax or sigmoid over all experts, then a selection pass."""
    logits = next(t for t in inputs if "router" in t.dim_names)
    return logits.elements * 6


def _route_transpose(tape: Tape, node: Any) -> None:
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    saved = [tape.saved(x) for x in (node.inputs[0], *node.outputs)]
    tape.emit("route_backward", [cotangent, *saved], [node.inputs[0]], top_k=node.attrs["top_k"])


ROUTE = register(Op("route", _route_infer, _route_transpose, _route_flops, factors=_token_factors))
ROUTE_BACKWARD = register(Op("route_backward", _route_infer, None, _route_flops, factors=_token_factors))


def _given(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(tuple(attrs["dims"]), attrs.get("dtype", "compute"))]


def _moved(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    """One operation for each element that is moved or added."""
    return inputs[0].elements if inputs[0].dtype != "int64" else outputs[0].elements


def _counted(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return inputs[0].elements


def _bytes(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: Any) -> Size:
    """Each copied element is read and written, whatever the shape it is copied from."""
    larger = max(inputs[0], outputs[0], key=lambda t: "experts" in t.dim_names)
    return 2 * larger.bytes(width) + sum(t.bytes(width) for t in inputs[1:])


def _permute_transpose(tape: Tape, node: Any) -> None:
    x, indices = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("unpermute_tokens", [cotangent, tape.saved(indices)], [x])


def _unpermute_transpose(tape: Tape, node: Any) -> None:
    y, indices = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("permute_tokens", [cotangent, tape.saved(indices)], [y])


PERMUTE = register(
    Op("permute_tokens", _given, _permute_transpose, _moved, factors=_moved_factors, bytes=_bytes)
)
UNPERMUTE = register(
    Op("unpermute_tokens", _given, _unpermute_transpose, _moved, factors=_moved_factors, bytes=_bytes)
)
COUNT_TOKENS = register(Op("count_tokens", _given, None, _counted, factors=_token_factors))


def _sort_infer(attrs: Attrs, inputs: Sequence[Tensor]) -> list[tuple[tuple[Dim, ...], str]]:
    return [(inputs[-1].dims, inputs[-1].dtype)]


def _sort_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    names = dim_factors(attrs, inputs, outputs)
    counts: tuple[Factor, ...] = ("slots", None)
    if len(inputs) == 1:
        return names
    return Factors((counts, *names.operands[1:]), names.results, around=frozenset({"expert_d_ff"}))


def _sort_transpose(tape: Tape, node: Any) -> None:
    *counts, y = node.inputs
    cotangent = tape.cotangent(node.outputs[0])
    assert cotangent is not None
    tape.emit("sort_by_expert", [*map(tape.saved, counts), cotangent], [y])


def _sort_flops(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Size:
    return outputs[0].elements


SORT_BY_EXPERT = register(
    Op("sort_by_expert", _sort_infer, _sort_transpose, _sort_flops, factors=_sort_factors)
)
