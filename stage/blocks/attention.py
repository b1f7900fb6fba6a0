"""Self-attention with multi-head, grouped-query and multi-query projections."""

from stage.blocks.norm import rms_norm
from stage.graph import Builder
from stage.ops import Factors
from stage.tensor import Size, Tensor

__all__ = ["attend", "attention"]


def attention(
    b: Builder,
    x: Tensor,
    *,
    rope: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    sinks: bool = False,
    window: Size | None = None,
) -> Tensor:
    """Projections, rotary embedding, attention, output projection: x[batch, seq, d_model] -> the same.

    `bias` adds biases to q, k and v (one of the output is added by `residual`); `qk_norm` normalizes q and k
    over `head_dim` (Qwen3); `sinks` gives each head a learned logit that takes part in the softmax (gpt-oss);
    `window` is a sliding window in tokens.
    """
    q = b.linear(x, "q_proj", ["d_model"], ["heads", "head_dim"], bias=bias)
    k = b.linear(x, "k_proj", ["d_model"], ["kv_heads", "head_dim"], bias=bias)
    v = b.linear(x, "v_proj", ["d_model"], ["kv_heads", "head_dim"], bias=bias)
    if qk_norm:
        q, k = rms_norm(b, q, "q_norm", over="head_dim"), rms_norm(b, k, "k_norm", over="head_dim")
    if rope:
        q, k = b.op("rope", [q], "q_rope")[0], b.op("rope", [k], "k_rope")[0]
    sink = b.parameter("sinks", "heads") if sinks else None
    o = attend(b, q, k, v, window=window, sink=sink)
    return b.linear(o, "o_proj", ["heads", o.dim_names[-1]], ["d_model"])


def attend(
    b: Builder, q: Tensor, k: Tensor, v: Tensor, *, window: Size | None = None, sink: Tensor | None = None
) -> Tensor:
    """softmax(q k^T) v: one fused kernel, or three with the option `unfused`."""
    mask = {"mask": b.options.mask} | ({} if window is None else {"window": window})
    if b.options.attention == "fused":
        return b.op("attention", [q, k, v, *([sink] if sink is not None else [])], "core", **mask)[0]
    return _unfused(b, (q, k, v), mask, sink)


def _unfused(
    b: Builder, qkv: tuple[Tensor, Tensor, Tensor], mask: dict[str, Size], sink: Tensor | None
) -> Tensor:
    q, k, v = qkv
    queries = ("batch", "seq", "heads")
    keys = ("batch", "kv_seq", "heads")
    pairs = ("batch", "heads", "seq", "kv_seq")
    to_scores = Factors(((*queries, "qk"), (*keys, "qk")), (pairs,))
    scores = b.contract(q, k, "core.scores", pairs, factors=to_scores, **mask)
    operands = [scores, *([sink] if sink is not None else [])]
    weights = b.op("attention_softmax", operands, "core.softmax")[0]
    weights = b.dropout("core.dropout", weights)
    v_dim = v.dim_names[-1]
    to_values = Factors((pairs, (*keys, v_dim)), ((*queries, v_dim),))
    return b.contract(weights, v, "core.values", (*queries, v_dim), factors=to_values, **mask)
