"""Logged step times of MLPerf Training's GPT-3 175B and Llama 3.1 405B, of submissions that run NVIDIA's NeMo.

Source: github:mlcommons/training_results_v3.0 to v5.1; what columns do not say is in their config_common.sh,
config_fp8.sh, conf/custom.yaml and pretrain.py, and in github:mlcommons/training, large_language_model_pretraining:

* sequence parallel regions, the distributed optimizer with gradients reduced in bf16 beside backward, no dropout (which
  custom.yaml sets to 0), no recomputation, Transformer Engine's fused attention, fused cross entropy;
* 8 bits by delayed scaling (`fp8_recipe` is `delayed` unless set), parameters stored and gathered in 8 bits from v4.0
  on (`FP8_PARAMS`); the submissions for Llama all source a config_common.sh with FP8=True, whose column may be empty;
* `TP_COMM_OVERLAP` splits products beside collectives over tp;
* `ASYM_PP_EMBED` and `ASYM_PP_LOSS` count embedding and loss as layers, so 126 layers are on 64 stages;
* Llama has a vocabulary of 32000 (the tokenizer of Mixtral 8x22B), GPT-3 one of 50257 padded to a multiple of 128 tp;
* `TP_PP_DP_MAPPING` puts data parallel ranks outermost: on CoreWeave's `carina`, and where a file is named `dplast`;
* `FULL_CUDA_GRAPH` in configurations of `_cg` and all of GB200; the other hosts launch kernels one by one.

A step is the median of those logged, and where none are, one derived from the time of a block of steps.
"""

import re
from collections.abc import Mapping
from typing import Any

from stage.published.row import Row, decimal, number, text
from stage.published.software import data_outermost, evened_layers, overlap_chunks
from stage.request import Request, resolve_request

__all__ = ["cases", "group", "left_out", "measured_seconds", "row_issue", "row_request", "row_system"]

MODELS: Mapping[str, tuple[str, dict[str, int]]] = {
    "gpt3": ("gpt3-175b", {}),
    "llama31_405b": ("llama3.1-405b", {"vocab": 32000}),
}
LLAMA_LAYERS = 126
SYSTEMS: Mapping[str, str] = {
    "H100": "h100",
    "H200": "h200",
    "B200-SXM": "b200",
    "(GB200)": "gb200",
    "(GB300)": "gb300",
}
"""The system by a part of the accelerator's name."""


def cases(row: Row) -> list[Row]:
    """The row, with a name for its `case`."""
    return [{**row, "case": f"{text(row, 'release')} {text(row, 'benchmark')} {text(row, 'system')}"}]


def group(row: Row) -> str:
    """The part of the set that a row belongs to: all are one."""
    return "all"


def left_out(row: Row) -> str | None:
    """Why a row is not predicted; None where it is."""
    seconds = text(row, "train_step_s_median") or text(row, "step_s_derived_from_block")
    reasons = {
        "a model outside the zoo": text(row, "benchmark") not in MODELS,
        "a machine outside the systems (Gaudi 2)": re.search(r"Gaudi\W*(R\))? ?2", text(row, "accelerator")),
        "no parallel configuration": not text(row, "tp"),
        "products in 4 bits, which no recipe computes": "_fp4" in text(row, "config_file"),
        "nothing was measured": not seconds,
        "a machine outside the systems": _system(row) is None,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def row_request(row: Row) -> Request:
    """The job of a row."""
    name, sizes = MODELS[text(row, "benchmark")]
    degrees: dict[str, Any] = {axis: number(row, axis, 1) for axis in ("tp", "pp", "cp", "dp")}
    chunks = number(row, "vpp", 1)
    evened = text(row, "asym_pp_embed") == "True" and text(row, "asym_pp_loss") == "True"
    eight = text(row, "fp8", "True" if name != "gpt3-175b" else "") == "True"
    stored = eight and text(row, "release") >= "v4.0"
    return resolve_request(
        name,
        sizes=sizes,
        gpus=number(row, "num_accelerators"),
        **degrees,
        batch=number(row, "global_batch_size"),
        micro_batch=number(row, "micro_batch_size"),
        seq=number(row, "seq_len"),
        grad_dtype="bf16",
        stage_layers=evened_layers(LLAMA_LAYERS, degrees["pp"] * chunks) if evened else None,
        placement=data_outermost(degrees) if _dp_outermost(row) else None,
        fp8="delayed" if eight else None,
        fp8_param_gather=True if stored else None,
        tp_overlap_chunks=overlap_chunks(degrees["tp"], overlapped=text(row, "tp_comm_overlap") == "True"),
        streams="per-axis",
        context="ring" if degrees["cp"] > 1 else None,
        vpp=chunks if chunks > 1 else None,
        schedule="interleaved" if chunks > 1 else None,
    )


def row_system(row: Row) -> str:
    """The machine."""
    found = _system(row)
    assert found is not None, "rows of other machines are left out"
    return found


def row_issue(row: Row) -> str:
    """How the host issues kernels."""
    graphs = "_cg" in text(row, "config_file") or "(GB200)" in text(row, "accelerator")
    return "graph" if graphs else "eager"


def measured_seconds(row: Row) -> float:
    """Seconds of a step."""
    column = "train_step_s_median" if text(row, "train_step_s_median") else "step_s_derived_from_block"
    return decimal(row, column)


def _system(row: Row) -> str | None:
    accelerator = text(row, "accelerator")
    return next((name for part, name in SYSTEMS.items() if part in accelerator), None)


def _dp_outermost(row: Row) -> bool:
    return text(row, "system").startswith("carina") or "dplast" in text(row, "config_file")
