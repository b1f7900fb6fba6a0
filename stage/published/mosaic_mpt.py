"""Throughput of MosaicML's MPT under FSDP on A100 and H100.

Source: github:mosaicml/llm-foundry at 8c8dd48f, scripts/train/benchmarking/README.md; what its columns do not say is in
submit_benchmarks.py there, in scripts/train/yamls/pretrain/mpt-*.yaml and in Composer 0.16.4:

* MPT is GPT-3 with a vocabulary of 50368: biases, learned positions, a tied head (`NumParams` is met exactly), heads of
  128 (64 up to 350m), so 760m has 12 heads and 3b 20; causal attention is one kernel (`attn_impl` triton); no dropout;
* activation checkpointing is of whole layers;
* parameters are in fp32 shards and gathered in bf16, block by block; `FULL_SHARD` gathers them again for backward,
  `SHARD_GRAD_OP` keeps them; every micro-batch is reduced (`ddp_sync_context` leaves FSDP alone), in fp32 where
  `MP Mode` is DEFAULT, in bf16 where it is PURE;
* in amp_fp8 products of linear layers are Transformer Engine's, with its default of delayed scaling.

A batch that its micro-batches do not divide is left out, as is none of this table.
"""

from collections.abc import Mapping

from stage.published.row import Row, decimal, number, text
from stage.published.software import fully_sharded, gpt_sizes
from stage.request import Request, resolve_request

__all__ = ["cases", "group", "left_out", "measured_seconds", "row_issue", "row_request", "row_system"]

MODELS: Mapping[str, tuple[int, int, int]] = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, size and heads of mpt-*.yaml."""

VOCABULARY = 50368
SYSTEMS: Mapping[str, str] = {
    "a100_40gb": "a100-40gb-sxm",
    "a100_80gb": "a100-80gb-sxm",
    "h100_80gb": "h100",
}
RESHARDED: Mapping[str, bool] = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


def cases(row: Row) -> list[Row]:
    """The row, with a name for its `case`."""
    names = ("Model", "SeqLen (T)", "# GPUs", "GPU", "Precision", "MicroBatchSize")
    return [{**row, "case": " ".join(text(row, name) for name in names)}]


def group(row: Row) -> str:
    """The part of the set that a row belongs to: all are one."""
    return "all"


def left_out(row: Row) -> str | None:
    """Why a row is not predicted; None where it is."""
    if text(row, "Model") not in MODELS:
        return "a model outside the zoo"
    if text(row, "GPU") not in SYSTEMS:
        return "a machine outside the systems"
    if text(row, "Sharding Strategy") not in RESHARDED:
        return "a sharding strategy that is not FSDP's"
    if number(row, "GlobalBatchSize") % (number(row, "# GPUs") * number(row, "MicroBatchSize")):
        return "micro-batches of different sizes"
    return None


def row_request(row: Row) -> Request:
    """The job of a row."""
    layers, d_model, heads = MODELS[text(row, "Model")]
    seq = number(row, "SeqLen (T)")
    sizes = gpt_sizes(layers, d_model, heads, VOCABULARY, seq)
    return resolve_request(
        "gpt3-175b",
        fully_sharded(reshard_after_forward=RESHARDED[text(row, "Sharding Strategy")]),
        sizes=sizes,
        gpus=number(row, "# GPUs"),
        batch=number(row, "GlobalBatchSize"),
        micro_batch=number(row, "MicroBatchSize"),
        seq=seq,
        vocab_multiple=1,
        grad_dtype="fp32" if text(row, "MP Mode") == "DEFAULT" else "bf16",
        grad_reduce="microbatch",
        recompute="full" if text(row, "Activation Checkpointing") == "True" else "none",
        fp8="delayed" if "fp8" in text(row, "Precision") else None,
    )


def row_system(row: Row) -> str:
    """The machine."""
    return SYSTEMS[text(row, "GPU")]


def row_issue(row: Row) -> str:
    """How the host issues kernels."""
    return "eager"


def measured_seconds(row: Row) -> float:
    """Seconds of a step: tokens of a batch over tokens per second."""
    return decimal(row, "GlobalBatchSize (T)") / decimal(row, "Throughput (T/s)")
