"""Ring attention: keys and values go round the ranks that share the sequence while each works on the block it has.

Liu et al. 2023, arXiv:2310.01889. Forward, n ranks pass their block on n - 1 times and merge the results of blocks.
Backward, the blocks go round again, each with the gradient of what was passed on, in fp32, which needs one more turn to
come home (as in PyTorch and Megatron-LM). A turn is started before the work on the block at hand and ended before that
on the next one, so they overlap.

Before sharding `circulate` says of attention that it works on shards of keys (`ring`), which is all that layouts and
differentiation must know. After it `expand_ring` writes out the steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stage.errors import LayoutError
from stage.graph import Graph, Node
from stage.layout import Layout
from stage.mesh import Mesh
from stage.ops.masks import Block, met_keys
from stage.ops.ring import EXCHANGE
from stage.passes.backward import Differentiated
from stage.symbols import evaluate
from stage.tensor import Tensor

__all__ = ["circulate", "expand_ring"]

RUNNING = "fp32"
"""The dtype of sums that are not complete: of outputs and of gradients."""


def circulate(graph: Graph) -> Graph:
    """The graph whose attention works on shards of keys."""
    return graph.with_nodes(
        tuple(replace(n, attrs={**n.attrs, "ring": True}) if n.op == "attention" else n for n in graph.nodes)
    )


def expand_ring(
    block: Differentiated, mesh: Mesh, sizes: Mapping[str, int], *, consecutive: bool = False
) -> Differentiated:
    """The block with the steps of each such attention written out; `sizes` are the concrete ones.

    Ranks have `consecutive` parts of the sequence, or parts in a zig-zag (`stage.ops.masks.Block`).

    A LayoutError for a sequence that can not be cut into the chunks of a zig-zag.
    """
    graphs = {}
    for graph in (block.forward, block.backward):
        ring = _Ring(graph, mesh, sizes, consecutive)
        for node in graph.nodes:
            ring.write(node)
        graphs[graph.name] = ring.graph()
    return replace(block, forward=graphs[block.forward.name], backward=graphs[block.backward.name])


@dataclass
class _Ring:
    """One graph while its rings are written out."""

    source: Graph
    mesh: Mesh
    sizes: Mapping[str, int]
    consecutive: bool
    tensors: dict[str, Tensor] = field(init=False)
    layouts: dict[str, Layout] = field(init=False)
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors, self.layouts = dict(self.source.tensors), dict(self.source.layouts)

    def graph(self) -> Graph:
        """The graph with what has been written."""
        return replace(
            self.source, tensors=self.tensors, layouts=self.layouts, nodes=tuple(self.nodes)
        ).check()

    def write(self, node: Node) -> None:
        """A node, or the steps that it stands for."""
        axes = self._axes(node) if node.attrs.get("ring") else ()
        if not axes:
            self.nodes.append(node)
        elif node.op == "attention":
            self._forward(node, axes)
        else:
            self._backward(node, axes)

    def _axes(self, node: Node) -> tuple[str, ...]:
        """The axes that shard the sequence of an attention."""
        query = node.inputs[0]
        return self.layouts[query].dims[self.tensors[query].dim_names.index("seq")]

    def _forward(self, node: Node, axes: tuple[str, ...]) -> None:
        """Each block's attention, merged with what came before; a sink takes part in the first alone."""
        (q, *keys), sinks = node.inputs[:3], node.inputs[3:]
        start, done = len(self.nodes), list[str]()
        for step, attrs in enumerate(self._steps(node, axes)):
            held = keys
            if step + 1 < self.mesh.degree(axes):
                keys = self._pass_on(node, f"kv{step + 1}", keys, axes)
            if attrs is None:
                continue
            operands = (q, *held, *(sinks if step == 0 else ()))
            made = self._add(node, "attention", f"step{step}", operands, node.outputs, attrs=attrs)
            if done:
                merge = f"merge{step}"
                made = self._add(node, "attention_merge", merge, (*done, *made), node.outputs, RUNNING)
            done = made
        self._settle(start, done, node.outputs)

    def _backward(self, node: Node, axes: tuple[str, ...]) -> None:
        """Each block's gradients; those of keys and values travel with them and come home in the end."""
        (do, q, *keys), sinks, saved = node.inputs[:4], node.inputs[4:-2], node.inputs[-2:]
        start, sums, single = len(self.nodes), list[str](), list[str]()
        for step, attrs in enumerate(self._steps(node, axes)):
            held = keys
            if step + 1 < self.mesh.degree(axes):
                keys = self._pass_on(node, f"kv{step + 1}", keys, axes)
            if attrs is not None and step == 0:
                operands = (do, q, *held, *sinks, *saved)
                made = self._add(node, node.op, "step0", operands, node.outputs, RUNNING, attrs)
                sums, single = made[:3], made[3:]
            elif attrs is not None:
                made = self._add(
                    node, node.op, f"step{step}", (do, q, *held, *saved), node.outputs[:3], attrs=attrs
                )
                pairs = zip("qkv", sums, made, strict=True)
                sums = [
                    self._add(node, "add", f"d{x}_sum{step}", pair, pair[:1], RUNNING)[0]
                    for x, *pair in pairs
                ]
            sums[1:] = self._pass_on(node, f"dkv{step + 1}", sums[1:], axes)
        for i, x in enumerate("kv", 1):
            sums[i : i + 1] = self._add(node, "cast", f"d{x}_cast", sums[i : i + 1], node.outputs[i : i + 1])
        self._settle(start, [*sums, *single], node.outputs)

    def _steps(self, node: Node, axes: tuple[str, ...]) -> list[dict[str, Any] | None]:
        """The attributes of each step's attention; None where no rank meets a key of its block."""
        mask, window = node.attrs["mask"], node.attrs.get("window")
        ranks = self.mesh.degree(axes)
        key = self.tensors[node.inputs[1]]
        whole = evaluate(key.size("seq"), self.sizes)
        if mask == "causal" and whole % (2 * ranks) and not self.consecutive:
            raise LayoutError(
                f"seq = {whole} does not divide by 2 x ring = {2 * ranks}, the chunks of a zig-zag; choose a seq that "
                "does, or context all_gather"
            )
        known = {"mask": mask, "window": None if window is None else evaluate(window, self.sizes)}
        blocks = [{"block": Block(step, ranks, self.consecutive)} for step in range(ranks)]
        return [{**node.attrs, **own} if met_keys(whole // ranks, known | own) else None for own in blocks]

    def _pass_on(self, node: Node, name: str, tensors: Sequence[str], axes: tuple[str, ...]) -> list[str]:
        """What the rank before holds of these tensors."""
        return self._add(node, EXCHANGE, name, tensors, tensors, attrs={"axes": axes})

    def _add(
        self,
        node: Node,
        op: str,
        name: str,
        operands: Sequence[str],
        like: Sequence[str],
        dtype: str | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The results of one more op of the ring that `node` stands for, which lie as the tensors `like`."""
        full = f"{node.name}.{name}"
        made = [full, *(f"{full}:{i}" for i in range(1, len(like)))]
        for fresh, old in zip(made, like, strict=True):
            tensor = self.tensors[old]
            self.tensors[fresh] = tensor.named(fresh, dtype=dtype or tensor.dtype)
            self.layouts[fresh] = self.layouts[old]
        self.nodes.append(Node(op, full, tuple(operands), tuple(made), attrs or {}, node.phase))
        return made

    def _settle(self, start: int, made: Sequence[str], wanted: Sequence[str]) -> None:
        """Call results, in the nodes from `start` on, what they are called outside."""
        names = dict(zip(made, wanted, strict=True))
        for name in made:
            del self.tensors[name], self.layouts[name]
        self.nodes[start:] = [
            replace(
                n,
                inputs=tuple(names.get(x, x) for x in n.inputs),
                outputs=tuple(names.get(x, x) for x in n.outputs),
            )
            for n in self.nodes[start:]
        ]
