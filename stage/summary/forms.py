"""Closed forms of a model under a strategy: what one device computes, moves and sends, in sizes and degrees.

They are the cost formulas of the ops applied to the sizes that one device holds, on the sharded graph of each kind of
block. `batch` is the sequences of one micro-batch over all ranks. Each expression stands with its value, which is what
the nodes of a synthesized trace have.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from stage.block_graphs import differentiated_block, finished_block, symbol_values
from stage.graph import Graph, Node
from stage.model import Block
from stage.ops import get_op
from stage.ops.collective import COLLECTIVES
from stage.ops.ring import EXCHANGE
from stage.passes.backward import Differentiated
from stage.passes.shard import rest_layout
from stage.pipeline.stages import cut
from stage.request import Request
from stage.summary.activations import saved_activations
from stage.summary.gradients import data_parallel, stored_parameters
from stage.summary.symbolic import Local, tidy
from stage.symbols import dtype_bytes
from stage.tensor import Size, Tensor, resolve_dtypes

__all__ = ["block_forms", "closed_forms"]

Entry = dict[str, Any]

SENDING = (*COLLECTIVES, EXCHANGE)
"""Ops that move data between devices; all others are kernels."""


@dataclass(frozen=True)
class _Pricing:
    """How an op of a sharded graph is priced: local sizes in symbols, and what the dtypes are."""

    local: Local
    dtypes: Mapping[str, str]

    def width(self, dtype: str) -> int:
        return dtype_bytes(resolve_dtypes(dtype, self.dtypes))

    def tensors(self, graph: Graph, names: tuple[str, ...]) -> list[Tensor]:
        return [self.local.tensor(graph.tensors[name], graph.layouts[name]) for name in names]

    def op(self, graph: Graph, node: Node) -> dict[str, Any]:
        """Work and traffic of one kernel."""
        op = get_op(node.op)
        ins, outs = self.tensors(graph, node.inputs), self.tensors(graph, node.outputs)
        flops, moved = (
            tidy(op.flops(node.attrs, ins, outs)),
            tidy(op.bytes(node.attrs, ins, outs, self.width)),
        )
        return {
            "name": node.name,
            "op": node.op,
            "phase": node.phase,
            "matmul": op.is_matmul,
            "flops": str(flops),
            "bytes": str(moved),
            "flops_value": max(1, self.local.value(flops)),
            "bytes_value": max(1, self.local.value(moved)),
        }

    def sent(self, graph: Graph, node: Node) -> Size:
        """Bytes that one device hands to a collective, or sends in a message."""
        tensors = self.tensors(graph, node.inputs)
        return tidy(sum((t.bytes(self.width) for t in tensors), start=sympy.Integer(0)))

    def communication(self, graph: Graph) -> list[dict[str, Any]]:
        """The collectives and messages of a graph, those alike in one entry."""
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for node in graph.nodes:
            if node.op not in SENDING:
                continue
            along = node.attrs["axes"] if node.op == EXCHANGE else node.attrs["step"].axes
            axes, size = " x ".join(self.local.words(along)), self.sent(graph, node)
            kind = "send" if node.op == EXCHANGE else node.op
            fresh = {"phase": node.phase, "kind": kind, "axes": axes, "count": 0, "bytes": str(size)}
            fresh |= {"bytes_value": self.local.value(size), "nodes": []}
            entry = found.setdefault((node.phase, kind, axes, str(size)), fresh)
            entry["count"] += 1
            entry["nodes"].append(f"{node.name}.send" if kind == "send" else node.name)
        return list(found.values())

    def phase(self, graph: Graph) -> dict[str, Any]:
        """The kernels of a graph, the sum of its matrix multiplications, and its collectives."""
        kernels = [n for n in graph.nodes if get_op(n.op).kernel and n.op not in SENDING]
        ops = [self.op(graph, node) for node in kernels]
        return {
            "matmul_flops": str(self._total(graph, kernels)),
            "matmul_flops_value": sum(op["flops_value"] for op in ops if op["matmul"]),
            "ops": ops,
            "communication": self.communication(graph),
        }

    def _total(self, graph: Graph, nodes: list[Node]) -> Size:
        total = sympy.Integer(0)
        for node in nodes:
            op = get_op(node.op)
            if op.is_matmul:
                total += op.flops(
                    node.attrs, self.tensors(graph, node.inputs), self.tensors(graph, node.outputs)
                )
        return tidy(total)


def pricing(request: Request) -> _Pricing:
    """How the ops of a request's sharded graphs are priced."""
    x = request.model.graph(request.model.layers[0]).tensors["x"]
    values = symbol_values(request)
    rest = rest_layout(x, request.table, request.mesh, values)
    local = Local(request.mesh, values, tuple(atom for axes in rest.dims for atom in axes))
    return _Pricing(local, {"compute": request.dtype, "gradient": request.grad_dtype})


def block_forms(
    request: Request, block: Block, both: Differentiated, price: _Pricing, skip: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], Size]:
    """The closed forms of one kind of block, and the expression of its parameters on one device.

    Parameters to `skip` are those that a block before it has brought to the same device (a tied token table).
    """
    parameters = stored_parameters(request, both.forward, price.local, skip)
    entry = {
        "kind": block.kind,
        "parameters": str(tidy(parameters)),
        "parameters_value": price.local.value(parameters),
        "forward": price.phase(both.forward),
        "backward": price.phase(both.backward),
        "saved": saved_activations(both, price.local, price.width),
        "data_parallel": data_parallel(request, block, both.forward, price.local, skip),
    }
    return entry, parameters


def closed_forms(request: Request) -> dict[str, Any]:
    """The closed forms of each kind of block, of the whole model's parameters, and of a message between stages.

    `degrees` are those of the request; `parts` are parts of axes that expressions name (`tp_kv`, `dp_shard`).
    """
    price = pricing(request)
    counts = _counts(request)
    blocks, parameters, seen = [], sympy.Integer(0), frozenset[str]()
    for (block, again), count in counts.items():
        both = finished_block(request, differentiated_block(request, block), again=again)
        entry, own = block_forms(request, block, both, price, seen)
        entry["count"] = count
        if again and (block, False) in counts:
            entry["kind"] += " (recomputed)"
        blocks.append(entry)
        parameters += entry["count"] * own
        if request.degrees["pp"] == 1:
            seen |= {t.name for t in both.forward.parameters if t.shared}
    x = request.model.graph(request.model.layers[0]).tensors["x"]
    rest = rest_layout(x, request.table, request.mesh, price.local.values)
    message = tidy(price.local.tensor(x, rest).elements * price.width(x.dtype))
    return {
        "strategy": request.strategy.name,
        "degrees": {axis: degree for axis, degree in request.degrees.items() if degree > 1},
        "parts": {word: n for word, n in price.local.used().items() if word not in request.degrees},
        "batch": request.sizes["batch"],
        "seq": request.seq,
        "vocab": request.sizes["vocab"],
        "parameters": str(tidy(parameters)),
        "parameters_value": price.local.value(parameters),
        "flops": _by_phase(
            blocks, lambda phase: [{key: phase[f"matmul_{key}"] for key in ("flops", "flops_value")}]
        ),
        "communication": _by_phase(blocks, lambda phase: phase["communication"]),
        "blocks": blocks,
        "message": {"bytes": str(message), "bytes_value": price.local.value(message)},
    }


def _counts(request: Request) -> Counter[tuple[Block, bool]]:
    """How many blocks there are of each kind, which are two kinds where some are recomputed and some not."""
    model, policy = request.model, request.strategy.recompute
    if policy.every == 1:
        return Counter((block, block in model.layers) for block in model.blocks)
    stages = cut(model, request.pipeline, request.stage_layers, policy)
    return Counter(unit.kind for units in stages for unit in units)


def _by_phase(blocks: list[Entry], entries: Callable[[Entry], list[Entry]]) -> list[Entry]:
    """What every block has in both phases, one after another."""
    return [
        {
            "block": block["kind"],
            "phase": phase,
            **{key: value for key, value in entry.items() if key != "nodes"},
        }
        for phase in ("forward", "backward")
        for block in blocks
        for entry in entries(block[phase])
    ]
