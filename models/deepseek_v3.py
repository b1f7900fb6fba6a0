"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention; after `first_k_dense` layers, mixtures of experts.

Every token also visits the shared experts, one MLP of `shared_d_ff`. The router is a sigmoid whose correction
bias is no parameter: it is adjusted by hand between steps. `mtp` modules predict further tokens in training;
the published model has `mtp_modules` of them, and none is built unless `mtp` says so.
"""

from collections.abc import Callable, Mapping
from functools import partial

from stage import Block, Builder, HFConfig, Model, SizeValue, Tensor, blocks, decoder

MODEL_TYPES = ("deepseek_v3",)

VARIANTS: dict[str, dict[str, SizeValue]] = {
    "deepseek-v3": {
        "layers": 61,
        "first_k_dense": 3,
        "d_model": 7168,
        "d_ff": 18432,
        "heads": 128,
        "kv_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "experts": 256,
        "top_k": 8,
        "expert_d_ff": 2048,
        "shared_d_ff": 2048,
        "vocab": 129280,
        "seq": 163840,
        "mtp_modules": 1,
        "attention_bias": False,
        "tied": False,
    },
}
ALIASES = {"deepseek-r1": "deepseek-v3"}

PARAMETERS = {"deepseek-v3": 671_026_404_352}
"""Parameters of the main model: without its module for multi-token prediction and its correction biases."""


def layer(b: Builder, x: Tensor, *, sparse: bool, shared: bool, q_lora: bool, bias: bool) -> Tensor:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)), of experts if `sparse`."""
    with b.scope("attn"):
        h = blocks.latent_attention(b, blocks.rms_norm(b, x, "norm"), q_lora=q_lora, bias=bias)
        x = blocks.residual(b, x, h, bias=bias)
    with b.scope("moe" if sparse else "mlp"):
        h = blocks.rms_norm(b, x, "norm")
        return blocks.residual(b, x, blocks.moe(b, h, shared=shared) if sparse else blocks.gated_mlp(b, h))


def head(
    b: Builder, x: Tensor, labels: Tensor, *, module: Callable[..., Tensor], modules: int, tied: bool
) -> Tensor:
    """The loss, and those of modules further ahead: each has a layer, all share the token table and head."""
    loss = blocks.lm_head(b, x, labels, tied=tied)
    for i in range(modules):
        with b.scope(f"mtp{i + 1}"):
            x = module(b, blocks.look_ahead(b, x, labels))
            loss = b.add("total_loss", loss, blocks.lm_head(b, x, labels, tied=tied))
    return loss


def model(name: str, sizes: Mapping[str, SizeValue]) -> Model:
    """The model of these sizes; a `q_lora_rank` or a `shared_d_ff` of 0 means that there is no such part."""
    q_lora, bias = decoder.flag(sizes, "q_lora_rank"), decoder.flag(sizes, "attention_bias")
    make = partial(layer, shared=decoder.flag(sizes, "shared_d_ff"), q_lora=q_lora, bias=bias)
    dense, sparse = Block("dense", partial(make, sparse=False)), Block("moe", partial(make, sparse=True))
    layers, first = decoder.count(sizes, "layers"), decoder.count(sizes, "first_k_dense", 0, minimum=0)
    modules, tied = decoder.count(sizes, "mtp", 0, minimum=0), decoder.flag(sizes, "tied")
    last = partial(head, module=sparse.build, modules=modules, tied=tied)
    return decoder.build(
        name, sizes, (dense,) * min(first, layers) + (sparse,) * (layers - first), head=last, moe=True
    )


def from_hf(config: HFConfig) -> dict[str, SizeValue]:
    """The sizes in a `DeepseekV3Config`: `shared_d_ff` is that of `n_shared_experts` experts side by side."""
    sizes = decoder.read_sizes(config, seq=4096, head_dim=64)
    del sizes["head_dim"]
    expert_d_ff = config.get("moe_intermediate_size", 2048, int)
    sizes |= {
        "kv_heads": sizes["heads"],
        "kv_lora_rank": config.get("kv_lora_rank", 512, int),
        "qk_nope_head_dim": config.get("qk_nope_head_dim", 128, int),
        "qk_rope_head_dim": config.get("qk_rope_head_dim", 64, int),
        "v_head_dim": config.get("v_head_dim", 128, int),
        "first_k_dense": config.get("first_k_dense_replace", 3, int, minimum=0),
        "experts": config.get("n_routed_experts", config.get("num_local_experts", 256, int), int),
        "top_k": config.get("num_experts_per_tok", 8, int),
        "expert_d_ff": expert_d_ff,
        "shared_d_ff": expert_d_ff * decoder.read_optional(config, "n_shared_experts", 1),
        "q_lora_rank": decoder.read_optional(config, "q_lora_rank", 1536),
        "mtp_modules": decoder.read_optional(config, "num_nextn_predict_layers", 0),
        "attention_bias": config.get("attention_bias", False, bool),
    }
    return sizes
