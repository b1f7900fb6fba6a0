"""What a command is given to read: a folder of traces, the URL of one, or a bundle."""

from pathlib import Path
from typing import TYPE_CHECKING

from stage.io.store import is_url, local_path

if TYPE_CHECKING:
    from stage.traceset import TraceSet

__all__ = ["is_trace_set", "open_source"]


def is_trace_set(place: str) -> bool:
    """Whether a place is a folder of traces, a URL or a bundle, and nothing else that a command takes."""
    path = Path(place)
    if is_url(place):
        return True
    if path.is_file():
        from stage.io.container import is_container

        return is_container(path)
    return path.is_dir() and ((path / "manifest.json").exists() or any(path.glob("*.et")))


def open_source(place: str) -> "str | TraceSet":
    """The trace set in a bundle, or the place of another as it is."""
    path = local_path(place)
    if path is None or not path.is_file():
        return place
    from stage.traceset import TraceSet

    traces = TraceSet.open(place)
    assert isinstance(traces, TraceSet)  # what is a file is a bundle
    return traces
