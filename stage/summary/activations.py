"""What a block keeps of a micro-batch from its forward until its backward, on one device.

These are the tensors of the forward graph that the backward graph reads, each once, with the sizes that the device
holds. A tensor that is only a view of another one is that other one: it costs nothing where that is kept too. The
output of a block is the input of the next one and counts there. Parameters, masters and buffers are no activations.
"""

from collections.abc import Callable
from typing import Any

import sympy

from stage.ops import get_op
from stage.passes.backward import Differentiated
from stage.summary.symbolic import Local, tidy
from stage.tensor import Size

__all__ = ["saved_activations"]


def saved_activations(both: Differentiated, local: Local, width: Callable[[str], int]) -> dict[str, Any]:
    """The bytes that a block keeps for its backward, in all and by tensor, as expressions and as values.

    `width` is the bytes of an element of a dtype.
    """
    kept = set(both.saved)
    tensors, total = [], sympy.Integer(0)
    for name in both.saved:
        if _source(both, name) in kept - {name}:
            continue
        tensor = local.tensor(both.backward.tensors[name], both.backward.layouts[name])
        bytes_: Size = tidy(tensor.elements * width(tensor.dtype))
        total += bytes_
        entry = {"name": name, "dims": list(tensor.dim_names), "dtype": tensor.dtype}
        tensors.append({**entry, "bytes": str(bytes_), "bytes_value": local.value(bytes_)})
    return {"bytes": str(tidy(total)), "bytes_value": local.value(total), "tensors": tensors}


def _source(both: Differentiated, name: str) -> str:
    """The tensor that a tensor is a view of: itself, or what a chain of changes of view starts from."""
    makers = both.forward.producers()
    while name in makers and not get_op(makers[name].op).kernel:
        name = makers[name].inputs[0]
    return name
