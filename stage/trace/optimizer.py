"""The end of a step, in the order of Megatron-LM's `finalize_model_grads` and optimizer.

Sums over tp of gradients of what is replicated there, the tied embedding, the gradient norm, Adam (Kingma and Ba 2015,
algorithm 1, with decoupled weight decay), and with a sharded optimizer the gathers of the updated parameters.
"""

from stage.precision import FP8
from stage.trace.buckets import Bucket
from stage.trace.fsdp import padded, parameter_groups
from stage.trace.groups import PIPELINE_ENDS
from stage.trace.parameters import STORED
from stage.trace.plan import StagePlan, StepPlan
from stage.trace.reduction import bucket_digits, bucket_kind
from stage.trace.template import Ref, Template, TemplateNode

__all__ = ["adam_template", "gather_bucket_template", "update_template"]

ADAM_FLOPS = 14
"""Operations an element: two moments (3 + 4), two bias corrections, root, sum, division, decay and update (1 + 1)."""

ADAM_STATES = 3
"""Master parameter and two moments in fp32, each read and written."""


def update_template(plan: StagePlan, step: StepPlan) -> Template:
    """What comes after the last gradient reduction and is not a bucket's own.

    Ports `grad` and `reduced` are the last compute and the last collective before, of each stream of reductions.
    """
    nodes = _sums(plan, step)
    own = _sharded(plan, step)
    if step.clip:
        elements = sum(count for *_, count in own) + sum(
            bucket.owned(step.mesh) for bucket in _buckets(plan, step)
        )
        nodes += _norm(step, elements, len(nodes))
    before = _after(step, len(nodes))
    nodes += [_adam(f"{name}.adam", count, step, before, dtype) for name, dtype, count in own]
    return Template("optimizer", "optimizer", step.chain(nodes), numbers=())


def adam_template(index: int, bucket: Bucket, step: StepPlan) -> Template:
    """The update of a bucket, after the ports `grad`, `reduced` and `ready`, the last node of the template before."""
    after = (*_after(step, 0), Ref("port", "ready"))
    node = _adam("adam", bucket.owned(step.mesh), step, after, bucket.dtype)
    return _of_bucket(index, bucket, node, step)


def gather_bucket_template(index: int, bucket: Bucket, step: StepPlan) -> Template:
    """The gather of a bucket's parameters, after the ports `adam` and `before`, the gather of the bucket before."""
    after = (Ref("port", "adam"), Ref("port", "before"))
    node = step.collective(
        "all_gather", "all_gather", bucket.owned(step.mesh), bucket.shard, after, "optimizer", bucket.dtype
    )
    return _of_bucket(index, bucket, node, step)


def _of_bucket(index: int, bucket: Bucket, node: TemplateNode, step: StepPlan) -> Template:
    block, digits = f"optimizer.{bucket_kind(bucket)}", bucket_digits(index)
    return Template(block, "optimizer", step.chain([node]), numbers=("bucket",), digits=digits)


def _after(step: StepPlan, placed: int) -> tuple[Ref, ...]:
    """What a node behind so many others waits for: gradients, their reductions, and the last one so far."""
    reduced = (Ref("port", f"reduced.{stream}") for stream in step.reductions)
    return (Ref("port", "grad"), *reduced, *([Ref("self", placed - 1)] if placed else []))


def _sums(plan: StagePlan, step: StepPlan) -> list[TemplateNode]:
    """Gradients of parameters replicated over parts of tp, and of a token table on first and last stage."""
    sums: dict[tuple[str, ...], int] = {}
    for p in (p for unit in plan.units for p in unit.parameters if p.model):
        count = padded(p, step, step.sharding.split(p.data)[0]) if step.sharding.zero == 3 else p.elements
        sums[p.model] = sums.get(p.model, 0) + count
    wanted = [(f"replicated_{'_'.join(axes)}", count, axes) for axes, count in sorted(sums.items())]
    if step.tied_elements and plan.rank in (0, step.pipeline.ranks - 1):
        axes = ("pp",) if step.pipeline.ranks == 2 else PIPELINE_ENDS
        wanted.append(("tied_embedding", step.tied_elements, axes))
    return [
        step.collective(f"{name}.all_reduce", "all_reduce", count, axes, _after(step, i), "finalize")
        for i, (name, count, axes) in enumerate(wanted)
    ]


def _norm(step: StepPlan, elements: int, start: int) -> list[TemplateNode]:
    """The squared norm of a device's gradients, and its sum over all devices whose gradients differ."""
    size = max(1, elements * step.widths["gradient"])
    work, waits = max(1, 2 * elements), _after(step, start)
    nodes = [
        TemplateNode(
            "gradient_norm", "compute", "gradient_norm", size, work, deps=waits, dtype="fp32", phase="optimizer"
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


def _adam(name: str, count: int, step: StepPlan, before: tuple[Ref, ...], dtype: str) -> TemplateNode:
    """The update of `count` parameters; those in 8 bits are written once their scales are known."""
    written = 0 if dtype == FP8 else step.widths[dtype]
    moved = count * (2 * ADAM_STATES * 4 + step.widths["gradient"] + written)
    return TemplateNode(
        name, "compute", "adam", max(1, moved), max(1, ADAM_FLOPS * count), deps=before, dtype="fp32",
        phase="optimizer",
    )  # fmt: skip


def _buckets(plan: StagePlan, step: StepPlan) -> tuple[Bucket, ...]:
    """The buckets that are updated one by one: all, but under FSDP none."""
    return () if step.sharding.zero == 3 else plan.buckets


def _sharded(plan: StagePlan, step: StepPlan) -> list[tuple[str, str, int]]:
    """Under FSDP the kinds of blocks, dtypes, and the elements of the optimizer states that a device holds of each."""
    found: dict[tuple[str, str], int] = {}
    for unit in plan.units if step.sharding.zero == 3 else ():
        for _, shard, _, group in parameter_groups(unit.parameters, step):
            for p in group:
                key = unit.kind, p.dtype
                found[key] = found.get(key, 0) + padded(p, step, shard)
    names = {key: key[0] if key[1] == STORED else ".".join(key) for key in found}
    return [(names[key], key[1], count) for key, count in found.items() if count]
