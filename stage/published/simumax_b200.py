"""SimuMax's runs of Megatron-LM on one node of eight B200: step time and the largest memory allocated on any rank.

Source: github:MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json; what columns do not say is in its
docs/b200/b200_real_repro_guide.md and simu_tools/megatron_scripts: micro-batches of one sequence, of 4096 tokens where
the case names no other length; the distributed optimizer with gradients in fp32; no recomputation and no dropout; cross
entropy of Transformer Engine (`cef`); no communication beside computing (section 3.3); sequence parallelism; context
parallelism by all-to-all (`cp_comm_type=a2a`); of DeepSeek models one dense layer, and a capacity factor of 1 with
padding. Its 405B has 16 KV heads, not the 8 of the published model.
"""

import re

from stage.cost.runtime import Runtime
from stage.memory import job_memory
from stage.published.row import Row, decimal, number, text
from stage.request import Request, resolve_request

__all__ = [
    "RUNTIME",
    "cases",
    "group",
    "left_out",
    "measured_memory",
    "measured_seconds",
    "predict_memory",
    "row_issue",
    "row_request",
    "row_system",
]

GPUS = 8
GIBIBYTE = 1 << 30

RUNTIME = Runtime(fused_loss=True)

DEEPSEEK_V2 = {
    "d_model": 5120,
    "d_ff": 12288,
    "expert_d_ff": 1536,
    "shared_d_ff": 3072,
    "experts": 160,
    "top_k": 6,
    "vocab": 102400,
}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "llama3-8b": ("llama3-8b", {}),
    "llama3-70b": ("llama3-70b", {}),
    "llama3-405b": ("llama3.1-405b", {"kv_heads": 16}),
    "deepseekv2": ("deepseek-v3", DEEPSEEK_V2 | {"first_k_dense": 1}),
    "deepseekv3": ("deepseek-v3", {"first_k_dense": 1}),
}
"""The model and the sizes that are not its own, by the name in the table."""


def cases(row: Row) -> list[Row]:
    """The row, which has a name for its `case`."""
    return [row]


def group(row: Row) -> str:
    """The part of the set that a row belongs to: all are one."""
    return "all"


def left_out(row: Row) -> str | None:
    """Why a row is not predicted; None where it is."""
    if text(row, "model") not in MODELS:
        return "a model outside the zoo"
    if text(row, "status", "ok") != "ok" or not text(row, "real_alloc_gib"):
        return "nothing was measured"
    return None


def row_request(row: Row) -> Request:
    """The job of a row."""
    name, sizes = MODELS[text(row, "model")]
    degrees = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", text(row, "parallel"))}
    tp, pp, cp = (degrees.get(axis, 1) for axis in ("tp", "pp", "cp"))
    length = re.search(r"_seq(\d+)", text(row, "case"))
    chunks = number(row, "vp_size", 1)
    dp = GPUS // (tp * pp * cp)
    return resolve_request(
        name,
        sizes=sizes | {"layers": number(row, "layer_num")},
        gpus=GPUS,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=degrees.get("ep", 1),
        batch=number(row, "mbc") * dp,
        seq=int(length[1]) if length else 4096,
        vocab_multiple=1,
        overlap_grad=False,
        bucket_first_stage=False,
        bucket_size=0,
        vpp=chunks if chunks > 1 else None,
        schedule="interleaved" if chunks > 1 else None,
        context="ulysses" if cp > 1 else None,
        capacity_factor=1.0 if name == "deepseek-v3" else None,
        pad_to_capacity=True if name == "deepseek-v3" else None,
    )


def row_system(row: Row) -> str:
    """The machine."""
    return "b200"


def row_issue(row: Row) -> str:
    """How the host issues kernels."""
    return "eager"


def measured_seconds(row: Row) -> float:
    """Seconds of a step."""
    return decimal(row, "real_ms") / 1e3


def predict_memory(row: Row) -> int:
    """Bytes that are allocated on the rank that holds most, at its peak."""
    return job_memory(row_request(row), RUNTIME).peak.bytes


def measured_memory(row: Row) -> int:
    """The same as it was measured."""
    return round(float(text(row, "real_alloc_gib")) * GIBIBYTE)
