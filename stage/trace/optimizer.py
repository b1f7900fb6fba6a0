"""The end of a step, in the order of Megatron-LM's `finalize_model_grads` and optimizer.

Sums over tp of gradients of what is replicated there, the tied embedding, the gradient norm, Adam (Kingma and Ba 2015,
algorithm 1, with decoupled weight decay), and with a sharded optimizer the gathers of the updated parameters.
"""

from stage.trace.fsdp import padded, parameter_groups, shard_elements
from stage.trace.groups import PIPELINE_ENDS
from stage.trace.plan import StagePlan, StepPlan
from stage.trace.reduction import bucket_name
from stage.trace.template import Ref, Template, TemplateNode, chain

__all__ = ["update_template"]

ADAM_FLOPS = 14
"""Operations an element: two moments (3 + 4), two bias corrections, root, sum, division, decay and update (1 + 1)."""

ADAM_STATES = 3
"""Master parameter and two moments in fp32, each read and written."""

READY = (Ref("port", "grad"), Ref("port", "reduced"))


def update_template(plan: StagePlan, step: StepPlan) -> Template:
    """Everything after the last gradient reduction; ports `grad` and `reduced` are the last compute and collective."""
    nodes = _sums(plan, step)
    own = _owned(plan, step)
    if step.clip:
        nodes += _norm(step, sum(count for _, count in own), len(nodes))
    before = _after(nodes)
    first = len(nodes)
    nodes += [_adam(name, count, step, before) for name, count in own]
    if step.sharding.zero in (1, 2):
        nodes += [
            step.collective(
                f"{bucket_name(i, b)}.all_gather", "all_gather", b.owned(step.mesh), b.shard,
                (Ref("self", first + i),), "optimizer", "compute",
            )
            for i, b in enumerate(plan.buckets)
            if b.shard
        ]  # fmt: skip
    return Template("optimizer", "optimizer", chain(nodes), numbers=())


def _after(nodes: list[TemplateNode]) -> tuple[Ref, ...]:
    """What the next node waits for: gradients, their reductions, and the last node so far."""
    return (*READY, *([Ref("self", len(nodes) - 1)] if nodes else []))


def _sums(plan: StagePlan, step: StepPlan) -> list[TemplateNode]:
    """Gradients of parameters replicated over parts of tp, and of a token table on first and last stage."""
    sums: dict[tuple[str, ...], int] = {}
    for p in (p for unit in plan.units for p in unit.parameters if p.model):
        count = padded(p, step, step.sharding.split(p.data)[0]) if step.sharding.zero == 3 else p.elements
        sums[p.model] = sums.get(p.model, 0) + count
    nodes = [
        step.collective(
            f"replicated_{'_'.join(axes)}.all_reduce", "all_reduce", count, axes, READY, "finalize"
        )
        for axes, count in sorted(sums.items())
    ]
    if step.tied_elements and plan.rank in (0, step.pipeline.ranks - 1):
        axes = ("pp",) if step.pipeline.ranks == 2 else PIPELINE_ENDS
        nodes.append(
            step.collective(
                "tied_embedding.all_reduce", "all_reduce", step.tied_elements, axes, READY, "finalize"
            )
        )
    return nodes


def _norm(step: StepPlan, elements: int, start: int) -> list[TemplateNode]:
    """The squared norm of a device's gradients, and its sum over all devices whose gradients differ."""
    waits = (*READY, *([Ref("self", start - 1)] if start else []))
    size = max(1, elements * step.widths["gradient"])
    nodes = [
        TemplateNode(
            "gradient_norm", "compute", "gradient_norm", size, max(1, 2 * elements), deps=waits, dtype="fp32",
            phase="optimizer",
        )
    ]  # fmt: skip
    for kind, axes in _norm_axes(step):
        name = f"gradient_norm{kind}_{'_'.join(axes)}.all_reduce"
        after = (Ref("self", start + len(nodes) - 1),)
        nodes.append(
            TemplateNode(
                name, "all_reduce", "all_reduce", 4, axes=axes, deps=after, dtype="fp32", phase="optimizer"
            )
        )
    return nodes


def _norm_axes(step: StepPlan) -> list[tuple[str, tuple[str, ...]]]:
    """Each norm's suffix for names and the axes over which it is summed.

    The world (without replicas of HSDP) if gradients are sharded, else all but the data axes; experts have an optimizer
    and so a norm of their own then.
    """
    atoms = tuple(name for name, _ in step.mesh.atoms)
    copies = {"": tuple(step.sharding.replicate)}
    if not step.sharding.zero:
        copies = {"": step.mesh.expand(("dp", "cp"))} | (
            {"_expert": step.mesh.expand(("edp",))} if step.experts else {}
        )
    found = {kind: tuple(atom for atom in atoms if atom not in same) for kind, same in copies.items()}
    return [(kind, axes) for kind, axes in found.items() if axes]


def _adam(name: str, count: int, step: StepPlan, before: tuple[Ref, ...]) -> TemplateNode:
    moved = count * (2 * ADAM_STATES * 4 + step.widths["gradient"] + step.widths["compute"])
    return TemplateNode(
        f"{name}.adam", "compute", "adam", max(1, moved), max(1, ADAM_FLOPS * count), deps=before, dtype="fp32",
        phase="optimizer",
    )  # fmt: skip


def _owned(plan: StagePlan, step: StepPlan) -> list[tuple[str, int]]:
    """Name and size in elements of the optimizer states that a device holds: by bucket, or under FSDP by block."""
    if step.sharding.zero != 3:
        return [(bucket_name(i, bucket), bucket.owned(step.mesh)) for i, bucket in enumerate(plan.buckets)]
    found: dict[str, int] = {}
    for unit in plan.units:
        for _, shard, _, group in parameter_groups(unit.parameters, step):
            found[unit.kind] = found.get(unit.kind, 0) + shard_elements(group, step, shard)
    return [(kind, count) for kind, count in found.items() if count]
