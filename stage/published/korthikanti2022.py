"""Iteration times of Megatron-LM on A100, full recomputation and sequence parallelism with selective recomputation.

Source: Korthikanti et al. 2022, arXiv:2205.05198, tables 3 and 5. A row has two measurements, which `cases` tells apart
by a column `recompute`: full recomputation has no sequence parallel regions (section 6.3), the other has them and
recomputes the attention core. Both have attention of three kernels with dropout, as Megatron-LM had then, 16 bits, one
data parallel rank with its optimizer states whole, and, but for 22B and 1T, an interleaved schedule.
"""

from collections.abc import Mapping

from stage.catalog import default_strategy
from stage.published.row import Row, decimal, number, text
from stage.published.software import without_sequence_parallel
from stage.request import Request, resolve_request

__all__ = ["cases", "group", "left_out", "measured_seconds", "row_issue", "row_request", "row_system"]

MEASURED: Mapping[str, str] = {
    "full": "iter_time_full_recompute_s",
    "selective": "iter_time_seqpar_selective_s",
}


def cases(row: Row) -> list[Row]:
    """The measurements of a row, each with its `case` and `recompute`."""
    return [
        {**row, "case": f"{text(row, 'model')} {policy}", "recompute": policy}
        for policy, column in MEASURED.items()
        if text(row, column)
    ]


def group(row: Row) -> str:
    """The part of the set that a row belongs to: all are one."""
    return "all"


def left_out(row: Row) -> str | None:
    """Why a row is not predicted; all are."""
    return None


def row_request(row: Row) -> Request:
    """The job of a case."""
    d_model, heads, chunks = (number(row, column) for column in ("hidden", "heads", "interleave_m"))
    policy = text(row, "recompute")
    sizes = {
        "layers": number(row, "layers"),
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": d_model // heads,
        "vocab": number(row, "vocab"),
    }
    return resolve_request(
        "gpt3-175b",
        without_sequence_parallel() if policy == "full" else default_strategy("dense"),
        sizes=sizes,
        gpus=number(row, "gpus"),
        tp=number(row, "tp"),
        pp=number(row, "pp"),
        batch=number(row, "global_batch"),
        micro_batch=number(row, "micro_batch"),
        seq=number(row, "seq"),
        dtype="fp16",
        dropout=True,
        attention="unfused",
        zero=0,
        recompute=policy,
        streams="per-axis",
        schedule="interleaved" if chunks > 1 else None,
        vpp=chunks if chunks > 1 else None,
    )


def row_system(row: Row) -> str:
    """The machine: A100 of 80 GB."""
    return {"A100-80GB": "a100-80gb-sxm"}[text(row, "gpu")]


def row_issue(row: Row) -> str:
    """How the host issues kernels."""
    return "eager"


def measured_seconds(row: Row) -> float:
    """The iteration time of a case."""
    return decimal(row, MEASURED[text(row, "recompute")])
