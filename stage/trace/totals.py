"""What a class's program amounts to: nodes, work, and bytes handed to each kind of communication."""

from typing import Any

from stage.trace.program import Program

__all__ = ["totals"]


def totals(program: Program) -> dict[str, Any]:
    """Nodes of a program, the work they do, and the bytes they hand to each kind of communication."""
    flops = matmul = model = moved = 0
    communication: dict[str, dict[str, int]] = {}
    for template, count in zip(program.templates, program.counts(), strict=True):
        for node in template.nodes:
            if node.is_compute:
                flops += node.flops * count
                matmul += node.flops * count * node.matmul
                model += node.model_flops * count
                moved += node.bytes * count
            else:
                entry = communication.setdefault(node.kind, {"count": 0, "bytes": 0})
                entry["count"] += count
                entry["bytes"] += node.bytes * count
    return {
        "nodes": program.nodes,
        "num_ops": flops,
        "matmul_ops": matmul,
        "model_flops": model,
        "memory_bytes": moved,
        "communication": dict(sorted(communication.items())),
    }
