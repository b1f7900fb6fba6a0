"""What every op computes, in numpy and in float64: the meaning that the passes must preserve.

A kernel sees one device's operands with the names of their dims (as factors) and where each begins in the whole
tensor. Routing is fixed and balanced; the slots of an expert carry the identity of their token (`slots`), because
their order has no meaning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stage.symbols import evaluate
from tests import functions

Floats = npt.NDArray[Any]
Names = tuple[Any, ...]
EPSILON = 1e-5


@dataclass(frozen=True)
class Local:
    """One operand or result on one device: dims by factor and by name, where it begins, and its shape."""

    names: Names
    dims: tuple[str, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    value: Floats = field(default_factory=lambda: np.zeros(0))

    def at(self, dim: str) -> int:
        return self.dims.index(dim)

    def indices(self, dim: str) -> Floats:
        """Global indices along a dim."""
        i = self.at(dim)
        return np.arange(self.shape[i]) + self.start[i]


@dataclass(frozen=True)
class Call:
    """One run of a node on one device; `order` are the positions of the tokens of a sequence that is laid otherwise."""

    op: str
    phase: str
    attrs: Mapping[str, Any]
    operands: Sequence[Local]
    results: Sequence[Local]
    sizes: Mapping[str, int]
    slots: Floats | None = None
    order: Floats | None = None

    @property
    def values(self) -> list[Floats]:
        return [x.value for x in self.operands]

    def positions(self, x: Local) -> Floats:
        """The positions of the tokens of an operand in their sequence."""
        found = x.indices("seq")
        return found if self.order is None else self.order[found]


def aligned(value: Floats, names: Names, target: Names) -> Floats:
    """The value with its dims in the order of `target`, and new ones of size 1 for those it lacks."""
    have = [name for name in target if name in names]
    moved = value.transpose([names.index(name) for name in have])
    return moved.reshape([moved.shape[have.index(name)] if name in have else 1 for name in target])


def reduced(value: Floats, names: Names, target: Names) -> Floats:
    """The value summed over the dims that `target` lacks, the others in its order."""
    rest = tuple(name for name in names if name in target)
    summed = value.sum(axis=tuple(i for i, name in enumerate(names) if name not in target))
    return aligned(summed, rest, target)


def einsum(a: Local, b: Local, result: Local) -> Floats:
    """The contraction of two operands; a dim smaller than its factor serves a block of it."""
    size: dict[Any, int] = {}
    for x in (a, b, result):
        for name, n in zip(x.names, x.shape, strict=True):
            size[name] = max(n, size.get(name, 0))
    for x in (a, b, result):
        for name, dim, n in zip(x.names, x.dims, x.shape, strict=True):
            assert name != dim or n == size[name], (
                f"{dim} of {x.dims} is {n} where another operand has {size[name]}"
            )
    letter = dict(zip(size, "abcdefghijklm", strict=False))
    terms = ["".join(letter[name] for name in x.names) for x in (a, b, result)]
    wide = [_repeated(x, size) for x in (a, b)]
    product: Floats = np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", *wide)
    for i, (name, n) in enumerate(zip(result.names, result.shape, strict=True)):
        if n != size[name]:
            product = product.reshape((*product.shape[:i], n, -1, *product.shape[i + 1 :])).sum(axis=i + 1)
    return product


def _repeated(x: Local, size: Mapping[Any, int]) -> Floats:
    value = x.value
    for i, name in enumerate(x.names):
        value = value.repeat(size[name] // x.shape[i], axis=i)
    return value


def visible(call: Call, queries: Floats, keys: Floats) -> npt.NDArray[np.bool_]:
    """Which of the keys each query sees, both by position, shape (queries, keys)."""
    distance = queries[:, None] - keys[None, :]
    seen = np.ones_like(distance, bool) if call.attrs["mask"] == "full" else distance >= 0
    window = call.attrs.get("window")
    if call.attrs["mask"] == "causal" and window is not None:
        seen &= distance < evaluate(window, call.sizes)
    return seen


def contract(call: Call) -> list[Floats]:
    a, b, *added = call.operands
    out = call.results[0]
    total = einsum(a, b, out)
    if call.phase != "backward" and "mask" in call.attrs and "kv_seq" in out.dims:
        keys = out.indices("kv_seq")
        seen = visible(call, call.positions(out), keys if call.order is None else call.order[keys])
        total = np.where(aligned(seen, ("seq", "kv_seq"), out.dims), total, -1e30)
    for x in added:
        total = total + aligned(x.value, x.names, out.names)
    return [total]


def contract_group(call: Call) -> list[Floats]:
    n = call.attrs["parts"]
    x, weights, biases = call.operands[0], call.operands[1 : n + 1], call.operands[n + 1 :]
    found = [einsum(x, w, y) for w, y in zip(weights, call.results, strict=True)]
    for i, b in enumerate(biases):
        found[i] = found[i] + aligned(b.value, b.names, call.results[i].names)
    return found


def contract_group_dgrad(call: Call) -> list[Floats]:
    n = call.attrs["parts"]
    out = call.results[0]
    pairs = zip(call.operands[:n], call.operands[n : 2 * n], strict=True)
    parts = [*(einsum(dy, w, out) for dy, w in pairs), *(x.value for x in call.operands[2 * n :])]
    return [np.sum(parts, axis=0)]


def contract_group_wgrad(call: Call) -> list[Floats]:
    x, *cotangents = call.operands
    return [einsum(x, dy, dw) for dy, dw in zip(cotangents, call.results, strict=True)]


def norm(call: Call) -> list[Floats]:
    x, names = call.operands[0].value, call.operands[0].names
    axis = names.index(call.attrs["over"])
    weights = [aligned(w.value, w.names, names) for w in call.operands[1:]]
    mean = x.mean(axis, keepdims=True) if call.attrs["kind"] == "layer" else np.zeros((1,) * x.ndim)
    scale = 1 / np.sqrt(((x - mean) ** 2).mean(axis, keepdims=True) + EPSILON)
    y = (x - mean) * scale * weights[0] + (weights[1] if len(weights) > 1 else 0)
    statistics = [scale] if call.attrs["kind"] == "rms" else [mean, scale]
    return [y, *(s.squeeze(axis) for s in statistics)]


def norm_backward(call: Call) -> list[Floats]:
    dy, x, w, *statistics = call.operands
    axis = x.names.index(call.attrs["over"])
    wide = [np.expand_dims(s.value, axis) for s in statistics]
    mean, scale = (np.zeros(1), wide[0]) if call.attrs["kind"] == "rms" else (wide[0], wide[1])
    hat = (x.value - mean) * scale
    g = dy.value * aligned(w.value, w.names, x.names)
    centre = 0 if call.attrs["kind"] == "rms" else g.mean(axis, keepdims=True)
    dx = scale * (g - centre - hat * (g * hat).mean(axis, keepdims=True))
    return [dx, *(reduced(part, x.names, w.names) for part in (dy.value * hat, dy.value))][
        : len(call.results)
    ]


def quantize(call: Call) -> list[Floats]:
    """Copies as they are: what is tested is where they are and what is made of them, not rounding."""
    return [call.operands[i].value for i in call.attrs["of"]]


def amax(call: Call) -> list[Floats]:
    return [np.asarray(max(np.abs(x.value).max() for x in call.operands))]


def norm_sums(call: Call) -> list[Floats]:
    x = call.operands[0]
    axis = x.names.index(call.attrs["over"])
    squares = (x.value**2).sum(axis)
    return [squares if call.attrs["kind"] == "rms" else np.stack([x.value.sum(axis), squares], -1)]


def norm_sums_backward(call: Call) -> list[Floats]:
    ds, x, *added = call.operands
    axis = x.names.index(call.attrs["over"])
    if call.attrs["kind"] == "rms":
        dx = 2 * x.value * np.expand_dims(ds.value, axis)
    else:
        dx = np.expand_dims(ds.value[..., 0], axis) + 2 * x.value * np.expand_dims(ds.value[..., 1], axis)
    return [dx + sum(y.value for y in added)]


def _scale(call: Call, x: Local, sums: Local) -> tuple[Floats, Floats]:
    """The mean and the reciprocal deviation of each row, from its sums over the whole dim."""
    n, axis = call.sizes[call.attrs["over"]], x.names.index(call.attrs["over"])
    if call.attrs["kind"] == "rms":
        mean, square = np.zeros(sums.shape), sums.value / n
    else:
        mean, square = sums.value[..., 0] / n, sums.value[..., 1] / n
    scale = 1 / np.sqrt(square - mean**2 + EPSILON)
    return np.expand_dims(mean, axis), np.expand_dims(scale, axis)


def norm_scale(call: Call) -> list[Floats]:
    x, sums, *weights = call.operands
    mean, scale = _scale(call, x, sums)
    wide = [aligned(w.value, w.names, x.names) for w in weights]
    return [(x.value - mean) * scale * wide[0] + (wide[1] if len(wide) > 1 else 0)]


def norm_scale_backward(call: Call) -> list[Floats]:
    """With sums held fixed for dx; ds is the derivative by the sums."""
    dy, x, sums, w = call.operands
    n, axis = call.sizes[call.attrs["over"]], x.names.index(call.attrs["over"])
    mean, scale = _scale(call, x, sums)
    g = dy.value * aligned(w.value, w.names, x.names)
    hat = (x.value - mean) * scale
    by_scale = (g * (x.value - mean)).sum(axis, keepdims=True)  # a part of the sum, where the dim is sharded
    by_variance = by_scale * -0.5 * scale**3
    by_square = by_variance / n
    by_sum = (-(g * scale).sum(axis, keepdims=True) - 2 * mean * by_variance) / n
    ds = by_square.squeeze(axis)
    if call.attrs["kind"] == "layer":
        ds = np.stack([by_sum.squeeze(axis), ds], -1)
    parts = [reduced(part, x.names, w.names) for part in (dy.value * hat, dy.value)]
    return [g * scale, ds, *parts][: len(call.results)]


def rope(call: Call) -> list[Floats]:
    """A rotation of the two halves of the last dim by an angle that grows with the position; backward, its inverse."""
    x = call.operands[0]
    half = x.shape[-1] // 2
    angle = 0.3 * call.positions(x)[:, None] / (1 + np.arange(half))[None, :]
    angle = aligned(angle, ("seq", "half"), (*x.dims[:-1], "half")) * (-1 if call.phase == "backward" else 1)
    a, b = x.value[..., :half], x.value[..., half : 2 * half]
    turned = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
    return [np.concatenate([*turned, x.value[..., 2 * half :]], axis=-1)]


def _scores(call: Call, q: Local, k: Local) -> Floats:
    """Masked scores [batch, heads, seq, kv_seq]."""
    keys = k.value.repeat(q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bshd,bthd->bhst", q.value, keys)
    return np.where(visible(call, call.positions(q), call.positions(k)), scores, -1e30)


def attention(call: Call) -> list[Floats]:
    q, k, v, *sinks = call.operands
    scores = _scores(call, q, k)
    total = np.exp(scores).sum(-1)
    if sinks:
        total = total + np.exp(sinks[0].value)[None, :, None]
    values = v.value.repeat(q.shape[2] // v.shape[2], axis=2)
    o = np.einsum("bhst,bthd->bshd", np.exp(scores) / np.where(total, total, 1)[..., None], values)
    with np.errstate(divide="ignore"):  # of a block of keys a query may see none
        return [o, np.log(total).transpose(0, 2, 1)]


def attention_backward(call: Call) -> list[Floats]:
    do, q, k, v, *rest = call.operands
    *sinks, o, lse = rest
    group = q.shape[2] // k.shape[2]
    p = np.exp(_scores(call, q, k) - lse.value.transpose(0, 2, 1)[..., None])
    mean = np.einsum("bshd,bshd->bhs", do.value, o.value)
    ds = p * (np.einsum("bshd,bthd->bhst", do.value, v.value.repeat(group, axis=2)) - mean[..., None])
    dq = np.einsum("bhst,bthd->bshd", ds, k.value.repeat(group, axis=2))
    dk, dv = np.einsum("bhst,bshd->bthd", ds, q.value), np.einsum("bhst,bshd->bthd", p, do.value)
    blocks = [x.reshape((*x.shape[:2], k.shape[2], group, -1)).sum(3) for x in (dk, dv)]
    dsinks = [-(np.exp(s.value - lse.value) * mean.transpose(0, 2, 1)).sum((0, 1)) for s in sinks]
    return [dq, *blocks, *dsinks]


def attention_merge(call: Call) -> list[Floats]:
    """What two blocks of keys give together, from what each gives alone."""
    o, lse, other, other_lse = call.values
    total = np.logaddexp(lse, other_lse)
    return [o * np.exp(lse - total)[..., None] + other * np.exp(other_lse - total)[..., None], total]


def cast(call: Call) -> list[Floats]:
    return [call.values[0]]


def attention_softmax(call: Call) -> list[Floats]:
    scores, *sinks = call.operands
    e = np.exp(scores.value)
    total = e.sum(-1, keepdims=True)
    if sinks:
        total = total + np.exp(aligned(sinks[0].value, ("heads",), scores.dims))
    return [e / total]


def attention_softmax_backward(call: Call) -> list[Floats]:
    dp, p = call.operands
    mean = (dp.value * p.value).sum(-1, keepdims=True)
    found = [p.value * (dp.value - mean)]
    if len(call.results) > 1:
        missing = 1 - p.value.sum(-1, keepdims=True)
        found.append(reduced(-missing * mean, p.dims, ("heads",)))
    return found


def pointwise(call: Call) -> list[Floats]:
    first = call.operands[0]
    operands = [aligned(x.value, x.names, first.names) for x in call.operands]
    return [functions.FUNCTIONS[call.attrs["function"]](*operands)]


def pointwise_backward(call: Call) -> list[Floats]:
    dy, *saved = call.operands
    operands = [aligned(x.value, x.names, dy.names) for x in saved]
    parts = functions.derivatives(call.attrs["function"], operands)
    return [reduced(dy.value * part, dy.names, x.names) for part, x in zip(parts, call.results, strict=True)]


def add(call: Call) -> list[Floats]:
    names = call.operands[0].names
    return [np.asarray(sum(aligned(x.value, x.names, names) for x in call.operands))]


def reduce(call: Call) -> list[Floats]:
    dy, *added = call.operands
    return [reduced(dy.value, dy.names, call.results[0].names) + sum(x.value for x in added)]


def dropout(call: Call) -> list[Floats]:
    x = call.operands[0]
    mixed = sum(np.ix_(*((3 + 2 * i) * x.indices(dim) for i, dim in enumerate(x.dims))))
    kept = np.asarray(mixed) % 5 != 0
    return [x.value * kept, kept]


def dropout_backward(call: Call) -> list[Floats]:
    return [call.values[0] * call.values[1]]


def split(call: Call) -> list[Floats]:
    """Parts of the last dim; backward, a part that all indices of a dim share sums over it."""
    x, found, at = call.operands[0], [], 0
    for out in call.results:
        part = x.value[..., at : at + out.shape[-1]]
        found.append(reduced(part, (*x.dims[:-1], "last"), (*out.dims[:-1], "last")))
        at += out.shape[-1]
    return found


def join(call: Call) -> list[Floats]:
    out = call.results[0]
    parts = [aligned(x.value, (*x.dims[:-1], "last"), (*out.dims[:-1], "last")) for x in call.operands]
    return [np.concatenate([np.broadcast_to(p, (*out.shape[:-1], p.shape[-1])) for p in parts], axis=-1)]


def chunk(call: Call) -> list[Floats]:
    """The elements of a dim by (block, chunk, rest), of which one chunk is taken."""
    x, dim, blocks = call.operands[0].value, call.attrs["dim"], call.attrs["blocks"]
    parts = x.reshape((*x.shape[:dim], blocks, call.attrs["of"], -1, *x.shape[dim + 1 :]))
    return [parts.take(call.attrs["index"], axis=dim + 1).reshape(call.results[0].shape)]


def join_chunks(call: Call) -> list[Floats]:
    dim, blocks = call.attrs["dim"], call.attrs["blocks"]
    parts = [x.reshape((*x.shape[:dim], blocks, -1, *x.shape[dim + 1 :])) for x in call.values]
    return [np.stack(parts, axis=dim + 1).reshape(call.results[0].shape)]


KERNELS: Mapping[str, Callable[[Call], list[Floats]]] = {
    f.__name__: f
    for f in (
        *(
            contract,
            contract_group,
            contract_group_dgrad,
            contract_group_wgrad,
            norm,
            norm_backward,
            rope,
            join,
        ),
        *(attention, attention_backward, attention_softmax, attention_softmax_backward, pointwise, split),
        *(attention_merge, cast),
        *(pointwise_backward, add, reduce, dropout, dropout_backward, chunk, join_chunks, quantize, amax),
        *(norm_sums, norm_sums_backward, norm_scale, norm_scale_backward),
    )
} | {"split_backward": split, "requantize": quantize}
