"""One published model of every family, cut down to sizes that simulate in milliseconds, and meshes to split them by."""

from typing import Any

from stage.catalog import load_strategy
from stage.request import Request, resolve_request
from stage.strategy import Strategy

COMMON = {"layers": 2, "d_model": 32, "heads": 4, "head_dim": 8, "vocab": 64, "seq": 16}
DENSE = COMMON | {"d_ff": 64, "kv_heads": 2}
SPARSE = COMMON | {"expert_d_ff": 64, "kv_heads": 2, "experts": 4, "top_k": 2}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}

MODELS: dict[str, dict[str, int]] = {
    "gpt3-125m": DENSE | {"kv_heads": 4, "positions": 16},
    "llama3-8b": DENSE,
    "mistral-7b": DENSE,
    "nemotron4-15b": DENSE,
    "qwen2-7b": DENSE,
    "qwen3-8b": DENSE,
    "mixtral-8x7b": SPARSE,
    "qwen3-30b-a3b": SPARSE,
    "gpt-oss-20b": SPARSE | {"window": 4},
    "deepseek-v3": {k: v for k, v in SPARSE.items() if k != "head_dim"}
    | LATENT
    | {"kv_heads": 4, "first_k_dense": 1, "d_ff": 64, "shared_d_ff": 64},
}

STRATEGIES = ("ddp", "fsdp", "hsdp", "megatron", "megatron_sp", "megatron_moe", "tp_2d")

PRESETS = (
    *("deepseek_v3", "gpt3_175b", "gpt3_1t", "gpt3_530b", "llama3_405b", "megascale_175b", "mixtral_8x7b"),
    *("mlperf_gpt3_175b", "mlperf_llama31_405b", "torchtitan", "torchtitan_hsdp", "zero2"),
)
"""Strategies of published jobs: their layouts are those of the strategies above."""

MESHES: tuple[dict[str, int], ...] = (
    {"dp": 2},
    {"dp": 4, "dp_shard": 2},
    {"cp": 2, "dp": 2},
    {"tp": 2, "dp": 2},
    {"tp": 4},
    {"cp": 2, "tp": 2},
    {"dp": 4, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"tp": 4, "ep": 2},
    {"tp": 2, "etp": 2},
    {"dp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2},
)


def request(model: str, strategy: str | Strategy, **options: Any) -> Request:
    """A job of a small model; the batch is one sequence for each of its data-parallel ranks unless given."""
    sizes = MODELS[model] | dict(options.pop("sizes", None) or {})
    return resolve_request(model, strategy, sizes=sizes, **{"vocab_multiple": 8} | options)


def uses(strategy: str, mesh: dict[str, int]) -> bool:
    """Whether a strategy has all the axes of a mesh."""
    known = load_strategy(strategy)
    axes = {*known.mesh, *(axis for _, row in known.shard for axis in row), "dp_shard"}
    return all(degree == 1 or axis in axes for axis, degree in mesh.items())


def fits(model: str, strategy: str, mesh: dict[str, int]) -> bool:
    """Whether the strategy has all the axes of a mesh, and the model experts for those of experts."""
    return uses(strategy, mesh) and ("experts" in MODELS[model] or not mesh.keys() & {"ep", "etp"})


CASES = [(m, s, mesh) for m in MODELS for s in STRATEGIES for mesh in MESHES if fits(m, s, mesh)]


def name_of(value: object) -> str:
    """A readable name of a case."""
    if isinstance(value, dict):
        return "-".join(f"{axis}{degree}" for axis, degree in value.items()) or "default"
    return str(value)
