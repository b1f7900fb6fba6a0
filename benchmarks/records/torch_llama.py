"""Records of a hand-written Llama under PyTorch's own parallelism: DTensor, FSDP2 and activation checkpointing."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.records.case import Case
from benchmarks.records.event import DTYPES, RecordError, recorded
from benchmarks.records.reference_model import model
from stage.catalog import load_strategy
from stage.errors import StageError
from stage.strategy import Strategy
from stage.synthesis import synthesize
from stage.traceset import TraceSet

__all__ = ["read", "synthesize_case"]

DIMS = ("vocab", "dim", "layers", "heads", "kv", "ffn", "S", "B")


def read(data: Mapping[str, Any], kind: str) -> list[Case]:
    """The cases of a file, one a run; `kind` is `dtensor`, `fsdp2` or `checkpoint`."""
    return [_case(i, run, kind) for i, run in enumerate(data["runs"])]


def _case(index: int, run: Mapping[str, Any], kind: str) -> Case:
    config = dict(run["config"])
    missing = [key for key in DIMS if key not in config.get("dims", {})]
    if missing:
        raise RecordError(f"the dims of run {index} lack {', '.join(missing)}")
    events = recorded(run["ops"])
    failed = [op["mark"].partition(" ")[0] for op in run["ops"] if " err " in str(op.get("mark", ""))]
    config |= {"kind": kind, "failed": failed, "dtypes": _dtypes(config, events, kind)}
    return Case(f"run {index} ({_title(config)})", config, {int(config.get("rank", 0)): events})


def _dtypes(config: Mapping[str, Any], events: Sequence[Any], kind: str) -> tuple[str, str]:
    """Dtypes of computation and of gradient reduction; a checkpointing record says neither, its first event does."""
    if kind == "dtensor":
        dtype = str(config["dtype"]).removeprefix("torch.")
        return DTYPES.get(dtype, dtype), DTYPES.get(dtype, dtype)
    if kind == "checkpoint":
        return (events[0].dtype if events else "fp32"), "fp32"
    found = re.fullmatch(r"(\w+) param / (\w+) reduce", config["mp"])
    return (found[1], found[2]) if found else (config["mp"], config["mp"])


def _title(config: Mapping[str, Any]) -> str:
    """The parts of a configuration that tell runs apart."""
    flags = ("sp", "loss_parallel", "prepare_module_input_no_sp", "fsdp2", "reshard_after_forward")
    parts = [f"tp {config['tp']}"] + [f"{key} {config[key]}" for key in flags if key in config]
    parts += [f"{key} {config[key]}" for key in ("hsdp_replicate", "grad_accum") if config.get(key, 1) != 1]
    parts += [str(config[key]) for key in ("mp", "wrap", "ac") if key in config]
    return ", ".join(parts)


def synthesize_case(config: Mapping[str, Any]) -> TraceSet:
    """The trace set of a run; under DTensor alone data parallelism is not part of the record."""
    dims, kind, tp = config["dims"], config["kind"], config["tp"]
    dp = config["world"] // tp if _sharded(config) else 1
    accumulated = config.get("grad_accum", 1)
    dtype, reduced = config["dtypes"]
    sizes = {
        "layers": dims["layers"],
        "d_model": dims["dim"],
        "d_ff": dims["ffn"],
        "heads": dims["heads"],
        "kv_heads": dims["kv"],
        "head_dim": dims["dim"] // dims["heads"],
        "vocab": dims["vocab"],
        "seq": dims["S"],
        "tied": False,
    }
    return synthesize(
        model(sizes),
        _strategy(config, dp),
        dp=dp,
        tp=tp,
        batch=dims["B"] * dp * accumulated,
        micro_batch=dims["B"],
        seq=dims["S"],
        vocab_multiple=1,
        dtype=dtype,
        grad_dtype=reduced,
        clip=kind != "checkpoint" and "clip" not in config["failed"],
    )


def _sharded(config: Mapping[str, Any]) -> bool:
    return config["kind"] == "fsdp2" or bool(config.get("fsdp2"))


def _strategy(config: Mapping[str, Any], dp: int) -> Strategy:
    """FSDP, or Megatron's layout of weights with PyTorch's habits: nothing fused or gathered twice."""
    name = "fsdp" if config["tp"] == 1 else "megatron_sp" if config["sp"] else "megatron"
    ac = str(config.get("ac", "none"))
    replicas = config.get("hsdp_replicate", 1)
    if ac != "none" and not ac.startswith("full block"):
        raise StageError(f"checkpointing {ac!r} is not that of whole blocks; compare only such runs")
    return load_strategy(name).replace(
        zero=3 if _sharded(config) else 0,
        fuse=False,
        regather=[],
        overlap_grad=True,
        recompute="full" if ac != "none" else "none",
        dp_shard=dp // replicas if replicas > 1 else None,
        reshard_after_forward=config.get("reshard_after_forward", True),
    )
