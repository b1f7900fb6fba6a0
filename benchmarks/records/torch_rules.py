"""Known differences between PyTorch's own parallelism (DTensor, FSDP2, activation checkpointing) and Stage's."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.records.compare import Context, Explanation
from benchmarks.records.event import Event
from benchmarks.records.rewriting import group_over, is_forward, part, resized, without

__all__ = ["TORCH_RULES"]

WEIGHTS_PER_LAYER = 9
"""Two norms, four projections of attention, three of the MLP."""
WEIGHTS_AROUND = 3
"""Token table, last norm, output."""


def _is_norm_of_gradients(event: Event) -> bool:
    return part(event).startswith("optimizer.gradient_norm")


def _is_sum_of_replicated(event: Event) -> bool:
    return part(event).startswith("optimizer.replicated")


def _norms(name: str) -> int:
    """How many norms a block has."""
    return {"embedding": 0, "head": 1, "root": 1}.get(name, 2)


def _sharded(context: Context) -> bool:
    return context.config["kind"] == "fsdp2" or bool(context.config.get("fsdp2"))


def _clips_by_tensor(ours: list[Event], context: Context) -> list[Event]:
    weights = WEIGHTS_PER_LAYER * context.config["dims"]["layers"] + WEIGHTS_AROUND
    dtype = "fp32" if _sharded(context) else context.config["dtypes"][0]
    shard = ["dp_shard"] if "dp_shard" in context.mesh.names else ["dp"]
    if context.config.get("hsdp_replicate", 1) == 1:
        shard = ["dp"]
    groups = [group for group in (group_over(context, shard), group_over(context, ["tp"])) if len(group) > 1]
    result: list[Event] = []
    for event in ours:
        if _is_norm_of_gradients(event):
            result += [resized(replace(event, group=group), weights, dtype) for group in groups]
        else:
            result.append(event)
    return result


def _gathers_logits(ours: list[Event], context: Context) -> list[Event]:
    config = context.config
    if config.get("loss_parallel", True) or config["tp"] == 1:
        return ours
    dims = config["dims"]
    logits = dims["B"] * dims["S"] * dims["vocab"] // config["tp"]
    result: list[Event] = []
    for event in ours:
        if not part(event).startswith("head.loss."):
            result.append(event)
        elif ".max" in event.name:
            result.append(resized(replace(event, op="all_gather"), logits, config["dtypes"][0]))
    return result


def _target_in_compute_dtype(ours: list[Event], context: Context) -> list[Event]:
    dims, dtype = context.config["dims"], context.config["dtypes"][0]
    if context.config["kind"] != "dtensor":
        return ours
    loss = [i for i, event in enumerate(ours) if part(event).startswith("head.loss.")]
    last = {i for i in loss if i + 1 not in loss}
    return [resized(e, dims["B"] * dims["S"], dtype) if i in last else e for i, e in enumerate(ours)]


def _inputs_apart(ours: list[Event], context: Context) -> list[Event]:
    if context.config.get("prepare_module_input_no_sp") or context.config["sp"]:
        return ours
    more = {".attn.norm.": 2, ".mlp.norm.": 1}
    result: list[Event] = []
    for event in ours:
        readers = 1 + sum(count for name, count in more.items() if name in event.name)
        result += [event] * (readers if event.op == "all_reduce" and event.phase == "backward" else 1)
    return result


def _norms_summed_by_use(ours: list[Event], context: Context) -> list[Event]:
    """DTensor's partial gradients: each norm's is summed once to clip and three times to update."""
    summed = [event for event in ours if _is_sum_of_replicated(event)]
    if context.config["kind"] != "dtensor" or not context.config["sp"] or not summed:
        return ours
    dims = context.config["dims"]
    one = resized(replace(summed[0], phase="optimizer"), dims["dim"], context.config["dtypes"][0])
    weights = [one] * (2 * dims["layers"] + 1)
    rest = without(ours, _is_sum_of_replicated)
    at = next((i for i, event in enumerate(rest) if event.phase == "optimizer"), len(rest))
    return rest[:at] + weights + rest[at:] + 3 * weights


def _norms_summed_by_block(ours: list[Event], context: Context) -> list[Event]:
    summed = [event for event in ours if _is_sum_of_replicated(event)]
    if not _sharded(context) or not context.config["sp"] or not summed:
        return ours
    accumulated = context.config.get("grad_accum", 1) > 1
    dtype = context.config["dtypes"][1 if accumulated else 0]
    one = resized(replace(summed[0], phase="backward"), context.config["dims"]["dim"], dtype)
    result: list[Event] = []
    for event in without(ours, _is_sum_of_replicated):
        if ".gradients.reduce_scatter" in event.name:
            result += [one] * _norms(part(event).partition(".")[0])
        result.append(event)
    return result


def _norms_not_summed(ours: list[Event], context: Context) -> list[Event]:
    if context.config["kind"] != "checkpoint" or _sharded(context) or not context.config["sp"]:
        return ours
    return without(ours, _is_sum_of_replicated)


def _recomputes_on_demand(ours: list[Event], context: Context) -> list[Event]:
    """Recomputation begins once the gradient of the last row-parallel product has been gathered."""
    if not context.config["sp"]:
        return ours
    result: list[Event] = []
    again: list[Event] = []
    for event in ours:
        if event.phase == "backward" and is_forward(event):
            again.append(event)
        elif event.op == "all_gather" and ".mlp.down_proj" in event.name:
            result += [event, *again]
            again = []
        else:
            result += [*again, event]
            again = []
    return result + again


def _recomputes_early_stop(ours: list[Event], context: Context) -> list[Event]:
    if not str(context.config.get("ac", "")).endswith("early_stop=True"):
        return ours
    return without(
        ours,
        lambda e: (
            e.phase == "backward" and is_forward(e) and ".mlp.down_proj" in e.name and e.op != "all_gather"
        ),
    )


def _is_of_ends(event: Event) -> bool:
    """Whether an event gathers parameters or reduces gradients of the embedding or the head."""
    moved = ".parameters." in event.name or ".gradients." in event.name
    return moved and part(event).partition(".")[0] in ("embedding", "head")


def _root_is_one_unit(ours: list[Event], context: Context) -> list[Event]:
    """The root's unit holds embedding and head: gathered first in forward and backward, reduced last."""
    if context.config.get("wrap") != "blocks_only":
        return ours
    result: list[Event] = []
    for batch in range(context.config.get("grad_accum", 1)):
        own = [event for event in ours if event.micro_batch == batch and _is_of_ends(event)]
        rest = [event for event in ours if event.micro_batch == batch and not _is_of_ends(event)]
        forward, backward = _joint(own, "forward", "all_gather"), _joint(own, "backward", "all_gather")
        if context.config["reshard_after_forward"] is True:
            backward = [replace(event, phase="backward") for event in forward]
        elif backward:
            held = forward[0].bytes * len(forward[0].group) // len(backward[0].group)
            backward = [replace(backward[0], bytes=held)]
        result += forward + [event for event in rest if event.phase == "forward"]
        result += backward + [event for event in rest if event.phase == "backward"]
        result += _joint(own, "backward", "reduce_scatter") + _joint(own, "backward", "all_reduce")
    return result + [event for event in ours if event.micro_batch < 0]


def _joint(events: Sequence[Event], phase: str, op: str) -> list[Event]:
    """One collective for all of a kind, or none."""
    same = [event for event in events if (event.phase, event.op) == (phase, op)]
    name = f"root.gradients.{op}/{phase}"
    return [replace(same[0], bytes=sum(event.bytes for event in same), name=name)] if same else []


TORCH_RULES = (
    Explanation(
        "root-is-one-unit",
        "where only blocks are wrapped, embedding, last norm and output are one unit: one gather before forward, "
        "one more in backward, and one reduce-scatter at its end",
        _root_is_one_unit,
    ),
    Explanation(
        "norm-summed-by-tensor",
        "PyTorch clips with the norms of all parameters stacked: one element a parameter, in their dtype, summed over "
        "each axis of the mesh in turn, where Stage sums one number over all of them",
        _clips_by_tensor,
    ),
    Explanation(
        "logits-gathered",
        "without loss parallelism DTensor gathers the logits, where Stage sums three numbers a token",
        _gathers_logits,
    ),
    Explanation(
        "target-logit-in-compute-dtype",
        "loss parallelism sums the logit of the label in the dtype of the logits, not in fp32",
        _target_in_compute_dtype,
    ),
    Explanation(
        "input-gradients-apart",
        "without PrepareModuleInput each of q, k, v and of gate, up sums its own input's gradient (5L + 1); Stage adds "
        "the gradients first and sums once (2L + 1)",
        _inputs_apart,
    ),
    Explanation(
        "norm-gradients-summed-by-use",
        "DTensor leaves gradients of norms partial: clipping sums each of them once and AdamW three times, where Stage "
        "sums all at once",
        _norms_summed_by_use,
    ),
    Explanation(
        "norm-gradients-summed-by-block",
        "FSDP2 sums the gradient of each norm over tp right before its block's reduce-scatter, in the compute dtype; "
        "Stage sums the shards of all at the end",
        _norms_summed_by_block,
    ),
    Explanation(
        "norm-gradients-not-summed",
        "the record ends with backward, where DTensor's gradients of norms are still partial",
        _norms_not_summed,
    ),
    Explanation(
        "recomputed-on-demand",
        "torch's checkpoint recomputes when the first saved tensor is asked for, after the gather of the gradient of "
        "the block's last product; Stage recomputes before the block's backward",
        _recomputes_on_demand,
    ),
    Explanation(
        "recomputation-stopped-early",
        "torch's checkpoint stops once all saved tensors are there, so a block's last reduction is not "
        "repeated (L fewer); Stage repeats it as Megatron-core does",
        _recomputes_early_stop,
    ),
)
