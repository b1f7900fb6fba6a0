"""What interleaved schedules share: micro-batches go through a rank's chunks in rounds.

A round is as many micro-batches as there are ranks, or a little more where that does not divide; it runs through all
chunks before the next round starts (Narayanan et al. 2021, section 2.2.2).
"""

from stage.pipeline.schedule import Action, Pipeline

__all__ = ["in_rounds", "refuse_uneven_rounds", "round_size"]


def _rounds(pipeline: Pipeline) -> int:
    return max(1, pipeline.micro_batches // pipeline.ranks)


def round_size(pipeline: Pipeline) -> int:
    """Micro-batches of a round."""
    return pipeline.micro_batches // _rounds(pipeline)


def in_rounds(pipeline: Pipeline, kind: str) -> list[Action]:
    """All actions of a kind; backwards take the chunks from last to first.

    >>> " ".join(map(str, in_rounds(Pipeline(2, 4, 2), "B")))
    '1B0 1B1 0B0 0B1 1B2 1B3 0B2 0B3'
    """
    size = round_size(pipeline)
    chunks = range(pipeline.chunks) if kind == "F" else reversed(range(pipeline.chunks))
    order = tuple(chunks)
    return [
        Action(kind, chunk, first + i)
        for first in range(0, pipeline.micro_batches, size)
        for chunk in order
        for i in range(size)
    ]


def refuse_uneven_rounds(pipeline: Pipeline) -> str | None:
    """Why the micro-batches can not be shared out evenly to rounds, or None."""
    m, ranks, rounds = pipeline.micro_batches, pipeline.ranks, _rounds(pipeline)
    if m % rounds == 0:
        return None
    return (
        f"runs micro-batches in rounds of about pp = {ranks}, but {m} do not divide into {rounds} rounds; "
        f"change --batch or --micro-batch to make it {m // ranks * ranks} or {(m // ranks + 1) * ranks}"
    )
