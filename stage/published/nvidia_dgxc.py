"""Step times of NVIDIA's DGX Cloud benchmarking recipes: NeMo on Megatron-Core, and MaxText, on H100 and GB200.

Source: github:NVIDIA/dgxc-benchmarking, v25.04 and support/25.05. What columns do not say is in the recipes' launch.sh,
pretrain_*.py and cfg, and in the NeMo commits that they check out (d2b21556 and 24.12, 6f2c6fda, b4148d21):

* sequence parallel regions where tp > 1; the distributed optimizer, gradients reduced in bf16 beside backward
  (`grad_reduce_in_fp32` is false in `performance_mode`); no dropout, no recomputation but DeepSeek-V3's; Transformer
  Engine's fused attention, context parallel as a ring (its `p2p`); vocabularies padded to a multiple of 128 tp;
* `bf16_with_fp8_mixed` is delayed scaling, with parameters stored and gathered in 8 bits;
* products of tp beside their collectives (`tp_comm_overlap`), but for Llama 3 8B (tp 1) and DeepSeek-V3;
* Llama 3.1 405B counts embedding and loss as layers of the pipeline, proxies with fewer layers too;
* Nemotron-4 340B has 12 virtual stages in v25.04 as well, whose table says NA: its launch.sh passes VP=12;
* Grok-1 is Megatron-Core's MoE with 8 gated experts, 2 a token, and the vocabulary of Llama 3; each expert takes
  exactly its balanced share (capacity factor 1, padded). In v25.04 experts are sharded over etp = tp, which is
  Megatron-Core's default where nothing is set, and dp follows from the number of GPUs, not from the column;
* DeepSeek-V3 has one MTP module (`use_mtp`), the same capacity, 64 layers' worth of places shared out over the pipeline
  of which the first stage lacks one and the last two, and recomputes `mla_up_proj` on H100, `core_attn` on GB200;
* CUDA graphs run Nemotron-4 and Grok-1 on GB200; MaxText is compiled by XLA; all other hosts launch kernels one by one;
* MaxText shards over all ranks, from 64 nodes on over 16 of them, and recomputes all of a layer but the projections of
  queries, keys and values (`save_qkv_proj`); here the product behind attention, 2 % of a step, is kept too.

Fine-tuning is left out: adapters are no model of the zoo, and the packed documents of the other runs are told in no
column, so nobody knows what their attention computes.
"""

from collections.abc import Mapping
from typing import Any

from stage.published.row import Row, decimal, number, text
from stage.published.software import evened_layers, fully_sharded, overlap_chunks
from stage.request import Request, resolve_request

__all__ = ["cases", "group", "left_out", "measured_seconds", "row_issue", "row_request", "row_system"]

GROK = {"layers": 64, "d_model": 6144, "heads": 48, "kv_heads": 8, "expert_d_ff": 32768, "vocab": 128256}
MODELS: Mapping[str, tuple[str, dict[str, int]]] = {
    "llama3.1-8b": ("llama3.1-8b", {}),
    "llama3.1-70b": ("llama3.1-70b", {}),
    "llama3.1-405b": ("llama3.1-405b", {}),
    "llama3-70b (MaxText FSDP)": ("llama3-70b", {}),
    "nemotron4-15b": ("nemotron4-15b", {}),
    "nemotron4-340b": ("nemotron4-340b", {}),
    "grok1-314b": ("mixtral-8x22b", GROK),
    "deepseek-v3-671b": ("deepseek-v3", {}),
}
"""The model and the sizes that are not its own, by the name in the table without what it says of proxies."""

EXPERTS = ("grok1-314b", "deepseek-v3-671b")
SYSTEMS: Mapping[str, str] = {"H100": "h100", "GB200": "gb200"}
NODE = {"H100": 8, "GB200": 4}
LARGE, SHARDED = 64, 16
"""Nodes from which on MaxText shards over so many of them."""


def cases(row: Row) -> list[Row]:
    """The row, with a name for its `case`."""
    return [{**row, "case": f"{_model(row)} {text(row, 'gpu')} x{text(row, 'gpus')} {text(row, 'dtype')}"}]


def group(row: Row) -> str:
    """The part of the set that a row belongs to: by the kind of the model and by the precision."""
    kind = "MoE and hybrid" if _model(row) in EXPERTS else "dense"
    return f"{kind} {text(row, 'dtype')}"


def left_out(row: Row) -> str | None:
    """Why a row is not predicted; None where it is."""
    if text(row, "model").endswith("LoRA"):
        return "a model outside the zoo (adapters)"
    if text(row, "model").endswith("SFT"):
        return "packed documents, whose lengths are in no column"
    if _model(row) not in MODELS:
        return f"a model outside the zoo ({_model(row)})"
    if text(row, "gpu") not in SYSTEMS:
        return "a machine outside the systems"
    return None


def row_request(row: Row) -> Request:
    """The job of a row."""
    name, sizes = MODELS[_model(row)]
    eight = text(row, "dtype") == "fp8"
    asked: dict[str, Any] = {
        "sizes": sizes | {"layers": number(row, "layers")},
        "gpus": number(row, "gpus"),
        "batch": number(row, "gbs"),
        "micro_batch": number(row, "mbs"),
        "seq": number(row, "seq"),
        "grad_dtype": "bf16",
        "fp8": "delayed" if eight else None,
    }
    if "MaxText" in text(row, "model"):
        return resolve_request(name, _maxtext(row), **asked)
    stored = True if eight else None
    return resolve_request(name, fp8_param_gather=stored, streams="per-axis", **asked, **_parallel(row))


def row_system(row: Row) -> str:
    """The machine."""
    return SYSTEMS[text(row, "gpu")]


def row_issue(row: Row) -> str:
    """How the host issues kernels."""
    if "MaxText" in text(row, "model"):
        return "compiled"
    graphs = text(row, "gpu") == "GB200" and _model(row).startswith(("nemotron4", "grok1"))
    return "graph" if graphs else "eager"


def measured_seconds(row: Row) -> float:
    """Seconds of a step."""
    return decimal(row, "step_time_s_measured")


def _model(row: Row) -> str:
    """The name in the table, without what it says of proxies."""
    return text(row, "model").partition("(proxy")[0]


def _maxtext(row: Row) -> Any:
    """The strategy of MaxText's `dcn_fsdp x ici_fsdp`."""
    node = NODE[text(row, "gpu")]
    large = number(row, "gpus") >= LARGE * node
    recomputed = "ops:norm,core_attn,mlp"
    return fully_sharded(recompute=recomputed, dp_shard=SHARDED * node if large else None)


def _parallel(row: Row) -> dict[str, Any]:
    """The options that say how NeMo shards a row."""
    model = _model(row)
    tp, pp, cp, ep, chunks = (number(row, axis, 1) for axis in ("tp", "pp", "cp", "ep", "vp"))
    if model == "nemotron4-340b":
        chunks = 12
    asked: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "context": "ring" if cp > 1 else None,
        "vpp": chunks if chunks > 1 else None,
        "schedule": "interleaved" if chunks > 1 else None,
        "tp_overlap_chunks": overlap_chunks(tp, overlapped=model != "deepseek-v3-671b"),
    }
    if model == "llama3.1-405b" and pp > 1:
        asked["stage_layers"] = evened_layers(number(row, "layers"), pp * chunks)
    if model in EXPERTS:
        asked |= {"capacity_factor": 1.0, "pad_to_capacity": True}
        asked["etp"] = tp if "v25.04" in text(row, "source") else number(row, "etp", 1)
    if model == "deepseek-v3-671b":
        each = 64 // pp
        asked["stage_layers"] = (each - 1, *(each,) * (pp - 2), each - 2)
        asked["mtp"] = True
        asked["recompute"] = "ops:mla_up_proj" if text(row, "gpu") == "H100" else "selective"
    return asked
