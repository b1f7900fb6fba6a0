"""Mixture of experts with balanced loads: route, dispatch, a gated MLP per expert, combine.

The router's probabilities travel with the tokens and weight the activations inside the experts (Megatron-LM),
so a combine only adds. Gate, up and down are grouped matrix multiplications over the experts of a device.
"""

from stage.blocks.mlp import gated_mlp
from stage.graph import Builder
from stage.symbols import size
from stage.tensor import Dim, Tensor

__all__ = ["moe"]


def moe(
    b: Builder,
    x: Tensor,
    *,
    function: str = "swiglu",
    router_bias: bool = False,
    expert_bias: bool = False,
    shared: bool = False,
) -> Tensor:
    """x[batch, seq, d_model] -> the same; a token visits `top_k` of `experts`, of hidden size `expert_d_ff`.

    With `shared` every token also visits the experts that all share, one gated MLP of `shared_d_ff`
    (Dai et al., DeepSeekMoE, 2024, section 3.2).
    """
    beside = _shared_expert(b, x, function) if shared else None
    experts = b.dim("experts")
    slots = Dim("slots", size("batch") * size("seq") * size("top_k") / experts.size)
    hidden = x.dims[-1]
    logits = b.linear(x, "router", ["d_model"], [Dim("router", experts.size)], bias=router_bias)
    probs, chosen = b.op("route", [logits], "route", top_k=size("top_k"))
    table = (Dim("sources", size("sources")), Dim("router", experts.size))
    counts = b.op("count_tokens", [chosen], "count", dims=table, dtype="int64")[0]
    y = b.op("permute_tokens", [x, chosen], "permute", dims=(experts, slots, hidden))[0]
    weights = b.op("permute_tokens", [probs, chosen], "permute_probs", dims=(experts, slots))[0]
    y = b.op("sort_by_expert", [counts, y], "sort")[0]
    y = _experts(b, y, weights, function, expert_bias)
    y = b.op("sort_by_expert", [y], "unsort")[0]
    y = b.op("unpermute_tokens", [y, chosen], "unpermute", dims=x.dims)[0]
    return y if beside is None else b.add("add_shared", y, beside)


def _shared_expert(b: Builder, x: Tensor, function: str) -> Tensor:
    """The expert of all tokens, which runs before the others as in Megatron-LM: x[batch, seq, d_model] -> the same."""
    with b.scope("shared"):
        return gated_mlp(b, x, hidden="shared_d_ff", function=function)


def _experts(b: Builder, y: Tensor, weights: Tensor, function: str, bias: bool) -> Tensor:
    """The experts' gated MLPs as grouped matrix multiplications: y[experts, slots, d_model] -> the same."""
    hidden = ("experts", "slots", "expert_d_ff")

    def grouped(source: Tensor, name: str, over: str, out: str) -> Tensor:
        weight = b.parameter(f"experts.{name}.weight", "experts", over, out)
        offset = b.parameter(f"experts.{name}.bias", "experts", out) if bias else None
        result = hidden if out == "expert_d_ff" else ("experts", "slots", out)
        if out == "d_model":
            product = b.contract(source, weight, f"experts.{name}", result)
            return product if offset is None else b.add(f"experts.{name}_bias", product, offset)
        return b.contract(source, weight, f"experts.{name}", result, bias=offset)

    gate, up = (
        grouped(y, "gate_proj", "d_model", "expert_d_ff"),
        grouped(y, "up_proj", "d_model", "expert_d_ff"),
    )
    if bias:  # a bias of the last product must be weighted too, so the weights come after it
        y = grouped(b.pointwise(function, "experts.act", gate, up), "down_proj", "expert_d_ff", "d_model")
        return b.pointwise("mul", "experts.weight", y, weights)
    act = b.pointwise(function, "experts.act", gate, up, weights)
    return grouped(act, "down_proj", "expert_d_ff", "d_model")
