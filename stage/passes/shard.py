"""Shard a graph: give every tensor a layout and insert the reshards between ops that disagree.

The strategy's table maps dims to mesh axes in order of priority. For one op, going down the table, each dim that the
op has (as a factor) takes those of its axes that are still free. Operands are resharded to what the op asks for; what
the op leaves pending is resharded at its consumers. Column- and row-parallel layers, sequence parallelism, the
vocabulary-parallel head, expert dispatch and context parallelism are all this one rule applied to a table.

On an axis that an op does not use at all its operands are invariant (one computation repeated); if the op uses
another part of the same axis they are replicated, for then each device does its own share of one operation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stage.errors import LayoutError
from stage.graph import Graph, Node
from stage.layout import Layout
from stage.mesh import Mesh
from stage.ops import Factor, Factors, get_op
from stage.reshard import Step, plan_reshard
from stage.symbols import evaluate
from stage.tensor import Tensor

__all__ = ["Table", "axes_of", "rest_layout", "shard"]

Table = Sequence[tuple[str, Sequence[str]]]
"""dim -> axes, in order of priority."""

UNORDERED = frozenset({"slots", "sources"})
"""Dims whose elements are in no particular order, and which need not divide evenly."""

REPLICABLE = frozenset({"kv_heads"})
"""Dims that are replicated over the part of an axis that exceeds them."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Axes (as atoms of the mesh) of each factor of an op, those it holds invariant, and the names of the table."""

    axes: Mapping[str, tuple[str, ...]]
    invariant: frozenset[str]
    rows: Mapping[str, tuple[str, ...]]

    def of(self, factor: Factor) -> tuple[str, ...]:
        if factor is None:
            return ()
        if isinstance(factor, tuple):
            return tuple(atom for part in factor for atom in self.axes.get(part, ()))
        return self.axes.get(factor, ())

    def describe(self, dim: str, mesh: Mesh) -> str:
        """The axes of a dim as the table names them, where they are whole."""
        atoms = self.axes[dim]
        row = [axis for axis in self.rows[dim] if mesh.degree(axis) > 1]
        return " x ".join(row) if mesh.expand(row) == atoms else mesh.describe(atoms)


@lru_cache(maxsize=4096)
def _assign(
    names: frozenset[str], held: frozenset[str], table: tuple[tuple[str, tuple[str, ...]], ...], mesh: Mesh
) -> Assignment:
    taken: set[str] = set()
    used: set[str] = set()
    axes: dict[str, tuple[str, ...]] = {}
    for dim, wanted in table:
        if dim not in names and dim not in held:
            continue
        free = tuple(atom for atom in mesh.expand(wanted) if atom not in taken)
        taken.update(free)
        if dim in names:
            axes[dim] = free
            used.update(free)
    busy = {sibling for atom in used for sibling in mesh.siblings(atom)}
    return Assignment(axes, frozenset(atom for atom, _ in mesh.atoms if atom not in busy), dict(table))


def _within(
    table: tuple[tuple[str, tuple[str, ...]], ...], name: str
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The table as an op of this name sees it: a row `scope.dim` stands for `dim` within that scope, and only there."""
    if not any("." in row for row, _ in table):
        return table
    scopes, found = name.split("."), dict[str, tuple[str, ...]]()
    for row, axes in table:
        scope, dot, dim = row.rpartition(".")
        if not dot or scope in scopes:
            found.setdefault(dim, axes)
    return tuple(found.items())


def freeze_table(table: Table) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((dim, tuple(axes)) for dim, axes in table)


def axes_of(dims: Iterable[str], table: Table, mesh: Mesh) -> Mapping[str, tuple[str, ...]]:
    """The axes (as atoms of the mesh) that each dim of an op with these dims takes; none for those not named."""
    return _assign(frozenset(dims), frozenset(), freeze_table(table), mesh).axes


def rest_layout(tensor: Tensor, table: Table, mesh: Mesh, sizes: Mapping[str, int]) -> Layout:
    """Where a tensor lives between blocks: the table applied to its own dims."""
    assignment = _assign(frozenset(tensor.dim_names), frozenset(), freeze_table(table), mesh)
    return _operand_layout(tensor, tensor.dim_names, assignment, mesh, sizes)


def _fit(
    tensor: Tensor, index: int, factor: Factor, assignment: Assignment, mesh: Mesh, sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The atoms that shard a dim: all of them, or for KV heads the leading ones that divide it."""
    dim, atoms = tensor.dims[index], assignment.of(factor)
    if not atoms or dim.name in UNORDERED:
        return atoms
    value = evaluate(dim.size, sizes)
    degree = mesh.degree(atoms)
    if value % degree == 0:
        return atoms
    if dim.name in REPLICABLE:
        while value % mesh.degree(atoms):
            atoms = atoms[:-1]
        return atoms
    text = assignment.describe(factor, mesh) if isinstance(factor, str) else mesh.describe(atoms)
    raise LayoutError(
        f"{dim.name} = {value} of {tensor.name} does not divide by {text} = {degree}; "
        f"choose a degree that divides it, or another {dim.name}"
    )


def _operand_layout(
    tensor: Tensor, factors: Sequence[Factor], assignment: Assignment, mesh: Mesh, sizes: Mapping[str, int]
) -> Layout:
    dims = tuple(_fit(tensor, i, f, assignment, mesh, sizes) for i, f in enumerate(factors))
    return Layout(dims, invariant=assignment.invariant)


def _result_layout(
    tensor: Tensor,
    factors: Sequence[Factor],
    pending: frozenset[str],
    reduction: str,
    assignment: Assignment,
    mesh: Mesh,
    sizes: Mapping[str, int],
) -> Layout:
    layout = _operand_layout(tensor, factors, assignment, mesh, sizes)
    if not pending:
        return layout
    return Layout(layout.dims, pending, layout.invariant - pending, reduction)


def _reduced(factors: Factors, index: int, assignment: Assignment) -> frozenset[str]:
    """Atoms of factors that operands have and this result has not."""
    flat = {
        part for names in factors.operands for f in names if f for part in ((f,) if isinstance(f, str) else f)
    }
    kept = {part for f in factors.results[index] if f for part in ((f,) if isinstance(f, str) else f)}
    return frozenset(atom for factor in flat - kept for atom in assignment.axes.get(factor, ()))


class _Sharder:
    """The state of one pass over one graph."""

    def __init__(self, graph: Graph, table: Table, mesh: Mesh, sizes: Mapping[str, int]) -> None:
        self.graph, self.mesh, self.sizes = graph, mesh, sizes
        self.table = freeze_table(table)
        self.tensors = dict(graph.tensors)
        self.layouts: dict[str, Layout] = {}
        self.nodes: list[Node] = []
        self.placed: dict[tuple[str, Layout], str] = {}
        self.homes: dict[str, Layout] = {}
        self.wants = {node.name: self._wanted(node) for node in graph.nodes}
        self.consumers = graph.consumers()

    def _wanted(self, node: Node) -> tuple[Factors, Assignment, list[Layout]]:
        """What an op asks of each operand."""
        operands = self.graph.operands(node)
        factors = get_op(node.op).factors(node.attrs, operands, self.graph.results(node))
        parts = [f for names in (*factors.operands, *factors.results) for f in names if f]
        flat = {part for f in parts for part in ((f,) if isinstance(f, str) else f)}
        chosen = frozenset(flat - factors.fixed | factors.around)
        table = _within(self.table, node.name)
        assignment, plain = (_assign(chosen, factors.held, t, self.mesh) for t in (table, self.table))
        layouts = [
            _operand_layout(t, names, assignment, self.mesh, self.sizes)
            for t, names in zip(operands, factors.operands, strict=True)
        ]
        for tensor, names in zip(operands, factors.operands, strict=True):
            if tensor.role == "parameter":
                home = _operand_layout(tensor, names, plain, self.mesh, self.sizes)
                self.homes.setdefault(tensor.name, home)
        return factors, assignment, layouts

    def run(self) -> Graph:
        for name in self.graph.inputs:
            if self.tensors[name].role != "index":
                self.layouts[name] = rest_layout(self.tensors[name], self.table, self.mesh, self.sizes)
        for node in self.graph.nodes:
            self._place(node)
        outputs = tuple(self._at_rest(name) if self._passed_on(name) else name for name in self.graph.outputs)
        return Graph(
            self.graph.name, self.tensors, tuple(self.nodes), self.graph.inputs, outputs, self.layouts
        ).check()

    def _place(self, node: Node) -> None:
        factors, assignment, wanted = self.wants[node.name]
        inputs = tuple(self._reshard(name, layout) for name, layout in zip(node.inputs, wanted, strict=True))
        op = get_op(node.op)
        for i, tensor in enumerate(self.graph.results(node)):
            pending = _reduced(factors, i, assignment)
            self.layouts[tensor.name] = _result_layout(
                tensor, factors.results[i], pending, op.reduction, assignment, self.mesh, self.sizes
            )
        self.nodes.append(Node(node.op, node.name, inputs, node.outputs, node.attrs, node.phase))
        for name in node.outputs:
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Reduce what an op left pending at once, where an op of this block reads it."""
        if self.layouts[name].pending and name in self.consumers:
            reader = self.consumers[name][0]
            wanted = self.wants[reader.name][2][reader.inputs.index(name)]
            self._move(name, self._resolved(name, wanted))

    def _reshard(self, name: str, wanted: Layout) -> str:
        # parameters and tokens are put where their first reader wants them, but not by the rows of a scope
        have = self.layouts.setdefault(name, self.homes.get(name, wanted))
        if have == wanted:
            return name
        if have.pending:
            return self._move(self._move(name, self._resolved(name, wanted)), wanted)
        return self._move(name, wanted)

    def _resolved(self, name: str, wanted: Layout) -> Layout:
        """Where a pending tensor is reduced to, once for all who read it.

        What they all ask for, up to invariant becoming replicated, which is free; else where it rests.
        """
        asked = {
            self.wants[node.name][2][i]
            for node in self.consumers.get(name, ())
            for i, operand in enumerate(node.inputs)
            if operand == name
        }
        most = max(asked | {wanted}, key=lambda layout: len(layout.invariant))
        agreed = all(layout.dims == most.dims and layout.invariant <= most.invariant for layout in asked)
        if agreed and name not in self.graph.outputs:
            return most
        return rest_layout(self.tensors[name], self.table, self.mesh, self.sizes)

    def _passed_on(self, name: str) -> bool:
        """Whether the next block reads this output; a loss ends the program and stays where it was made."""
        return self.tensors[name].dtype == "compute" or bool(self.layouts[name].pending)

    def _at_rest(self, name: str) -> str:
        return self._move(name, rest_layout(self.tensors[name], self.table, self.mesh, self.sizes))

    def _move(self, name: str, wanted: Layout) -> str:
        if self.layouts[name] == wanted:
            return name
        if (name, wanted) not in self.placed:
            tensor = self.tensors[name]
            unordered = frozenset(i for i, dim in enumerate(tensor.dims) if dim.name in UNORDERED)
            current = name
            for step in plan_reshard(self.layouts[name], wanted, self.mesh, unordered=unordered):
                current = self._step(name, current, step, unordered)
            self.layouts[current] = wanted if unordered else self.layouts[current]
            assert self.layouts[current] == wanted, f"{name}: {self.layouts[current]} is not {wanted}"
            self.placed[name, wanted] = current
        return self.placed[name, wanted]

    def _step(self, origin: str, current: str, step: Step, unordered: frozenset[int]) -> str:
        base = f"{origin}.{step.kind}"
        fresh, i = base, 1
        while fresh in self.tensors:
            i += 1
            fresh = f"{base}.{i}"
        self.tensors[fresh] = self.tensors[origin].named(fresh, role=self._role(origin))
        self.layouts[fresh] = step.apply(self.layouts[current], unordered=unordered)
        self.nodes.append(Node(step.kind, fresh, (current,), (fresh,), {"step": step}))
        return fresh

    def _role(self, name: str) -> str:
        role = self.tensors[name].role
        return "activation" if role == "parameter" else role


def shard(graph: Graph, table: Table, mesh: Mesh, sizes: Mapping[str, int]) -> Graph:
    """The graph with a layout for every tensor and the reshards that these need.

    `sizes` are the model's concrete sizes (with the global `batch` and `seq` of one micro-batch), for which every
    shard must divide; a `LayoutError` names dim, size, axis and degree if one does not.
    """
    return _Sharder(graph, table, mesh, sizes).run()
