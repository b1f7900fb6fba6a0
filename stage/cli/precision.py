"""Options of 8-bit training."""

from typing import Annotated

import typer

from stage.cli.options import STEP

__all__ = ["Fp8", "Fp8Dispatch", "Fp8ParamGather"]

Fp8 = Annotated[
    str | None,
    typer.Option(
        "--fp8",
        metavar="RECIPE",
        help="Products in 8 bits; none, delayed, tensorwise, blockwise or mxfp8.",
        rich_help_panel=STEP,
    ),
]
Fp8ParamGather = Annotated[
    bool | None,
    typer.Option(
        "--fp8-param-gather/--no-fp8-param-gather",
        help="Store and gather weights in 8 bits.",
        rich_help_panel=STEP,
    ),
]
Fp8Dispatch = Annotated[
    bool | None,
    typer.Option(
        "--fp8-dispatch/--no-fp8-dispatch", help="Send tokens to experts in 8 bits.", rich_help_panel=STEP
    ),
]
