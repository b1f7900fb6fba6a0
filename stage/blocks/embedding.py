"""The first block: tokens to vectors."""

from stage.graph import Builder
from stage.tensor import Tensor

__all__ = ["TABLE", "embedding", "learned_positions", "token_embedding"]

TABLE = "embedding.weight"
"""The name of the token table, the same in every block that shares it."""


def embedding(b: Builder, tokens: Tensor, *, positions: bool = False) -> Tensor:
    """Vectors of tokens, with learned `positions` if asked: tokens[batch, seq] -> [batch, seq, d_model]."""
    x = token_embedding(b, tokens)
    return b.dropout("embedding_dropout", learned_positions(b, x) if positions else x)


def token_embedding(b: Builder, tokens: Tensor) -> Tensor:
    """Rows of the token table: tokens[batch, seq] -> [batch, seq, d_model]; a gather."""
    table = b.parameter(TABLE, "vocab", "d_model", shared=True)
    return b.op("embedding", [tokens, table], "embedding")[0]


def learned_positions(b: Builder, x: Tensor) -> Tensor:
    """The vectors x plus a learned one for each position; the table is sliced as the sequence is."""
    table = b.parameter("position.weight", "positions", "d_model")
    return b.add("position", x, table)
