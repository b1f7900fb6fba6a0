"""Multi-token prediction (DeepSeek-V3 report, 2024, section 2.2): a chain of modules that look ahead."""

from stage.blocks.embedding import token_embedding
from stage.blocks.norm import rms_norm
from stage.graph import Builder
from stage.symbols import size
from stage.tensor import Tensor

__all__ = ["look_ahead"]


def look_ahead(b: Builder, x: Tensor, tokens: Tensor) -> Tensor:
    """What a module's layer works on: x and the next `tokens`, projected to one d_model (equation 21).

    The tokens that come next are the labels of the module before, so a module looks those up in the token
    table that all share. Shifting the integers by one position costs nothing that is modelled.
    """
    known = rms_norm(b, x, "hidden_norm")
    ahead = rms_norm(b, token_embedding(b, tokens), "embedding_norm")
    both = b.dim("d_model_pair", 2 * size("d_model"))
    joint = b.op("join", [known, ahead], "pair", last=both)[0]
    return b.linear(joint, "eh_proj", ["d_model_pair"], ["d_model"])
