"""Op families, one module each; importing this package registers them all."""

from stage.ops import (
    attention,
    chunk,
    collective,
    contract,
    contract_group,
    embedding,
    loss,
    moe,
    norm,
    norm_sharded,
    pointwise,
    quantize,
    ring,
    view,
)
from stage.ops.registry import Attrs, Factor, Factors, Op, Tape, get_op, register, registered

__all__ = [
    "Attrs",
    "Factor",
    "Factors",
    "Op",
    "Tape",
    "attention",
    "chunk",
    "collective",
    "contract",
    "contract_group",
    "embedding",
    "get_op",
    "loss",
    "moe",
    "norm",
    "norm_sharded",
    "pointwise",
    "quantize",
    "register",
    "registered",
    "ring",
    "view",
]
