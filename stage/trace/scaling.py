"""What ranks agree on for the scales of delayed scaling, and of weights that are stored in 8 bits.

Delayed scaling: after every forward and backward of a chunk new scales are made of the largest values. All of a rank's
products take part at once, in one reduction over all ranks that run the same blocks (tensor, context and data
parallel). A product keeps the largest values of its input, weight and output, and backward those of the gradients of
output and input (Transformer Engine 2.19, `FP8GlobalStateManager.reduce_and_update_fp8_tensors`).

Stored weights: a rank updates a part of them that begins and ends anywhere, so the largest values of all scales are
reduced over the ranks among which they are sharded, in one piece (those of experts in another), before the update is
rounded to 8 bits; with delayed scaling after it, for the next step (`cast_master_weights_to_fp8`).
"""

from functools import lru_cache

from stage.precision import FP8
from stage.trace.fsdp import padded
from stage.trace.parameters import Parameter
from stage.trace.plan import StagePlan, StepPlan
from stage.trace.streams import chain
from stage.trace.template import Ref, Template, TemplateNode

__all__ = ["rounding_template", "scaling_template"]

KEPT = {"forward": 3, "backward": 2}
"""Largest values that a product keeps."""


def scaling_template(products: int, step: StepPlan, phase: str) -> Template:
    """One all-reduce of an fp32 number for each of a rank's largest values, and the kernel that updates the scales."""
    axes = tuple(name for name, _ in step.mesh.atoms if name != "pp")
    return _template(products, axes, step.pipeline.marks, phase, step.streams)


@lru_cache(maxsize=64)  # ranks of other stages do alike, and what is one template is encoded once
def _template(
    products: int, axes: tuple[str, ...], marks: tuple[str, ...], phase: str, streams: str
) -> Template:
    count = KEPT[phase] * products
    nodes = []
    if axes:
        nodes.append(
            TemplateNode(
                "amax.all_reduce", "all_reduce", "all_reduce", 4 * count, axes=axes, deps=(Ref("port", "compute"),),
                dtype="fp32", phase=phase,
            )
        )  # fmt: skip
    nodes.append(
        TemplateNode(
            "update", "compute", "scale_update", 2 * 4 * count, count,
            deps=(Ref("self", 0),) if axes else (), dtype="fp32", phase=phase,
        )
    )  # fmt: skip
    return Template("scales", phase, chain(nodes, streams), numbers=("micro_batch", *marks))


def rounding_template(plan: StagePlan, step: StepPlan) -> Template:
    """The updated weights of a rank in 8 bits, after the port `adam`; no nodes where none are stored so."""
    nodes: list[TemplateNode] = []
    groups: dict[tuple[bool, tuple[str, ...]], list[Parameter]] = {}
    for p in (p for unit in plan.units for p in unit.parameters if p.dtype == FP8):
        groups.setdefault((p.expert, step.sharding.split(p.data)[0]), []).append(p)
    for (_, axes), group in sorted(groups.items(), key=lambda item: item[0]):
        nodes += _rounding(group, axes, step, len(nodes))
    return Template("optimizer.weights", "optimizer", step.chain(nodes), numbers=())


def _rounding(
    group: list[Parameter], axes: tuple[str, ...], step: StepPlan, first: int
) -> list[TemplateNode]:
    """The nodes for weights that are sharded over the same axes; `first` is the index of the first of them."""
    count = sum(padded(p, step, axes) if step.sharding.zero == 3 else p.elements for p in group)
    if step.sharding.zero < 3:
        count = -(-count // step.mesh.degree(axes))
    scales = sum(p.scales for p in group)
    name = "_".join(("expert",) * group[0].expert + axes) or "whole"

    def kernel(op: str, width: int, after: tuple[Ref, ...]) -> TemplateNode:
        moved, dtype = count * (4 + width) + 4 * scales, FP8 if width else "fp32"
        return TemplateNode(
            f"{op}_{name}", "compute", op, moved, count, deps=after, dtype=dtype, phase="optimizer"
        )

    def agreed(after: tuple[Ref, ...]) -> list[TemplateNode]:
        label = f"amax_{name}.all_reduce"
        node = TemplateNode(
            label,
            "all_reduce",
            "all_reduce",
            4 * scales,
            axes=axes,
            deps=after,
            dtype="fp32",
            phase="optimizer",
        )
        return [node] if axes else []

    begin = (Ref("port", "adam"),)
    if step.delayed_scaling:
        return [kernel("quantize", 1, begin), *agreed((Ref("self", first),))]
    found = [kernel("amax", 0, begin), *agreed((Ref("self", first),))]
    return [*found, kernel("quantize", 1, (Ref("self", first + len(found) - 1),))]
