"""Pointwise functions, and the kernels of embedding, loss and routing, in numpy."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tests.kernels import Call, Local

Floats = npt.NDArray[Any]


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def swiglu(gate: Floats, up: Floats, *weights: Floats) -> Floats:
    return gate * sigmoid(gate) * up * (weights[0] if weights else 1)


def clamped_swiglu(gate: Floats, up: Floats) -> Floats:
    """That of gpt-oss: gate at most 7, up between -7 and 7 and one more."""
    low = np.minimum(gate, 7)
    result: Floats = low * sigmoid(1.702 * low) * (np.clip(up, -7, 7) + 1)
    return result


FUNCTIONS: dict[str, Callable[..., Floats]] = {
    "gelu": lambda x: x * sigmoid(1.702 * x),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x * sigmoid(x),
    "swiglu": swiglu,
    "clamped_swiglu": clamped_swiglu,
    "mul": lambda a, b: a * b,
    "sigmoid": sigmoid,
}


def derivatives(function: str, operands: Sequence[Floats]) -> list[Floats]:
    """The derivative by each operand, by a complex step: exact to rounding, and no second formula to be wrong."""
    step = 1e-30
    found = []
    for i in range(len(operands)):
        moved = [x + (1j * step if i == j else 0) for j, x in enumerate(operands)]
        found.append(np.imag(FUNCTIONS[function](*moved)) / step)
    return found


def _rows(x: "Local", ids: Floats) -> tuple[Floats, Floats]:
    """Local rows of `ids` in the vocabulary of x, and which of them are here."""
    at = x.at("vocab")
    local = ids - x.start[at]
    here = (local >= 0) & (local < x.shape[at])
    return np.where(here, local, 0), here


def embedding(call: "Call") -> list[Floats]:
    ids, table = call.operands
    rows, here = _rows(table, ids.value)
    return [table.value[rows] * here[..., None]]


def embedding_backward(call: "Call") -> list[Floats]:
    dy, ids, *added = call.operands
    out = call.results[0]
    rows, here = _rows(out, ids.value)
    gradient = np.zeros(out.shape)
    np.add.at(gradient, rows, dy.value * here[..., None])
    return [gradient + sum(x.value for x in added)]


def logits_max(call: "Call") -> list[Floats]:
    return [call.values[0].max(-1)]


def target_logit(call: "Call") -> list[Floats]:
    logits, labels = call.operands
    rows, here = _rows(logits, labels.value)
    return [np.take_along_axis(logits.value, rows[..., None], -1)[..., 0] * here]


def sum_exp(call: "Call") -> list[Floats]:
    logits, maximum = call.values
    return [np.exp(logits - maximum[..., None]).sum(-1)]


def loss(call: "Call") -> list[Floats]:
    maximum, total, target = call.values
    return [np.log(total) + maximum - target]


def loss_backward(call: "Call") -> list[Floats]:
    dy, total = call.values
    return [dy / total, -dy]


def softmax_backward(call: "Call") -> list[Floats]:
    dy, logits, maximum = call.values
    return [dy[..., None] * np.exp(logits - maximum[..., None])]


def target_backward(call: "Call") -> list[Floats]:
    dy, labels, *added = call.operands
    out = call.results[0]
    rows, here = _rows(out, labels.value)
    gradient = np.zeros(out.shape)
    np.put_along_axis(gradient, rows[..., None], (dy.value * here)[..., None], -1)
    return [gradient + sum(x.value for x in added)]


def route(call: "Call") -> list[Floats]:
    """Experts in turn, so that they are balanced over any whole turns; sigmoids of their logits."""
    logits = call.operands[0]
    top_k = call.results[0].shape[-1]
    turn = logits.indices("seq")[None, :, None] * top_k + np.arange(top_k)
    chosen = np.broadcast_to(turn % logits.shape[-1], call.results[0].shape)
    return [sigmoid(np.take_along_axis(logits.value, chosen, -1)), chosen]


def route_backward(call: "Call") -> list[Floats]:
    dp, logits, p, chosen = call.values
    gradient = np.zeros_like(logits)
    np.put_along_axis(gradient, chosen, dp * p * (1 - p), -1)
    return [gradient]


def count_tokens(call: "Call") -> list[Floats]:
    rows, experts = call.results[0].shape
    parts = np.array_split(call.values[0].ravel(), rows)
    return [np.stack([np.bincount(part, minlength=experts) for part in parts])]


def token_ids(call: "Call") -> Floats:
    """The number of each choice of each local token over the whole batch, from 1 on: [batch, seq, top_k]."""
    chosen = call.operands[1]
    token = chosen.indices("batch")[:, None] * call.sizes["seq"] + chosen.indices("seq")[None, :]
    return 1 + token[..., None] * chosen.shape[-1] + np.arange(chosen.shape[-1])


def slots_of(call: "Call") -> Floats:
    """The choices in the slots of each expert: [experts, slots]."""
    chosen = call.values[1]
    count = call.results[0].shape[0]
    return np.stack([token_ids(call)[chosen == expert] for expert in range(count)])


def permute_tokens(call: "Call") -> list[Floats]:
    x, chosen = call.values
    each = x if "top_k" in call.operands[0].dims else np.repeat(x[:, :, None], chosen.shape[-1], axis=2)
    return [np.stack([each[chosen == expert] for expert in range(call.results[0].shape[0])])]


def unpermute_tokens(call: "Call") -> list[Floats]:
    y, chosen = call.values
    assert call.slots is not None
    expected = token_ids(call)
    assert sorted(call.slots.ravel()) == sorted(expected.ravel()), (
        "slots came back to another device than they left"
    )
    rows = y.reshape((-1, *y.shape[2:]))[np.argsort(call.slots.ravel())]
    each = rows[np.argsort(np.argsort(expected.ravel()))].reshape((*expected.shape, *y.shape[2:]))
    for expert in range(y.shape[0]):
        assert set(call.slots[expert]) == set(expected[chosen == expert]), "a slot belongs to another expert"
    return [each if "top_k" in call.results[0].dims else each.sum(2)]


def sort_by_expert(call: "Call") -> list[Floats]:
    return [call.values[-1]]


KERNELS: dict[str, Callable[["Call"], list[Floats]]] = {
    f.__name__: f
    for f in (
        *(
            embedding,
            embedding_backward,
            logits_max,
            target_logit,
            sum_exp,
            loss,
            loss_backward,
            softmax_backward,
        ),
        *(
            target_backward,
            route,
            route_backward,
            count_tokens,
            permute_tokens,
            unpermute_tokens,
            sort_by_expert,
        ),
    )
}
