"""Records of Megatron-core's GPTModel, one configuration a file: the same job as a request to Stage."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.records.case import Case
from benchmarks.records.event import Event, RecordError, mark, recorded
from benchmarks.records.reference_model import model
from stage.catalog import load_strategy
from stage.strategy import Strategy
from stage.synthesis import synthesize
from stage.traceset import TraceSet

__all__ = ["KEYS", "read", "seen", "skip_reason", "synthesize_case"]

KEYS = ("tp", "pp", "dp", "sp", "layers", "hidden", "heads", "ffn", "vocab", "S", "B", "m")
"""Keys that a configuration must have; the others have defaults."""

OVERLAP_BUCKET = 40_000_000


def read(data: Mapping[str, Any], name: str) -> list[Case]:
    """The one case of a file."""
    missing = [key for key in KEYS if key not in data["config"]]
    if missing:
        raise RecordError(f"the configuration lacks {', '.join(missing)}")
    several = data["config"]["pp"] if (data["config"].get("vpp") or 1) > 1 else 0
    ranks = {int(rank): recorded(entry["ops"], several) for rank, entry in data["ranks"].items()}
    return [Case(str(data.get("name", name)), {**data["config"], "error": data.get("error")}, ranks)]


def skip_reason(config: Mapping[str, Any]) -> str:
    """Why a configuration can not be compared, or nothing."""
    if config.get("error"):
        return f"the recorded run failed: {str(config['error']).splitlines()[0]}"
    if config.get("mtp"):
        return "multi-token prediction is not built by the reference model"
    if config.get("swiglu") is False:
        return "the reference model has SwiGLU alone"
    return ""


def seen(events: Sequence[Event], _kind: str) -> list[Event]:
    """The events of a synthesized trace as a record holds them: backwards are counted, whatever chunk they are of."""
    found: list[Event] = []
    for event in events:
        count = sum(before.op == "B" for before in found)
        found.append(mark("B", count) if event.op == "B" else event)
    return found


def synthesize_case(config: Mapping[str, Any]) -> TraceSet:
    """The trace set of a configuration."""
    degrees = {axis: int(config.get(axis) or 1) for axis in ("tp", "pp", "dp", "cp", "ep")}
    experts = config.get("experts")
    etp = config.get("etp") or (degrees["tp"] if experts else 1)
    dtype = "bf16" if config.get("bf16", True) else "fp32"
    reduced = "fp32" if config.get("fp32_reduce", True) else dtype
    micro_batch = config["B"]
    return synthesize(
        model(_sizes(config)),
        _strategy(config),
        **degrees,
        etp=etp if experts else 1,
        batch=micro_batch * config["m"] * degrees["dp"],
        micro_batch=micro_batch,
        seq=config["S"],
        vocab_multiple=1,
        dtype=dtype,
        grad_dtype=reduced,
        clip=bool(config.get("clip", 1.0)),
    )


def _sizes(config: Mapping[str, Any]) -> dict[str, int | bool]:
    heads = config["heads"]
    sizes: dict[str, int | bool] = {
        "layers": config["layers"],
        "d_model": config["hidden"],
        "d_ff": config["ffn"],
        "heads": heads,
        "kv_heads": config.get("kv") or heads,
        "head_dim": config["hidden"] // heads,
        "vocab": config["vocab"],
        "seq": config["S"],
        "tied": bool(config.get("tie")),
    }
    if config.get("experts"):
        sizes |= {"experts": config["experts"], "top_k": config["topk"], "expert_d_ff": config["moe_ffn"]}
        if config.get("shared"):
            sizes["shared_d_ff"] = config["shared"]
    return sizes


def _strategy(config: Mapping[str, Any]) -> Strategy:
    """Megatron's strategies with this configuration's optimizer, buckets and recomputation.

    Without overlap Megatron has one bucket; with it and no size given, one of 40 million parameters or more.
    """
    overlap = bool(config.get("overlap_grad"))
    base = load_strategy("megatron_sp" if config["sp"] else "megatron")
    return base.replace(
        zero=1 if config.get("dist_opt") else 0,
        overlap_grad=overlap,
        recompute=config.get("recompute") or "none",
        schedule="interleaved" if (config.get("vpp") or 1) > 1 else None,
        vpp=config.get("vpp"),
        bucket_size=(config.get("bucket") or OVERLAP_BUCKET) if overlap else 0,
    )
