"""Streams: the nodes of a rank that run one after another, each behind the one before it by a data dependency.

Kernels are one stream. With `single` all collectives and sends are a second one, so that a consumer which runs one
communication at a time can not start them in an order that another rank does not have. With `per-axis` each set of mesh
axes has its own, as every process group of PyTorch's `ProcessGroupNCCL` has, and so have sends along axes;
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
    """The stream of the collectives over these axes.

    >>> stream_of(("dp", "cp"), "per-axis"), stream_of(("tp",), "single")
    ('dp cp', 'comm')
    """
    return COMMUNICATION if streams == SINGLE else " ".join(axes)


def several_streams(manifest: Mapping[str, Any], classes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some rank of a set communicates on more than one stream; `classes` are described as in the manifest."""
    streams = manifest.get("streams", SINGLE)
    used = (
        {
            stream_of(("send",) * (one["kind"] == "send") + tuple(one["axes"]), streams)
            for one in entry["communication"]
            if one["kind"] != "recv"
        }
        for entry in classes
    )
    return any(len(found) > 1 for found in used)


def chain(nodes: Sequence[TemplateNode], streams: str = SINGLE) -> tuple[TemplateNode, ...]:
    """The nodes with the order of each stream added as dependencies; with several, each knows the name of its own."""
    last: dict[str, Ref] = {}
    chained = []
    for i, node in enumerate(nodes):
        own = _on_stream(node, streams)
        before = last.get(own.queue, Ref("port", own.queue))
        chained.append(replace(own, deps=tuple(dict.fromkeys((*own.deps, before)))))
        last[own.queue] = Ref("self", i)
    return tuple(chained)


def _on_stream(node: TemplateNode, streams: str) -> TemplateNode:
    """The node with the name of its stream, where there are several for it to be on."""
    if streams == SINGLE or node.is_compute or node.kind == "recv":
        return node
    axes = node.axes if node.peer is None else ("send", *node.peer.atoms)
    return replace(node, stream=stream_of(axes, streams))
