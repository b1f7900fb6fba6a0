"""A graph as short text, for golden tests and for people."""

from stage.graph.graph import Graph, Node
from stage.layout import Layout
from stage.tensor import Tensor

__all__ = ["format_graph"]


def format_layout(tensor: Tensor, layout: Layout | None) -> str:
    """`[batch/dp, seq/cp.tp, d_model] +tp`: axes after a slash, pending after a plus, invariant after a bang."""
    if layout is None:
        return f"[{', '.join(tensor.dim_names)}]"
    dims = [
        name + ("/" + ".".join(axes) if axes else "")
        for name, axes in zip(tensor.dim_names, layout.dims, strict=True)
    ]
    text = f"[{', '.join(dims)}]"
    if layout.pending:
        text += " +" + ".".join(sorted(layout.pending))
    if layout.invariant:
        text += " !" + ".".join(sorted(layout.invariant))
    return text


def _format_node(graph: Graph, node: Node) -> str:
    outs = ", ".join(f"{t.name}{format_layout(t, graph.layouts.get(t.name))}" for t in graph.results(node))
    step = node.attrs.get("step")
    detail = f"<{'.'.join(step.axes)}>" if step is not None else ""
    mark = "" if node.phase == "forward" else f"  # {node.phase}"
    return f"  {outs} = {node.op}{detail}({', '.join(node.inputs)}){mark}"


def format_graph(graph: Graph) -> str:
    """One line for each input, parameter, node and result."""
    given = [("in", graph.tensors[name]) for name in graph.inputs] + [
        ("parameter", t) for t in graph.parameters
    ]
    lines = [f"graph {graph.name}"]
    lines += [f"  {kind} {t.name}{format_layout(t, graph.layouts.get(t.name))}" for kind, t in given]
    lines += [_format_node(graph, node) for node in graph.nodes]
    lines.append(f"  return {', '.join(graph.outputs)}")
    return "\n".join(lines)
