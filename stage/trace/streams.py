"""Streams: the nodes of a rank that run one after another, each behind the one before it by a data dependency.

Kernels are one stream. With `single` all collectives and sends are a second one, so that a consumer which runs one
communication at a time can not start them in an order that another rank does not have. With `per-axis` each set of mesh
axes has its own, as every process group of PyTorch's `ProcessGroupNCCL` has, and sends are apart from collectives;
communications on different streams then overlap. Receives take no stream: they wait for their messages, each behind
those of its channel.

Invariant: whatever the streams, dependencies follow the program order of the rank, so a run that issues each stream in
that order comes to its end if a run in program order does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stage.trace.template import COMMUNICATION, Ref, TemplateNode

__all__ = ["PER_AXIS", "SINGLE", "chain", "several_streams", "stream_of"]

SINGLE, PER_AXIS = "single", "per-axis"


def stream_of(axes: tuple[str, ...], streams: str) -> str:
    """The queue of the collectives over these axes, or of sends for none.

    >>> stream_of(("dp", "cp"), "per-axis"), stream_of((), "per-axis"), stream_of(("tp",), "single")
    ('dp cp', 'send', 'comm')
    """
    if streams == SINGLE:
        return COMMUNICATION
    return " ".join(axes) or "send"


def several_streams(manifest: Mapping[str, Any], classes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some rank of a set communicates on more than one stream; `classes` are described as in the manifest."""
    streams = manifest.get("streams", SINGLE)
    used = (
        {stream_of(tuple(one["axes"]), streams) for one in entry["communication"] if one["kind"] != "recv"}
        for entry in classes
    )
    return any(len(found) > 1 for found in used)


def chain(nodes: Sequence[TemplateNode], streams: str = SINGLE) -> tuple[TemplateNode, ...]:
    """The nodes with the order of each stream added as dependencies; with several, each knows the name of its own."""
    last: dict[str, Ref] = {}
    chained = []
    for i, node in enumerate(nodes):
        if streams != SINGLE and not (node.is_compute or node.kind == "recv"):
            node = replace(node, stream=stream_of(node.axes, streams))
        before = last.get(node.queue, Ref("port", node.queue))
        chained.append(replace(node, deps=tuple(dict.fromkeys((*node.deps, before)))))
        last[node.queue] = Ref("self", i)
    return tuple(chained)
