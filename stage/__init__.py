"""Stage: a symbolic pre-execution workload synthesizer for distributed AI systems.

The public names below are loaded on first use, so that `import stage` and the commands that compute nothing
start without sympy and numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stage.catalog import load_model as load_model
    from stage.errors import StageError as StageError
    from stage.hf import HFConfig as HFConfig
    from stage.strategy import Strategy as Strategy
    from stage.strategy import load_strategy as load_strategy

__version__ = "0.1.0"

_HOME = {
    "HFConfig": "stage.hf",
    "StageError": "stage.errors",
    "Strategy": "stage.strategy",
    "load_model": "stage.catalog",
    "load_strategy": "stage.strategy",
}

__all__ = ["HFConfig", "StageError", "Strategy", "__version__", "load_model", "load_strategy"]


def __getattr__(name: str) -> Any:
    """The public name `name`, imported from the module that defines it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'stage' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
