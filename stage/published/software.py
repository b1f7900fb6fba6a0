"""What training software does alike in several sets: how it shards, shares out layers and places ranks."""

from collections.abc import Mapping

import numpy as np

from stage.catalog import default_strategy
from stage.strategy import Strategy

__all__ = [
    "data_outermost",
    "evened_layers",
    "fully_sharded",
    "gpt_sizes",
    "overlap_chunks",
    "without_sequence_parallel",
]

SPLITS = 4
"""Pieces of a product beside a reduce-scatter (Transformer Engine's `num_splits`); gathers go in as many or more."""


def without_sequence_parallel() -> Strategy:
    """Megatron-LM's tensor parallelism as it was before sequence parallel regions (arXiv:1909.08053)."""
    strategy = default_strategy("dense")
    rows = {dim: [axis for axis in axes if dim != "seq" or axis != "tp"] for dim, axes in strategy.shard}
    return strategy.replace(shard=rows, regather=[])


def fully_sharded(**options: object) -> Strategy:
    """Data parallelism whose ranks shard parameters, gathered block by block (arXiv:2304.11277)."""
    shard = (("batch", ("dp",)), ("seq", ("cp",)))
    strategy = Strategy("fully sharded", shard, mesh=("pp", "dp", "cp"), zero=3, overlap_grad=True)
    return strategy.replace(**options)


def evened_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage where embedding and loss count as one each (NeMo's `account_for_..._in_pipeline_split`).

    >>> evened_layers(30, 16)
    (1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1)
    """
    each = (layers + 2) // stages
    return (each - 1, *(each,) * (stages - 2), each - 1)


def data_outermost(degrees: Mapping[str, int]) -> tuple[int, ...]:
    """Ranks at the positions of a mesh where pipelines are within data parallelism (`use_tp_pp_dp_mapping`).

    >>> data_outermost({"pp": 2, "dp": 2, "cp": 1, "tp": 2})
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    pp, dp, cp, tp = (degrees[axis] for axis in ("pp", "dp", "cp", "tp"))
    ranks = np.arange(pp * dp * cp * tp).reshape(dp, pp, cp, tp)
    return tuple(ranks.transpose(1, 0, 2, 3).ravel().tolist())


def overlap_chunks(tp: int, *, overlapped: bool = True) -> int:
    """Into how many pieces `tp_comm_overlap` splits a product beside its collective over tp."""
    return min(tp, SPLITS) if overlapped else 1


def gpt_sizes(layers: int, d_model: int, heads: int, vocab: int, positions: int) -> dict[str, int]:
    """Sizes of a GPT, whose MLP is four times as wide as the model and whose heads all have keys of their own."""
    return {
        "layers": layers,
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": d_model // heads,
        "vocab": vocab,
        "positions": positions,
    }
