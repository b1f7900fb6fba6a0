"""Iteration times of Megatron-DeepSpeed on one node of A100: small GPT models over tp, dp and pp of up to 8 devices.

Source: github:VIA-Research/vTrain at f8dda847, data/ground_truth_single.csv (MIT-style licence), and what its README,
config/validation/single and src/model say of all of them: `use_checkpoint`, which is full recomputation of each layer;
1F1B; gradients all-reduced at the end (`use_gradient_bucket` is false) and optimizer states whole; a vocabulary of
50257, learned positions, a tied head; attention of three kernels (a batched product, a fused softmax, dropout, a
batched product), dropout of hidden states; no sequence parallel regions; fp16. The table says A100, not of what memory;
this is the SXM part of 80 GB.
"""

from stage.published.row import Row, decimal, number
from stage.published.software import gpt_sizes, without_sequence_parallel
from stage.request import Request, resolve_request

__all__ = ["cases", "group", "left_out", "measured_seconds", "row_issue", "row_request", "row_system"]

VOCABULARY = 50257


def cases(row: Row) -> list[Row]:
    """The row, with a name for its `case`."""
    tp, dp, pp = (number(row, f"{axis} parallelism") for axis in ("tensor", "data", "pipeline"))
    size = f"h{number(row, 'hidden size')} l{number(row, '# layers')}"
    batch = f"b{number(row, 'global batch')} mb{number(row, 'micro batch')}"
    return [{**row, "case": f"{size} {batch} tp{tp} dp{dp} pp{pp}"}]


def group(row: Row) -> str:
    """The part of the set that a row belongs to: all are one."""
    return "all"


def left_out(row: Row) -> str | None:
    """Why a row is not predicted; all are."""
    return None


def row_request(row: Row) -> Request:
    """The job of a row."""
    d_model, heads = number(row, "hidden size"), number(row, "attention heads")
    seq = number(row, "sequence length")
    sizes = gpt_sizes(number(row, "# layers"), d_model, heads, VOCABULARY, seq)
    return resolve_request(
        "gpt3-175b",
        without_sequence_parallel(),
        sizes=sizes,
        gpus=number(row, "# GPUs"),
        tp=number(row, "tensor parallelism"),
        pp=number(row, "pipeline parallelism"),
        batch=number(row, "global batch"),
        micro_batch=number(row, "micro batch"),
        seq=seq,
        dtype="fp16",
        dropout=True,
        attention="unfused",
        zero=0,
        recompute="full",
        overlap_grad=False,
        bucket_first_stage=False,
        bucket_size=0,
        streams="per-axis",
    )


def row_system(row: Row) -> str:
    """The machine."""
    return "a100-80gb-sxm"


def row_issue(row: Row) -> str:
    """How the host issues kernels."""
    return "eager"


def measured_seconds(row: Row) -> float:
    """The iteration time."""
    return decimal(row, "iteration time (ms)") / 1e3
