"""Data-parallel work of a stage: gathering parameters, reducing gradients, the optimizer.

ZeRO 0 all-reduces each bucket; ZeRO 1 and 2 reduce-scatter it, update the shard and gather the parameters after the
step (Rajbhandari et al. 2020; Megatron-LM's distributed optimizer). ZeRO 3 is FSDP: each block gathers its parameters
before its forward and again before its backward, one block ahead of the compute, and reduce-scatters its gradient,
every parameter padded by rows (PyTorch FSDP2). Where only a part of data parallelism shards (HSDP), the shard is then
all-reduced over the rest.

The step ends in the order of Megatron-LM's `finalize_model_grads`: data-parallel sums, sums over tp of what is
replicated there, the tied embedding, the gradient norm, the update, the gathers.
"""

from dataclasses import dataclass, field

from stage.trace.buckets import Bucket
from stage.trace.groups import PIPELINE_ENDS
from stage.trace.parameters import Parameter
from stage.trace.plan import StagePlan, StepPlan, UnitPlan
from stage.trace.program import Assembly
from stage.trace.template import Ref, Template, TemplateNode, chain

__all__ = ["DataParallel"]

ADAM_FLOPS = 14
"""Operations an element: two moments, their bias corrections, root, division, weight decay, update."""


@dataclass(slots=True)
class DataParallel:
    """What one stage does for data parallelism, placed into its program as it goes."""

    plan: StagePlan
    step: StepPlan
    assembly: Assembly
    gathers: dict[tuple[str, int, str], Template | None] = field(default_factory=dict)
    scatters: dict[tuple[str, int], Template | None] = field(default_factory=dict)
    synced: set[int] = field(default_factory=set)
    final: dict[str, Template] = field(default_factory=dict)
    updated: int = -1

    @property
    def _sharded(self) -> bool:
        return self.step.sharding.zero == 3

    # ---- parameters -------------------------------------------------------------------------------------------

    def gather(self, unit: int, micro_batch: int, phase: str) -> int:
        """The node that gathers a block's parameters; -1 where they are whole, or there is no such block.

        Parameters that ZeRO 1 and 2 gathered at the end of a step are waited for by the first forward of the next.
        """
        if not 0 <= unit < len(self.plan.units):
            return -1
        if not self._sharded:
            return self.updated if phase == "forward" and micro_batch == 0 else -1
        plan = self.plan.units[unit]
        if plan.head and phase == "backward":
            return -1
        key = (plan.kind, 0 if plan.layer >= 0 else unit, phase)
        if key not in self.gathers:
            self.gathers[key] = self._gather_template(plan, phase)
        template = self.gathers[key]
        if template is None:
            return -1
        limit = self.assembly.last("compute")
        placed = self.assembly.place(template, layer=plan.layer, micro_batch=micro_batch, free=limit)
        return placed.base + len(template.nodes) - 1

    def _gather_template(self, unit: UnitPlan, phase: str) -> Template | None:
        width = self.step.widths["compute"]
        nodes = [
            TemplateNode(
                f"parameters{suffix}.all_gather", "all_gather", "all_gather", _shard_elements(group, self.step, axes) * width,
                axes=axes, deps=(Ref("port", "free"),), dtype=self.step.dtype, phase=phase,
            )
            for suffix, axes, group in _by_axes(unit.reads, self.step)
            if axes
        ]
        return Template(unit.kind, phase, chain(nodes), numbers=unit.forward.numbers) if nodes else None

    # ---- gradients --------------------------------------------------------------------------------------------

    def complete(self, unit: int, micro_batch: int) -> None:
        """Called after a block's backward: reduce what is complete now."""
        last = micro_batch == self.step.micro_batches - 1
        if not (last or self.step.per_micro_batch):
            return
        ready = self.assembly.last("compute")
        if self._sharded:
            self._scatter(unit, micro_batch, ready)
            return
        for i, bucket in enumerate(self.plan.buckets):
            if bucket.unit == unit and (self.step.overlap or self.step.per_micro_batch):
                self._reduce(i, bucket, micro_batch, ready)

    def _scatter(self, unit: int, micro_batch: int, ready: int) -> None:
        plan = self.plan.units[unit]
        key = (plan.kind, 0 if plan.layer >= 0 else unit)
        if key not in self.scatters:
            self.scatters[key] = self._scatter_template(plan)
        template = self.scatters[key]
        if template is not None:
            self.assembly.place(template, layer=plan.layer, micro_batch=micro_batch, grad=ready)

    def _scatter_template(self, unit: UnitPlan) -> Template | None:
        nodes: list[TemplateNode] = []
        for suffix, axes, group in _by_axes(unit.parameters, self.step):
            shard = _shard_elements(group, self.step, axes)
            whole = shard * self.step.mesh.degree(axes)
            _, replicate = self.step.sharding.split(group[0].data)
            deps = (Ref("port", "grad"),)
            if axes:
                nodes.append(self._comm(f"gradients{suffix}.reduce_scatter", "reduce_scatter", whole, axes, deps, "backward"))
                deps = (Ref("self", len(nodes) - 1),)
            if replicate:
                nodes.append(self._comm(f"gradients{suffix}.all_reduce", "all_reduce", shard, replicate, deps, "backward"))
        return Template(unit.kind, "backward", chain(nodes), numbers=unit.forward.numbers) if nodes else None

    def _comm(
        self, name: str, kind: str, elements: int, axes: tuple[str, ...], deps: tuple[Ref, ...], phase: str
    ) -> TemplateNode:
        size = elements * self.step.widths["gradient"]
        return TemplateNode(name, kind, kind, size, axes=axes, deps=deps, dtype=self.step.grad_dtype, phase=phase)

    def _reduce(self, index: int, bucket: Bucket, micro_batch: int, ready: int) -> None:
        key = f"reduce{index}.{micro_batch >= 0}"
        if key not in self.final:
            phase = "backward" if micro_batch >= 0 else "finalize"
            nodes: list[TemplateNode] = []
            deps = (Ref("port", "grad"),)
            if bucket.shard:
                nodes.append(self._comm("reduce_scatter", "reduce_scatter", bucket.elements, bucket.shard, deps, phase))
                deps = (Ref("self", 0),)
            if bucket.replicate:
                nodes.append(self._comm("all_reduce", "all_reduce", bucket.owned(self.step.mesh), bucket.replicate, deps, phase))
            self.final[key] = Template(_bucket_name(index, bucket), phase, chain(nodes), numbers=())
        template = self.final[key]
        if template.nodes:
            self.assembly.place(template, grad=ready)
        if not self.step.per_micro_batch or micro_batch == self.step.micro_batches - 1:
            self.synced.add(index)

    # ---- the end of a step ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything after the last backward of a step."""
        ready = self.assembly.last("compute")
        if not self._sharded:
            for i, bucket in enumerate(self.plan.buckets):
                if i not in self.synced:
                    self._reduce(i, bucket, -1, ready)
            self.synced.clear()
        if "finish" not in self.final:
            self.final["finish"] = Template("optimizer", "optimizer", chain(self._finish_nodes()), numbers=())
        if self.final["finish"].nodes:
            self.assembly.place(self.final["finish"], grad=ready, synced=self.assembly.last("comm"))
        if self.step.sharding.zero:
            self.updated = self.assembly.last("comm")

    def _finish_nodes(self) -> list[TemplateNode]:
        nodes = self._model_sums()
        deps = (Ref("port", "grad"), Ref("port", "synced"))
        own = self._owned()
        if self.step.clip:
            after = (*deps, *([Ref("self", len(nodes) - 1)] if nodes else []))
            grad = sum(n for _, n in own)
            nodes.append(self._compute("gradient_norm", 2 * grad, grad * self.step.widths["gradient"], after))
            for axes in self._norm_axes():
                at = (Ref("self", len(nodes) - 1),)
                nodes.append(TemplateNode("gradient_norm.all_reduce", "all_reduce", "all_reduce", 4, axes=axes, deps=at, dtype="fp32", phase="optimizer"))
        nodes = _named_apart(nodes)
        before = (*deps, *([Ref("self", len(nodes) - 1)] if nodes else []))
        width = self.step.widths["compute"]
        for name, count in own:
            moved = count * (4 * 3 + 4 * 3 + self.step.widths["gradient"] + width)
            nodes.append(self._compute(f"{name}.adam", ADAM_FLOPS * count, moved, before))
        if not self._sharded and self.step.sharding.zero:
            first = len(nodes) - len(own)
            for i, bucket in enumerate(self.plan.buckets):
                if bucket.shard:
                    nodes.append(TemplateNode(
                        f"{_bucket_name(i, bucket)}.all_gather", "all_gather", "all_gather", bucket.owned(self.step.mesh) * width,
                        axes=bucket.shard, deps=(Ref("self", first + i),), dtype=self.step.dtype, phase="optimizer",
                    ))
        return nodes

    def _compute(self, name: str, flops: int, moved: int, deps: tuple[Ref, ...]) -> TemplateNode:
        return TemplateNode(name, "compute", name.rsplit(".", 1)[-1], max(1, moved), max(1, flops), deps=deps, dtype="fp32", phase="optimizer")

    def _owned(self) -> list[tuple[str, int]]:
        """Name and number of the elements whose optimizer state this device holds, by bucket or by block."""
        if not self._sharded:
            return [(_bucket_name(i, b), b.owned(self.step.mesh)) for i, b in enumerate(self.plan.buckets)]
        found: dict[str, int] = {}
        for unit in self.plan.units:
            for _, axes, group in _by_axes(unit.parameters, self.step):
                found[unit.kind] = found.get(unit.kind, 0) + _shard_elements(group, self.step, axes)
        return [(kind, count) for kind, count in found.items() if count]

    def _model_sums(self) -> list[TemplateNode]:
        """Gradients of parameters replicated over parts of tp, and of a tied embedding."""
        sums: dict[tuple[str, ...], int] = {}
        for unit in self.plan.units:
            for p in unit.parameters:
                if p.model:
                    axes, _ = self.step.sharding.split(p.data)
                    count = _padded(p, self.step, axes) if self._sharded else p.elements
                    sums[p.model] = sums.get(p.model, 0) + count
        nodes = [
            self._comm(f"replicated{i or ''}.all_reduce", "all_reduce", count, axes, (Ref("port", "grad"), Ref("port", "synced")), "finalize")
            for i, (axes, count) in enumerate(sorted(sums.items()))
        ]
        if self.step.tied_elements and self.plan.stage in (0, self.step.stages - 1):
            axes = ("pp",) if self.step.stages == 2 else PIPELINE_ENDS
            nodes.append(self._comm(
                "tied_embedding.all_reduce", "all_reduce", self.step.tied_elements, axes, (Ref("port", "grad"), Ref("port", "synced")), "finalize"
            ))
        return nodes

    def _norm_axes(self) -> list[tuple[str, ...]]:
        """Over which ranks a gradient norm is summed: all whose shards differ."""
        atoms = tuple(name for name, _ in self.step.mesh.atoms)
        if self.step.sharding.zero:
            return [atoms] if atoms else []
        kinds = (False, True) if self.step.experts else (False,)
        copies = [set(self.step.mesh.expand(("edp",) if expert else ("dp", "cp"))) for expert in kinds]
        found = [tuple(a for a in atoms if a not in same) for same in copies]
        return [axes for axes in dict.fromkeys(found) if axes]


def _named_apart(nodes: list[TemplateNode]) -> list[TemplateNode]:
    """Nodes with a number behind names that occur again."""
    from dataclasses import replace

    seen: dict[str, int] = {}
    result = []
    for node in nodes:
        seen[node.name] = count = seen.get(node.name, 0) + 1
        result.append(node if count == 1 else replace(node, name=f"{node.name}.{count}"))
    return result


def _bucket_name(index: int, bucket: Bucket) -> str:
    return f"{'expert_' if bucket.expert else ''}bucket{index:03d}"


def _by_axes(
    parameters: tuple[Parameter, ...], step: StepPlan
) -> list[tuple[str, tuple[str, ...], list[Parameter]]]:
    """Parameters by what shards them: a suffix for names, the sharding axes, the parameters."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Parameter]] = {}
    for p in parameters:
        groups.setdefault((p.expert, p.data), []).append(p)
    return [
        ("_expert" if expert else "", step.sharding.split(data)[0], group)
        for (expert, data), group in sorted(groups.items(), key=lambda item: item[0])
    ]


def _padded(p: Parameter, step: StepPlan, axes: tuple[str, ...]) -> int:
    return -(-p.rows // step.mesh.degree(axes)) * p.columns


def _shard_elements(group: list[Parameter], step: StepPlan, axes: tuple[str, ...]) -> int:
    """Elements of one device's shard: each parameter padded by rows."""
    return sum(_padded(p, step, axes) for p in group)
