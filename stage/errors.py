"""Errors that a user of Stage can cause.

Every message is one line with three parts: what was found, where, and what to do about it. A mistake of
ours is never a `StageError`; it surfaces as an assertion or a traceback.
"""

__all__ = [
    "GraphError",
    "LayoutError",
    "MeshError",
    "ModelError",
    "StageError",
    "StrategyError",
    "TraceError",
]


class StageError(Exception):
    """A mistake in the input: its text says what was found, where, and what to do."""


class MeshError(StageError):
    """Degrees of parallelism that do not form a mesh of the ranks."""


class LayoutError(StageError):
    """A placement of a tensor that is impossible, or that an op cannot work on."""


class GraphError(StageError):
    """A tensor program that is not well formed."""


class ModelError(StageError):
    """A model, its sizes or its configuration file."""


class StrategyError(StageError):
    """A strategy file or an option that chooses how work is split."""


class TraceError(StageError):
    """A trace, a trace set or a bundle that cannot be read or written."""
