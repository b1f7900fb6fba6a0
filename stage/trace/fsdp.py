"""FSDP: what a block gathers and scatters. Every parameter is padded by rows to the shards (PyTorch FSDP2).

A block's parameters are one all-gather, and its gradients one reduce-scatter, for each set of axes that shards them
(experts have their own). Where only a part of data parallelism shards (HSDP), the shard is then all-reduced over the
rest.
"""

from collections.abc import Sequence

from stage.trace.parameters import Parameter
from stage.trace.plan import StepPlan, UnitPlan
from stage.trace.template import Ref, Template, TemplateNode

__all__ = ["gather_template", "padded", "parameter_groups", "scatter_template", "shard_elements"]


def parameter_groups(
    parameters: Sequence[Parameter], step: StepPlan
) -> list[tuple[str, tuple[str, ...], tuple[str, ...], list[Parameter]]]:
    """Parameters that are moved together: a suffix for names, the axes that shard, those that replicate, and they."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Parameter]] = {}
    for p in parameters:
        groups.setdefault((p.expert, p.data), []).append(p)
    found = []
    for (expert, data), group in sorted(groups.items(), key=lambda item: item[0]):
        shard, replicate = step.sharding.split(data)
        alone = sum(other == expert for other, _ in groups) == 1
        suffix = ("_expert" if expert else "") + ("" if alone else f"_{'_'.join(data)}")
        found.append((suffix, shard, replicate, group))
    return found


def padded(p: Parameter, step: StepPlan, axes: tuple[str, ...]) -> int:
    """Elements of one device's shard of a parameter."""
    return -(-p.rows // step.mesh.degree(axes)) * p.columns


def shard_elements(group: Sequence[Parameter], step: StepPlan, axes: tuple[str, ...]) -> int:
    """Elements of one device's shard of several parameters."""
    return sum(padded(p, step, axes) for p in group)


def _stored(group: Sequence[Parameter], step: StepPlan, axes: tuple[str, ...]) -> tuple[int, str]:
    """Elements of one device's shard of several parameters, and their dtype; bytes if they have several."""
    dtypes = {p.dtype for p in group}
    if len(dtypes) == 1:
        return shard_elements(group, step, axes), dtypes.pop()
    return sum(padded(p, step, axes) * step.widths[p.dtype] for p in group), "uint8"


def gather_template(unit: UnitPlan, step: StepPlan, phase: str) -> Template:
    """The all-gathers of all parameters a block reads, one after another; they wait for the port `free`.

    A backward gathers over the axes that parameters were sharded over since forward, from shards as much larger.
    """
    nodes: list[TemplateNode] = []
    mesh = step.mesh
    for suffix, shard, _, group in parameter_groups(unit.reads, step):
        axes = shard
        if phase == "backward" and step.reshard is not None:
            axes = tuple(axis for axis in shard if axis in step.reshard)
        if axes:
            count, dtype = _stored(group, step, shard)
            elements = count * (mesh.degree(shard) // mesh.degree(axes))
            name = f"parameters{suffix}.all_gather"
            after = (Ref("port", "free"), *([Ref("self", len(nodes) - 1)] if nodes else []))
            nodes.append(step.collective(name, "all_gather", elements, axes, after, phase, dtype))
    return Template(unit.kind, phase, step.chain(nodes), numbers=unit.templates.forward.numbers)


def scatter_template(unit: UnitPlan, step: StepPlan) -> Template:
    """The reduce-scatters of the gradients a block owns, and their sums over replicas; after the port `grad`."""
    nodes: list[TemplateNode] = []
    for suffix, shard, replicate, group in parameter_groups(unit.parameters, step):
        elements = shard_elements(group, step, shard)
        after: tuple[Ref, ...] = (Ref("port", "grad"),)
        if shard:
            whole, name = elements * step.mesh.degree(shard), f"gradients{suffix}.reduce_scatter"
            nodes.append(step.collective(name, "reduce_scatter", whole, shard, after, "backward"))
            after = (Ref("self", len(nodes) - 1),)
        if replicate:
            name = f"gradients{suffix}.all_reduce"
            nodes.append(step.collective(name, "all_reduce", elements, replicate, after, "backward"))
    return Template(unit.kind, "backward", step.chain(nodes), numbers=unit.templates.forward.numbers)
