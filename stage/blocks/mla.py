"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values from one low-rank latent."""

from stage.blocks.attention import attend
from stage.blocks.norm import rms_norm
from stage.graph import Builder
from stage.symbols import size
from stage.tensor import Tensor

__all__ = ["latent_attention"]


def latent_attention(b: Builder, x: Tensor, *, q_lora: bool = True, bias: bool = False) -> Tensor:
    """x[batch, seq, d_model] -> the same, through latents of `q_lora_rank` and `kv_lora_rank`.

    A query and a key are `qk_nope_head_dim` numbers of their own and `qk_rope_head_dim` rotated ones, and the
    rotated part of the key is shared by all heads; a value has `v_head_dim`. Without `q_lora` queries are
    projected from x; `bias` adds biases to the projections into the latents.
    """
    qk_head = b.dim("qk_head_dim", size("qk_nope_head_dim") + size("qk_rope_head_dim"))
    if q_lora:
        low = b.linear(x, "q_a_proj", ["d_model"], ["q_lora_rank"], bias=bias)
        low = rms_norm(b, low, "q_a_norm", over="q_lora_rank")
        q = b.linear(low, "q_b_proj", ["q_lora_rank"], ["heads", qk_head])
    else:
        q = b.linear(x, "q_proj", ["d_model"], ["heads", qk_head])
    q = b.op("rope", [q], "q_rope")[0]

    latent = b.dim("kv_latent", size("kv_lora_rank") + size("qk_rope_head_dim"))
    joint = b.linear(x, "kv_a_proj", ["d_model"], [latent], bias=bias)
    parts = (b.dim("kv_lora_rank"), b.dim("qk_rope_head_dim"))
    compressed, k_rope = b.op("split", [joint], "kv_a_split", parts=parts)
    compressed = rms_norm(b, compressed, "kv_a_norm", over="kv_lora_rank")
    k_rope = b.op("rope", [k_rope], "k_rope")[0]
    both = b.dim("kv_head_dim", size("qk_nope_head_dim") + size("v_head_dim"))
    kv = b.linear(compressed, "kv_b_proj", ["kv_lora_rank"], ["heads", both])
    k_nope, v = b.op("split", [kv], "kv_b_split", parts=(b.dim("qk_nope_head_dim"), b.dim("v_head_dim")))
    k = b.op("join", [k_nope, k_rope], "k_join", last=qk_head)[0]
    o = attend(b, q, k, v)
    return b.linear(o, "o_proj", ["heads", "v_head_dim"], ["d_model"])
