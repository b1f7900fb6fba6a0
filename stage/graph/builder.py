"""Writing a graph down: what a model's program calls.

Every method returns tensors, so a program reads like the formulas of a paper. Sizes are symbols named like the
dimension unless said otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stage.graph.graph import Graph, Node
from stage.ops import get_op
from stage.symbols import size
from stage.tensor import Dim, Size, Tensor

__all__ = ["Builder", "Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """Choices that change a block's program but belong to no model.

    `attention` is `fused` or `unfused`, `mask` is `causal` or `full` (which also ignores sliding windows);
    with `dropout` the masks are written and read, one byte an element.
    """

    attention: str = "fused"
    mask: str = "causal"
    dropout: bool = False


class Builder:
    """Collects the nodes of one block."""

    def __init__(
        self, name: str, options: Options = Options(), sizes: Mapping[str, Size] | None = None
    ) -> None:
        self.name = name
        self.options = options
        self._sizes = dict(sizes or {})
        self._scope: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._nodes: list[Node] = []
        self._inputs: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of what is added inside with `name.`."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def _full(self, name: str) -> str:
        return ".".join((*self._scope, name))

    def dim(self, name: str, value: Size | None = None) -> Dim:
        """A dimension; its size is the symbol of its name, or `value`."""
        if value is None:
            value = self._sizes.get(name)
        return Dim(name, size(name) if value is None else value)

    def input(self, name: str, *dims: str | Dim, dtype: str = "compute") -> Tensor:
        """A tensor the block is given; `int64` ones take no part in differentiation."""
        role = "index" if dtype == "int64" else "activation"
        tensor = Tensor(name, self._dims(dims), dtype, role)
        assert name not in self._tensors, f"{name} is declared twice"
        self._tensors[name] = tensor
        self._inputs.append(name)
        return tensor

    def parameter(self, name: str, *dims: str | Dim, shared: bool = False, rows: int = 1) -> Tensor:
        """A learned tensor whose first `rows` dims are its rows. A `shared` one is named without scope, to be tied."""
        full = name if shared else self._full(name)
        if full not in self._tensors:
            self._tensors[full] = Tensor(full, self._dims(dims), "compute", "parameter", rows, shared)
        return self._tensors[full]

    def _dims(self, dims: Sequence[str | Dim]) -> tuple[Dim, ...]:
        return tuple(self.dim(d) if isinstance(d, str) else d for d in dims)

    def op(self, kind: str, inputs: Sequence[Tensor], name: str, /, **attrs: Any) -> tuple[Tensor, ...]:
        """Apply an op; its results, however many."""
        full = self._full(name)
        shapes = get_op(kind).infer(attrs, inputs)
        outputs = []
        for i, (dims, dtype) in enumerate(shapes):
            role = "index" if dtype in ("int64", "uint8") else "activation"
            out = Tensor(full if i == 0 else f"{full}:{i}", dims, dtype, role)
            assert out.name not in self._tensors, f"{out.name} is made twice in {self.name}"
            self._tensors[out.name] = out
            outputs.append(out)
        self._nodes.append(
            Node(kind, full, tuple(t.name for t in inputs), tuple(t.name for t in outputs), attrs)
        )
        return tuple(outputs)

    def contract(self, x: Tensor, w: Tensor, name: str, out: Sequence[str], **attrs: Any) -> Tensor:
        """The einsum of two tensors by the names of their dimensions; `out` names what remains."""
        bias = attrs.pop("bias", None)
        operands = [x, w] if bias is None else [x, w, bias]
        return self.op("contract", operands, name, out=tuple(out), **attrs)[0]

    def linear(
        self, x: Tensor, name: str, over: Sequence[str], out: Sequence[str | Dim], bias: bool = False
    ) -> Tensor:
        """x times a weight over the dimensions `over`, which become `out`; a bias is added by the epilogue."""
        dims = self._dims(out)
        weight = self.parameter(f"{name}.weight", *dims, *(Dim(d, x.size(d)) for d in over), rows=len(dims))
        keep = [d for d in x.dim_names if d not in over]
        result = [*keep, *(d.name for d in dims)]
        offset = self.parameter(f"{name}.bias", *dims) if bias else None
        return self.contract(x, weight, name, result, bias=offset)

    def add(self, name: str, *operands: Tensor) -> Tensor:
        """The sum of tensors; ones that lack a dimension of the first are broadcast along it."""
        return self.op("add", operands, name)[0]

    def pointwise(self, function: str, name: str, *operands: Tensor) -> Tensor:
        """A function of `stage.ops.pointwise.FUNCTIONS`, element by element."""
        return self.op("pointwise", operands, name, function=function)[0]

    def dropout(self, name: str, x: Tensor) -> Tensor:
        """x itself, or with the option `dropout` the masked x."""
        return self.op("dropout", [x], name)[0] if self.options.dropout else x

    def graph(self, *outputs: Tensor) -> Graph:
        """The finished graph."""
        graph = Graph(
            self.name, self._tensors, tuple(self._nodes), tuple(self._inputs), tuple(t.name for t in outputs)
        )
        return graph.check()
