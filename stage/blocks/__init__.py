"""What models are composed of."""

from stage.blocks.attention import attend, attention
from stage.blocks.embedding import embedding, learned_positions, token_embedding
from stage.blocks.head import cross_entropy, lm_head
from stage.blocks.mla import latent_attention
from stage.blocks.mlp import gated_mlp, mlp
from stage.blocks.moe import moe
from stage.blocks.mtp import look_ahead
from stage.blocks.norm import layer_norm, rms_norm
from stage.blocks.residual import residual

__all__ = [
    "attend",
    "attention",
    "cross_entropy",
    "embedding",
    "gated_mlp",
    "latent_attention",
    "layer_norm",
    "learned_positions",
    "lm_head",
    "look_ahead",
    "mlp",
    "moe",
    "residual",
    "rms_norm",
    "token_embedding",
]
