"""What the fixed widths of fields in a trace can hold; a job beyond them is refused before anything is made."""

from stage.errors import TraceError
from stage.trace.image import CHUNK_WIDTH, LAYER_WIDTH, MICRO_BATCH_WIDTH, PEER_WIDTH, STEP_WIDTH

__all__ = ["check_capacity", "check_tags"]

TAG_BITS = 31
"""A tag is a positive int32."""


def check_capacity(*, ranks: int, layers: int, micro_batches: int, steps: int, chunks: int) -> None:
    """Raise a `TraceError` that names the first number which is too large for its field.

    >>> check_capacity(ranks=131072, layers=126, micro_batches=16, steps=1, chunks=1)
    >>> check_capacity(ranks=8, layers=20000, micro_batches=1, steps=1, chunks=1)
    Traceback (most recent call last):
    stage.errors.TraceError: layers = 20000 is more than the 16384 that a trace has room for; choose fewer
    """
    widths = {
        "ranks": (ranks, PEER_WIDTH),
        "layers": (layers, LAYER_WIDTH),
        "micro_batches": (micro_batches, MICRO_BATCH_WIDTH),
        "steps": (steps, STEP_WIDTH),
        "vpp": (chunks, CHUNK_WIDTH),
    }
    rooms = {name: (value, 1 << 7 * width) for name, (value, width) in widths.items()}
    rooms["2 x steps x micro_batches x vpp"] = (2 * steps * micro_batches * chunks, 1 << TAG_BITS)
    for name, (value, room) in rooms.items():
        if value > room:
            raise TraceError(
                f"{name} = {value} is more than the {room} that a trace has room for; choose fewer"
            )


def check_tags(*, micro_batches: int, steps: int, chunks: int, blocks: int, messages: int) -> None:
    """Raise a `TraceError` if messages within blocks, behind those between stages, need more tags than there are.

    `blocks` are those of a rank, each of which has up to so many `messages` for a micro-batch.
    """
    tags = steps * micro_batches * (2 * chunks + blocks * messages)
    if tags > 1 << TAG_BITS:
        raise TraceError(
            f"steps x micro_batches x blocks x messages of a block = {steps} x {micro_batches} x {blocks} x {messages} "
            f"needs {tags} tags, more than the {1 << TAG_BITS} that a trace has room for; choose fewer"
        )
