"""What the passes know of an op, in one record, registered once.

An op is described by **factors**, the letters of its einsum: each dimension of each operand and result is
one factor, or none. A factor that an operand has and the result has not is reduced. By default a factor is
called like the dimension, so an op on `x[batch, seq, d_model]` and `w[d_model, d_ff]` needs to say nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stage.tensor import Dim, Size, Tensor

__all__ = [
    "Attrs",
    "Factor",
    "Factors",
    "Op",
    "Tape",
    "dim_factors",
    "get_op",
    "moved_bytes",
    "register",
    "registered",
]

Attrs = Mapping[str, Any]
Factor = str | tuple[str, ...] | None
"""A dimension's factor; None where it is whole on every device; a tuple where it merges several (tokens)."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of an op: per dimension of each operand and of each result.

    `fixed` factors can not be sharded (a norm's own dimension). `held` names factors that no operand has but
    whose axes this op must leave alone (the loss of a vocabulary-parallel head is computed alike on all of
    them).
    `around` names factors that no operand has but the ops around it: their axes are left alone too, but each device
    works for its own share of these (tokens are sorted for a tensor-parallel expert's share of its hidden size).
    """

    operands: tuple[tuple[Factor, ...], ...]
    results: tuple[tuple[Factor, ...], ...]
    fixed: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()


class Tape(Protocol):
    """What a transpose rule may do: look at cotangents, use saved values, emit ops of the backward graph."""

    def cotangent(self, tensor: str) -> str | None:
        """The cotangent gathered so far for a forward tensor, or None."""

    def saved(self, tensor: str) -> str:
        """A forward tensor as the backward graph sees it (it may be gathered again)."""

    def wants(self, tensor: str) -> bool:
        """Whether anybody needs the cotangent of this forward tensor."""

    def emit(self, op: str, inputs: Sequence[str], wrt: Sequence[str], **attrs: Any) -> None:
        """Add a node whose results are cotangents of the forward tensors `wrt`.

        If the op can add into an existing cotangent (`accumulates`) and there is one, it becomes its last
        operand; otherwise an `add` follows. Gradients of parameters are always added into.
        """

    def alias(self, wrt: str, cotangent: str) -> None:
        """Use an existing backward tensor as the cotangent of `wrt` (an addition hands it on unchanged)."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, forward or backward."""


def dim_factors(attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Factors:
    """Every dimension is a factor of its own name."""
    return Factors(tuple(t.dim_names for t in inputs), tuple(t.dim_names for t in outputs))


def moved_bytes(
    attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: Callable[[str], int]
) -> Size:
    """Each operand is read once and each result written once; a gradient is added into, so it is read too."""
    total = sum(t.bytes(width) for t in (*inputs, *outputs))
    return total + sum(t.bytes(width) for t in outputs if t.role == "gradient")


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of op: shapes, factors, costs and transpose.

    `flops` counts operations the kernel executes (a multiply-add is 2), `model_flops` those a FLOP count of
    the model credits it with; both take attributes, operands and results, all of one device's local sizes.
    `bytes` is the traffic to device memory, given the width of a dtype.
    An op with `kernel=False` is a change of view and makes no node in a trace.
    """

    name: str
    infer: Callable[[Attrs, Sequence[Tensor]], list[tuple[tuple[Dim, ...], str]]]
    transpose: Callable[["Tape", Any], None] | None
    flops: Callable[[Attrs, Sequence[Tensor], Sequence[Tensor]], Size]
    model_flops: Callable[[Attrs, Sequence[Tensor], Sequence[Tensor]], Size] | None = None
    factors: Callable[[Attrs, Sequence[Tensor], Sequence[Tensor]], Factors] = dim_factors
    bytes: Callable[[Attrs, Sequence[Tensor], Sequence[Tensor], Callable[[str], int]], Size] = moved_bytes
    accumulates: bool = False
    kernel: bool = True
    reduction: str = "sum"

    @property
    def is_matmul(self) -> bool:
        """Whether this op's work is matrix multiplication, the work that models are counted by."""
        return self.model_flops is not None


_OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Make an op known by its name; the registry is filled on import and never changes after."""
    assert op.name not in _OPS, f"op {op.name} is registered twice"
    _OPS[op.name] = op
    return op


def get_op(name: str) -> Op:
    """The record of the op called `name`."""
    return _OPS[name]


def registered() -> tuple[str, ...]:
    """The names of all ops, sorted."""
    return tuple(sorted(_OPS))
