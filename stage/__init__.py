"""Stage: a symbolic pre-execution workload synthesizer for distributed AI systems.

The public names below are loaded on first use, so that `import stage` and the commands that compute nothing
start without sympy and numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stage import blocks as blocks
    from stage import decoder as decoder
    from stage.catalog import load_model as load_model
    from stage.catalog import load_strategy as load_strategy
    from stage.errors import ModelError as ModelError
    from stage.errors import StageError as StageError
    from stage.graph import Builder as Builder
    from stage.hf import HFConfig as HFConfig
    from stage.model import Block as Block
    from stage.model import Model as Model
    from stage.model import SizeValue as SizeValue
    from stage.strategy import Strategy as Strategy
    from stage.symbols import size as size
    from stage.synthesis import synthesize as synthesize
    from stage.tensor import Dim as Dim
    from stage.tensor import Size as Size
    from stage.tensor import Tensor as Tensor
    from stage.traceset import TraceSet as TraceSet

__version__ = "0.1.0"

_HOME = {
    "Block": "stage.model",
    "Builder": "stage.graph",
    "Dim": "stage.tensor",
    "HFConfig": "stage.hf",
    "Model": "stage.model",
    "ModelError": "stage.errors",
    "Size": "stage.tensor",
    "SizeValue": "stage.model",
    "StageError": "stage.errors",
    "Strategy": "stage.strategy",
    "Tensor": "stage.tensor",
    "TraceSet": "stage.traceset",
    "load_model": "stage.catalog",
    "load_strategy": "stage.catalog",
    "size": "stage.symbols",
    "synthesize": "stage.synthesis",
}

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
    "Strategy",
    "Tensor",
    "TraceSet",
    "__version__",
    "blocks",
    "decoder",
    "load_model",
    "load_strategy",
    "size",
    "synthesize",
]


def __getattr__(name: str) -> Any:
    """The public name `name`, imported from the module that defines it."""
    if name in ("blocks", "decoder"):
        return import_module(f"stage.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'stage' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
