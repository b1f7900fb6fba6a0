"""What a class's program amounts to: nodes, work, the bytes handed to each kind of communication, and its tags."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stage.trace.program import COLUMNS, Program
from stage.trace.template import Template

__all__ = ["totals"]

TAG = COLUMNS.index("tag")


def totals(program: Program, group_size: Callable[[tuple[str, ...]], int]) -> dict[str, Any]:
    """Nodes of a program, the work they do, and what they hand to each kind of communication over each set of axes.

    `group_size` says how many ranks a group over some axes has; a message has two. `largest_tag` is 0 without messages.
    """
    flops = matmul = model = moved = 0
    communication: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for template, count in zip(program.templates, program.counts(), strict=True):
        for node in template.nodes:
            if node.is_compute:
                flops += node.flops * count
                matmul += node.flops * count * node.matmul
                model += node.model_flops * count
                moved += node.bytes * count
            else:
                entry = communication.setdefault((node.kind, node.axes), [0, 0])
                entry[0] += count
                entry[1] += node.bytes * count
    return {
        "nodes": program.nodes,
        "num_ops": flops,
        "matmul_ops": matmul,
        "model_flops": model,
        "memory_bytes": moved,
        "communication": [
            {
                "kind": kind,
                "axes": list(axes),
                "group": 2 if kind in ("send", "recv") else group_size(axes),
                "count": n,
                "bytes": size,
            }
            for (kind, axes), (n, size) in sorted(communication.items())
        ],
        "largest_tag": max(
            (_largest(*both) for both in zip(program.templates, program.instances, strict=True)), default=0
        ),
    }


def _largest(template: Template, rows: NDArray[np.int64]) -> int:
    """The largest tag of the messages of a template's instances."""
    offsets = [node.tag_offset for node in template.nodes if node.peer is not None]
    return int(rows[:, TAG].max(initial=0)) + max(offsets) if offsets else 0
