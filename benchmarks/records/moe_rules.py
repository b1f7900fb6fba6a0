"""Known differences between Megatron-core's mixtures of experts (and wide tensor parallelism) and Stage's."""

from dataclasses import replace

from benchmarks.records.compare import Context, Explanation
from benchmarks.records.event import Event
from benchmarks.records.rewriting import by_block, group_over, is_forward, part
from stage.symbols import dtype_bytes

__all__ = ["MOE_RULES"]

ROUTED = (".moe.count", ".moe.permute", ".moe.sort", ".moe.unsort", ".moe.experts", ".moe.permute_probs")


def _is_routed(event: Event) -> bool:
    """Whether an event moves tokens to their experts or back."""
    return any(name in part(event) for name in ROUTED)


def _dtype(context: Context) -> str:
    return "bf16" if context.config.get("bf16", True) else "fp32"


def _tokens(context: Context) -> int:
    """Tokens of a micro-batch on one device between blocks."""
    config = context.config
    return int(config["B"] * config["S"] // (config.get("cp") or 1) // (config["tp"] if config["sp"] else 1))


def _exchanged_first(ours: list[Event], context: Context) -> list[Event]:
    if context.mesh.degree("ep") == 1 or context.mesh.degree("etp") == 1:
        return ours

    def rewrite(run: list[Event]) -> list[Event]:
        ops = [event.op for event in run]
        for first, second in (("all_to_all", "all_gather"), ("reduce_scatter", "all_to_all")):
            for i in range(len(run) - 3):
                if ops[i : i + 4] == [first, second, first, second]:
                    return [*run[:i], run[i], run[i + 2], run[i + 1], run[i + 3], *run[i + 4 :]]
        return run

    return by_block(ours, _is_routed, rewrite)


def _gathered_not_exchanged(ours: list[Event], context: Context) -> list[Event]:
    config = context.config
    if config.get("dispatcher") != "allgather" or not config.get("experts"):
        return ours
    dtype, tokens, group = _dtype(context), _tokens(context), group_over(context, ["ep", "etp"])
    width, experts, n = dtype_bytes(dtype), config["experts"], len(group)
    hidden = tokens * config["hidden"] * width

    def event(run: list[Event], op: str, size: int, kind: str = dtype) -> Event:
        return replace(run[0], op=op, group=group, bytes=size, dtype=kind)

    def rewrite(run: list[Event]) -> list[Event]:
        if is_forward(run[0]):
            maps = [event(run, "all_gather", tokens * experts, "bool")]
            probs = [event(run, "all_gather", tokens * experts * width)]
            return [*maps, *probs, event(run, "all_gather", hidden), event(run, "reduce_scatter", n * hidden)]
        back = [event(run, "all_gather", hidden), event(run, "reduce_scatter", n * hidden)]
        return [*back, event(run, "reduce_scatter", n * tokens * experts * width)]

    return by_block(ours, _is_routed, rewrite)


def _loads_counted(ours: list[Event], context: Context) -> list[Event]:
    """A forward whose layers will be recomputed runs without gradients, and counts for the loss only then."""
    config = context.config
    rows = {"aux_loss": 1, "seq_aux_loss": config["B"]}.get(config.get("aux", "none"))
    group = group_over(context, ["cp", "tp"])
    if rows is None or len(group) == 1:
        return ours
    size = rows * config["experts"] * dtype_bytes("int64")
    phase = "backward" if config.get("recompute") == "full" else "forward"
    result: list[Event] = []
    for i, event in enumerate(ours):
        result.append(event)
        counts = event.phase == phase and is_forward(event)
        if counts and _before_router(event) and not any(map(_before_router, ours[i + 1 : i + 2])):
            result.append(replace(event, op="all_reduce", group=group, bytes=size, dtype="int64"))
    return result


def _before_router(event: Event) -> bool:
    """Whether an event belongs to what a layer runs right before its router: attention's output, a shared expert."""
    return ".attn.o_proj" in event.name or ".moe.shared." in event.name


def _loads_differ(ours: list[Event], context: Context) -> list[Event]:
    """Sizes are taken from the record only where its splits account for them and fit together."""
    theirs = context.recorded
    if len(ours) != len(theirs) or context.config.get("aux", "none") == "none":
        return ours
    sent = _tokens(context) * context.config["topk"]
    result = list(ours)
    loads: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine.op != "all_to_all" or other.op != "all_to_all" or not _is_routed(mine):
            continue
        key = (mine.micro_batch, part(mine).partition(".")[0])
        splits = (list(other.details["in_splits"]), list(other.details["out_splits"]))
        if ".moe.permute" in mine.name and is_forward(mine):
            loads.setdefault(key, splits)
        there, back = loads.get(key, ([], []))
        outward = is_forward(mine) == (".moe.permute" in mine.name)
        expected = (there, back) if outward else (back, there)
        if sum(there) != sent or splits != expected or other.bytes * sent != mine.bytes * sum(splits[0]):
            return ours
        result[i] = replace(mine, bytes=other.bytes)
    return result


def _kv_heads_gathered(ours: list[Event], context: Context) -> list[Event]:
    config = context.config
    tp, heads = config["tp"], config["heads"]
    kv = config.get("kv") or heads
    if kv >= tp:
        return ours
    width, group = dtype_bytes(_dtype(context)), group_over(context, ["tp"])
    joint = (
        config["B"]
        * config["S"]
        // (config.get("cp") or 1)
        * (heads + 2 * kv)
        * (config["hidden"] // heads)
        * width
    )
    result: list[Event] = []
    for event in ours:
        if is_forward(event) and ".attn.o_proj" in event.name:
            result.append(replace(event, op="all_gather", group=group, bytes=joint // tp))
        entry = ".attn.norm." in event.name and not is_forward(event)
        if entry and event.op == ("all_gather" if config["sp"] else "all_reduce"):
            result.append(replace(event, op="reduce_scatter", group=group, bytes=joint))
        if not part(event).startswith("optimizer.replicated_tp_rep"):
            result.append(event)
    return result


MOE_RULES = (
    Explanation(
        "exchanged-before-gathered",
        "with tensor-parallel experts Megatron-core exchanges tokens and probabilities over ep before it gathers both "
        "over etp, and the reverse in backward; Stage moves one tensor after the other, the same four collectives",
        _exchanged_first,
    ),
    Explanation(
        "allgather-dispatcher",
        "Megatron-core's allgather dispatcher gathers routing maps, probabilities and tokens over ep x etp and "
        "reduce-scatters what the experts made; Stage's dispatch is the all-to-all",
        _gathered_not_exchanged,
    ),
    Explanation(
        "loads-counted-for-auxiliary-loss",
        "the auxiliary loss sums the tokens of each expert over cp x tp, once a layer and forward; "
        "Stage has no such loss",
        _loads_counted,
    ),
    Explanation(
        "loads-not-balanced",
        "the record routed by its untrained router, so tokens come back from experts in other numbers than they would "
        "if all had the same; each size is the one the recorded splits give, and the splits fit together",
        _loads_differ,
    ),
    Explanation(
        "kv-heads-gathered",
        "with fewer KV heads than tp Megatron-core splits the joint projection evenly, gathers it and scatters its "
        "gradient; Stage repeats each KV head on tp / kv_heads ranks and sums its weight's gradient once a step",
        _kv_heads_gathered,
    ),
)
