"""Known differences between Megatron-core's data parallelism and Stage's: buckets, parameters, the end of a step."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.records.compare import Context, Explanation
from benchmarks.records.event import Event
from benchmarks.records.rewriting import block, group_over, is_reduction, like_recorded, move, without

__all__ = ["OPTIMIZER_RULES"]


def _is_gather(event: Event) -> bool:
    """Whether an event gathers parameters after the optimizer's update."""
    return event.op == "all_gather" and event.phase == "optimizer"


def _gathers_twice(ours: list[Event], context: Context) -> list[Event]:
    config = context.config
    apart = (config.get("ep") or 1) > 1 or (config.get("etp") or config["tp"]) != config["tp"]
    if not (config.get("experts") and apart and config.get("dist_opt")) or config.get("overlap_param"):
        return ours
    return ours + [event for event in ours if _is_gather(event)]


def _gathers_in_forward(ours: list[Event], context: Context) -> list[Event]:
    theirs = context.recorded
    if not context.config.get("overlap_param"):
        return ours
    gathers = [replace(event, phase="forward") for event in ours if _is_gather(event)]
    starts = [i for i, event in enumerate(theirs) if event.op in ("F", "B")]
    places = like_recorded(theirs, gathers, range(*starts[:2])) if len(starts) > 1 else None
    if places is None or not _in_order_of_use([theirs[i] for i in places], gathers):
        return ours
    return move(without(ours, _is_gather), theirs, places)


def _in_order_of_use(found: Sequence[Event], gathers: Sequence[Event]) -> bool:
    """Whether dense and expert buckets are each gathered from the first layers' to the last layers'."""
    kinds = [[e for e in gathers if ("expert_" in e.name) == expert] for expert in (False, True)]
    pending = [list(reversed(kind)) for kind in kinds]
    for event in found:
        queue = next((q for q in pending if q and q[0] == event), None)
        if queue is None:
            return False
        queue.pop(0)
    return True


def _reduces_at_hook(ours: list[Event], context: Context) -> list[Event]:
    theirs = context.recorded
    reductions = [
        (i, event) for i, event in enumerate(ours) if is_reduction(event) and event.phase == "backward"
    ]
    if not context.config.get("overlap_grad") or not reductions:
        return ours
    rest = without(ours, lambda event: is_reduction(event) and event.phase == "backward")
    places = like_recorded(theirs, [event for _, event in reductions], range(len(theirs)))
    if places is None:
        return ours
    pending = list(reductions)
    for earlier, place in enumerate(places):
        match = next((item for item in pending if item[1] == theirs[place]), None)
        if match is None:
            return ours
        pending.remove(match)
        before = match[0] - sum(1 for i, _ in reductions if i < match[0])
        passed = rest[place - earlier : before]
        if place - earlier > before or len({block(event) for event in passed}) > 1:
            return ours
    return move(rest, theirs, places)


def _reduces_aligned(ours: list[Event], context: Context) -> list[Event]:
    stage = context.rank * context.mesh.degree("pp") // context.mesh.world
    if not (context.config.get("align_param_gather") and stage):
        return ours
    late = [event for event in ours if is_reduction(event) and event.phase == "backward"]
    rest = without(ours, lambda event: event in late)
    last = max((i for i, event in enumerate(rest) if event.phase in ("pipeline", "backward")), default=-1) + 1
    return rest[:last] + [replace(event, phase="pipeline") for event in late] + rest[last:]


def _counts_tokens(ours: list[Event], context: Context) -> list[Event]:
    if not context.config.get("per_token_loss"):
        return ours
    pipeline, data = group_over(context, ["pp"]), group_over(context, ["dp", "cp"])
    scalars = [("broadcast", pipeline), ("all_reduce", data)]
    fresh = [Event("finalize", op, group, 4, "int32") for op, group in scalars if len(group) > 1]
    at = next((i for i, event in enumerate(ours) if event.phase == "optimizer"), len(ours))
    return ours[:at] + fresh + ours[at:]


def _attention_stubbed(ours: list[Event], context: Context) -> list[Event]:
    config = context.config
    if (config.get("cp") or 1) == 1:
        return ours
    names = ("k_rope.all_gather", "v_proj.all_gather")
    found = [event for event in ours if any(f".attn.{name}" in event.name for name in names)]
    if any(event.group != group_over(context, ["cp"]) for event in found):
        return ours
    return without(ours, lambda event: event in found)


OPTIMIZER_RULES = (
    Explanation(
        "chained-optimizers-gather-twice",
        "the dense and the expert optimizer of Megatron-core each gather the parameters of the whole model "
        "(start_param_sync of the chunk), so every parameter all-gather is there twice",
        _gathers_twice,
    ),
    Explanation(
        "parameter-gather-in-forward",
        "with overlap_param_gather Megatron-core leaves the parameter all-gathers to the next step's first forward, "
        "first layers' bucket first; Stage issues them right after the update that ends a step",
        _gathers_in_forward,
    ),
    Explanation(
        "bucket-reduced-inside-block",
        "Megatron-core starts a bucket's reduction in the hook of its last gradient; Stage starts it when the backward "
        "of the block that holds this gradient is over, a few of the same block's collectives later",
        _reduces_at_hook,
    ),
    Explanation(
        "aligned-gradient-reduction",
        "with aligned reductions Megatron-core starts those of all stages but the first after the last backward",
        _reduces_aligned,
    ),
    Explanation(
        "tokens-counted-for-loss",
        "with a loss per token Megatron-core broadcasts the number of tokens over pp and sums it over dp x cp; "
        "before execution every batch is full, so Stage knows the number",
        _counts_tokens,
    ),
    Explanation(
        "attention-stubbed",
        "the record's attention under context parallelism is a stand-in that communicates nothing; Stage gathers "
        "keys and values over cp and scatters their gradients",
        _attention_stubbed,
    ),
)
