"""Megatron-LM's functional tests of GPT: the memory that the last rank had allocated at most.

Source: github:NVIDIA/Megatron-LM, tests/functional_tests/test_cases; what columns do not say is in the tests' own
`model_config.yaml` and in tests/test_utils/recipes: one node of 8 GPUs, or of GB200 two of 4 (one where the case ends
in `_1node`); the vocabulary of GPT-2; dropout of attention and hidden states; gradients of weights not accumulated by
their products (`--no-gradient-accumulation-fusion`). Memory is written down by the last rank, which is of the last
stage. On A100 PyTorch gives products 8.125 MiB of workspace, in deterministic tests 32 (`CUBLAS_WORKSPACE_CONFIG`), and
Transformer Engine 4; later GPUs have 32 MiB of each. Where the image `dev` leaves the backend of attention to
Transformer Engine, it is a fused one; the images `lts` have had both. Rotary positions and missing biases change too
little to tell them apart here (0.1 %).
"""

from stage.catalog import default_strategy
from stage.cost.runtime import MEBIBYTE, Runtime
from stage.memory import job_memory
from stage.published.row import Row, number, text
from stage.request import Request, resolve_request
from stage.strategy import Strategy

__all__ = ["left_out", "measured_memory", "predict_memory", "row_request", "row_runtime"]

GPT2_VOCABULARY = 50257
GPUS, SMALL = 8, 4
KIBIBYTE = 1 << 10
OTHER_MODELS = (
    "num-experts",
    "multi-latent-attention",
    "swiglu",
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
)
IMPLEMENTATIONS = ("transformer_engine", "local")
OTHER_PROGRAMS = ("fp8-format", "use-megatron-fsdp", "pipeline-model-parallel-layout")
UNTOLD = {
    "release": "a number of GPUs that is in no column",
    "grpo": "reinforcement learning, whose inference holds memory of its own",
    "qk_layernorm": "a model outside the zoo",
    "defer_embedding_wgrad": "a change of the program that is in no column",
    "cross_entropy_loss_fusion": "a change of the program that is in no column",
    "uneven_pipeline": "a change of the program that is in no column",
    "account_for_embedding": "a change of the program that is in no column",
    "multi_dist_optimizer_instances": "a change of the program that is in no column",
}
"""Parts of a case's name, and why rows of it are not predicted."""


def left_out(row: Row) -> str | None:
    """Why a row is not predicted; None where it is."""
    rules = (
        (text(row, "group") != "gpt" or _says(row, *OTHER_MODELS), "a model outside the zoo"),
        *((part in text(row, "case"), why) for part, why in UNTOLD.items()),
        (not _says(row, "mem_max_allocated_bytes"), "nothing was measured"),
        (not _says(row, "global-batch-size"), "a batch that is in no column"),
        (
            text(row, "transformer-impl") not in IMPLEMENTATIONS or text(row, "bf16") != "True",
            "an implementation that is in no column, or not in bf16",
        ),
        (
            text(row, "hardware").startswith("lts") and _backend(row) == "auto",
            "a backend of attention that is in no column",
        ),
        (_says(row, *OTHER_PROGRAMS), "FP8, Megatron-FSDP or a pipeline layout"),
    )
    return next((why for applies, why in rules if applies), None)


def _says(row: Row, *columns: str) -> bool:
    """Whether any of these cells is filled."""
    return any(text(row, column) for column in columns)


def row_request(row: Row) -> Request:
    """The job of a row."""
    layers, heads, d_model = (number(row, n) for n in ("num-layers", "num-attention-heads", "hidden-size"))
    tp, pp, cp = (number(row, f"{n}-parallel-size", 1) for n in ("tensor-model", "pipeline-model", "context"))
    chunk = number(row, "num-layers-per-virtual-pipeline-stage", 0)
    chunks = layers // pp // chunk if chunk and pp > 1 else 1
    recompute = text(row, "recompute-granularity", "none")
    sizes = {
        "layers": layers,
        "d_model": d_model,
        "d_ff": number(row, "ffn-hidden-size", 4 * d_model),
        "heads": heads,
        "kv_heads": number(row, "num-query-groups", heads),
        "head_dim": d_model // heads,
        "vocab": number(row, "vocab-size", GPT2_VOCABULARY),
        "positions": number(row, "seq-length"),
        "tied": int(not text(row, "untie-embeddings-and-output-weights")),
    }
    return resolve_request(
        "gpt3-175b",
        _strategy(sequence_parallel=text(row, "sequence-parallel") == "True"),
        sizes=sizes,
        gpus=SMALL if text(row, "case").endswith("_1node") else GPUS,
        tp=tp,
        pp=pp,
        cp=cp,
        batch=number(row, "global-batch-size"),
        micro_batch=number(row, "micro-batch-size"),
        seq=number(row, "seq-length"),
        vocab_multiple=number(row, "make-vocab-size-divisible-by", 128),
        dropout=True,
        attention="unfused" if _backend(row) == "unfused" else "fused",
        zero=1 if text(row, "use-distributed-optimizer") else 0,
        recompute=recompute,
        context="ring" if cp > 1 else None,
        vpp=chunks if chunks > 1 else None,
        schedule="interleaved" if chunks > 1 else None,
    )


def row_runtime(row: Row) -> Runtime:
    """What the software of a row does: PyTorch has a workspace for each of two threads, Transformer Engine one."""
    if "a100" not in text(row, "hardware"):
        return Runtime(fused_accumulation=False)
    pytorch = 32 * MEBIBYTE if text(row, "deterministic-mode") == "True" else 8320 * KIBIBYTE
    return Runtime(fused_accumulation=False, workspace=2 * pytorch + 4 * MEBIBYTE)


def predict_memory(row: Row) -> int:
    """Bytes that are allocated on the last rank at its peak."""
    return job_memory(row_request(row), row_runtime(row)).ranks[-1].peak.bytes


def measured_memory(row: Row) -> int:
    """The same as it was measured."""
    return number(row, "mem_max_allocated_bytes")


def _backend(row: Row) -> str:
    """The backend of attention; Megatron-LM's own (`local`) is unfused."""
    own = text(row, "transformer-impl") == "local"
    return "unfused" if own else text(row, "attention-backend", "auto")


def _strategy(*, sequence_parallel: bool) -> Strategy:
    """Tensor parallelism with sequence parallel regions, or without."""
    strategy = default_strategy("dense")
    if sequence_parallel:
        return strategy
    rows = {dim: [axis for axis in axes if dim != "seq" or axis != "tp"] for dim, axes in strategy.shard}
    return strategy.replace(shard=rows, regather=[])
