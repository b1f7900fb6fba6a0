"""Options of a job that say what of its communication overlaps, and with what."""

from typing import Annotated

import typer

__all__ = ["OverlapChunks", "SharedOverlap", "Streams"]

STEP = "Step"

OverlapChunks = Annotated[
    int | None,
    typer.Option(
        "--overlap-chunks",
        min=1,
        metavar="N",
        help="Split collectives next to matrix multiplications in so many chunks that overlap.",
        rich_help_panel=STEP,
    ),
]
SharedOverlap = Annotated[
    bool | None,
    typer.Option(
        "--moe-shared-expert-overlap/--no-moe-shared-expert-overlap",
        help="Run shared experts while tokens are dispatched to the others.",
        rich_help_panel=STEP,
    ),
]
Streams = Annotated[
    str | None,
    typer.Option(
        "--streams",
        metavar="single|per-axis",
        help="Communication one after another, or on a stream for each set of axes.",
        rich_help_panel=STEP,
    ),
]
