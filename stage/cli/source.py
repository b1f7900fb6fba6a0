"""What a command is given to read: a folder of traces, or a bundle."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stage.traceset import TraceSet

__all__ = ["is_trace_set", "open_source"]


def is_trace_set(path: Path) -> bool:
    """Whether a path is a folder of traces or a bundle, and nothing else that a command takes."""
    if path.is_file():
        from stage.io.container import is_container

        return is_container(path)
    return path.is_dir() and ((path / "manifest.json").exists() or any(path.glob("*.et")))


def open_source(path: Path) -> "Path | TraceSet":
    """The trace set in a bundle, or the path of a folder as it is."""
    if not path.is_file():
        return path
    from stage.traceset import TraceSet

    traces = TraceSet.open(path)
    assert isinstance(traces, TraceSet)  # what is a file is a bundle
    return traces
