"""`stage show`: the counts and closed forms of a model, or a summary of a trace set."""

from pathlib import Path
from typing import Annotated

import typer

from stage.cli.options import Attention, Batch, Json, Mask, Mtp, Seq, Sizes, StrategyName, complete_model
from stage.cli.output import print_json, print_report
from stage.cli.parse import parse_sizes
from stage.cli.source import is_trace_set, open_source
from stage.errors import StageError

__all__ = ["HELP", "show"]

HELP = """Show a model (parameters, FLOPs, closed forms) or a trace set.

\b
Examples:
  stage show llama3-8b
  stage show llama3-8b --batch 1 --seq 8192 --mask full --json
  stage show llama3-8b --strategy megatron_sp      closed forms
  stage show traces/
  stage show job.stage --rank 0"""

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|DIR|BUNDLE",
        help="A model, a folder of traces, or a bundle.",
        autocompletion=complete_model,
    ),
]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="One rank of a trace set, node by node.")]


def show(
    target: Target,
    *,
    strategy: StrategyName = None,
    batch: Batch = None,
    seq: Seq = None,
    mask: Mask = "causal",
    attention: Attention = "fused",
    mtp: Mtp = False,
    sizes: Sizes = None,
    rank: Rank = None,
    json: Json = False,
) -> None:
    """Print the summary of a model or of a trace set."""
    given = parse_sizes(sizes or [])
    if is_trace_set(Path(target)):
        if strategy is not None or batch is not None or seq is not None or given:
            raise StageError(
                f"{target}: is a folder of traces; --strategy, --batch, --seq and --set are for models"
            )
        from stage.summary import trace_summary

        report = trace_summary(open_source(Path(target)), rank=rank)
    elif rank is not None:
        raise StageError(
            f"{target}: holds no traces, so it has no rank {rank}; --rank is for folders of traces"
        )
    else:
        from stage.summary import model_summary

        report = model_summary(
            target,
            strategy=strategy,
            batch=batch,
            seq=seq,
            mask=mask,
            attention=attention,
            mtp=mtp,
            sizes=given,
        )
    if json:
        print_json(report)
    else:
        print_report(report)
