"""Which products a precision recipe covers: those with weights of linear layers and of experts, forward and backward.

Attention's own products have no weights. The language model's head and routers stay in the model's precision, as in
Transformer Engine and in the DeepSeek-V3 report (2024, section 3.3.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from stage.graph import Graph, Node
from stage.mesh import Mesh
from stage.precision import COLUMN, FP8, ROW, Matrix
from stage.symbols import evaluate
from stage.tensor import Tensor

__all__ = ["INPUT", "OUTPUT", "WEIGHT", "Product", "Role", "count_products", "covered", "find_products"]

KEPT = frozenset({"vocab", "router"})
"""Dims of weights that are not quantised."""

INPUT, WEIGHT, OUTPUT = "input", "weight", "grad_output"

FORWARD = ("contract", "contract_group")
BACKWARD = ("contract", "contract_group_dgrad", "contract_group_wgrad")


@dataclass(frozen=True, slots=True)
class Product:
    """A layer's product of tokens x features with results x features.

    `features` and `results` are dims, of all weights that are stored as one; `each` are those that every operand has
    (experts): one product for each of their elements.
    """

    name: str
    features: frozenset[str]
    results: frozenset[str]
    each: frozenset[str]

    def matrix(self, kind: str, tensor: Tensor) -> Matrix:
        """An `input`, `weight` or `grad_output` as the matrix it is taken for; what is neither is tokens."""
        names = [name for name in tensor.dim_names if name not in self.each]
        inner = self.results if kind == OUTPUT else self.features
        rows = tuple(name for name in names if name not in inner)
        return Matrix(rows, tuple(name for name in names if name in inner))


@dataclass(frozen=True, slots=True)
class Role:
    """Operands of a node that are quantised together: `input`, `weight` or `grad_output`, and in which copy."""

    kind: str
    copy: str
    operands: range


def find_products(graph: Graph) -> dict[str, Product]:
    """The products of a forward graph that are covered, by the names of their weights."""
    found: dict[str, Product] = {}
    for node in graph.nodes:
        weights = node.inputs[1 : node.attrs.get("parts", 1) + 1] if node.op in FORWARD else ()
        if weights and _quantised(graph, weights):
            found |= dict.fromkeys(weights, _product(graph, node, weights))
    return found


def _quantised(graph: Graph, weights: tuple[str, ...]) -> bool:
    tensors = [graph.tensors[name] for name in weights]
    return all(t.role == "parameter" and not KEPT & set(t.dim_names) for t in tensors)


def _product(graph: Graph, node: Node, weights: tuple[str, ...]) -> Product:
    def dims(names: tuple[str, ...]) -> frozenset[str]:
        return frozenset(dim for name in names for dim in graph.tensors[name].dim_names)

    x, w, y = dims(node.inputs[:1]), dims(weights), dims(node.outputs)
    return Product(node.name, (x & w) - y, (w & y) - x, x & w & y)


def covered(
    node: Node, products: Mapping[str, Product], parameters: Mapping[str, str]
) -> tuple[Product, tuple[Role, ...]] | None:
    """The product that a node computes, or a gradient of, with its operands; None for a node that is not covered.

    `products` are by weight, `parameters` by gradient.
    """
    if node.op not in (FORWARD if node.phase == "forward" else BACKWARD):
        return None
    n, weight = node.attrs.get("parts", 1), parameters.get(node.outputs[0])
    if node.phase == "forward":
        weight, operands = node.inputs[1], (Role(INPUT, ROW, range(1)), Role(WEIGHT, ROW, range(1, n + 1)))
    elif weight is not None:
        operands = (Role(INPUT, COLUMN, range(1)), Role(OUTPUT, COLUMN, range(1, n + 1)))
    else:
        weight, operands = (
            node.inputs[n],
            (Role(OUTPUT, ROW, range(n)), Role(WEIGHT, COLUMN, range(n, 2 * n))),
        )
    return (products[weight], operands) if weight in products else None


def count_products(graph: Graph, mesh: Mesh, sizes: Mapping[str, int]) -> int:
    """Products in 8 bits of a device's forward, one for each of its experts, with tokens or without."""
    found = 0
    for node in graph.nodes:
        weight = graph.tensors[node.inputs[1]] if node.op in FORWARD else None
        if weight is not None and weight.dtype == FP8:
            dims = zip(weight.dims, graph.layouts[weight.name].dims, strict=True)
            each = [
                evaluate(dim.size, sizes) // mesh.degree(atoms)
                for dim, atoms in dims
                if dim.name == "experts"
            ]
            found += prod(each)
    return found
