"""Stage: a symbolic pre-execution workload synthesizer for distributed AI systems.

The public names are imported when they are first used, so that `import stage` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stage import blocks, decoder
    from stage.errors import ModelError, StageError
    from stage.graph import Builder
    from stage.hf import HFConfig
    from stage.model import Block, Model, SizeValue
    from stage.symbols import size
    from stage.synthesis import synthesize
    from stage.tensor import Dim, Size, Tensor
    from stage.trace.traceset import TraceSet

__all__ = [
    "Block",
    "Builder",
    "Dim",
    "HFConfig",
    "Model",
    "ModelError",
    "Size",
    "SizeValue",
    "StageError",
    "Tensor",
    "TraceSet",
    "blocks",
    "decoder",
    "size",
    "synthesize",
]

__version__ = "0.1.0"

_HOMES = {
    "Block": "stage.model",
    "Builder": "stage.graph",
    "Dim": "stage.tensor",
    "HFConfig": "stage.hf",
    "Model": "stage.model",
    "ModelError": "stage.errors",
    "Size": "stage.tensor",
    "SizeValue": "stage.model",
    "StageError": "stage.errors",
    "Tensor": "stage.tensor",
    "TraceSet": "stage.trace.traceset",
    "size": "stage.symbols",
    "synthesize": "stage.synthesis",
}


def __getattr__(name: str) -> Any:
    """The public name `name`, from the module that defines it."""
    if name in ("blocks", "decoder"):
        return import_module(f"stage.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stage' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
