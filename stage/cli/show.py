"""`stage show`: the counts and closed forms of a model, or a summary of a trace set."""

from typing import Annotated

import typer

from stage.cli.options import Attention, Batch, Json, Mask, Mtp, Seq, Sizes, StrategyName, complete_model
from stage.cli.output import print_json
from stage.cli.parse import parse_sizes
from stage.cli.report import print_model, print_traces
from stage.cli.source import is_trace_set, open_source
from stage.errors import StageError

__all__ = ["HELP", "show"]

HELP = """Show a model (parameters, FLOPs, closed forms) or a trace set.

\b
Examples:
  stage show llama3-8b
  stage show llama3-8b --batch 1 --seq 8192 --mask full --json
  stage show llama3-8b --strategy megatron_sp      closed forms
  stage show mixtral-8x7b --dp 4 --tp 2 --ep 8     the same at these degrees
  stage show traces/
  stage show job.stage --rank 0"""

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|DIR|URL|BUNDLE",
        help="A model, a folder of traces, or a bundle.",
        autocompletion=complete_model,
    ),
]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="One rank of a trace set, node by node.")]


def _degree(axis: str, text: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        f"--{axis}", min=1, metavar="N", help=text, rich_help_panel="Mesh"
    )
    return info


Dp = Annotated[int | None, _degree("dp", "Data parallel degree at which closed forms have their values.")]
Tp = Annotated[int | None, _degree("tp", "Tensor parallel degree.")]
Pp = Annotated[int | None, _degree("pp", "Pipeline stages.")]
Cp = Annotated[int | None, _degree("cp", "Context parallel degree.")]
Ep = Annotated[int | None, _degree("ep", "Expert parallel degree.")]
Etp = Annotated[int | None, _degree("etp", "Tensor parallel degree of the experts.")]


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
    dp: Dp = None,
    tp: Tp = None,
    pp: Pp = None,
    cp: Cp = None,
    ep: Ep = None,
    etp: Etp = None,
    rank: Rank = None,
    json: Json = False,
) -> None:
    """Print the summary of a model or of a trace set."""
    given = parse_sizes(sizes or [])
    degrees = {
        axis: n for axis, n in (("dp", dp), ("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep), ("etp", etp)) if n
    }
    if is_trace_set(target):
        if strategy is not None or batch is not None or seq is not None or given or degrees:
            raise StageError(
                f"{target}: is a trace set; --strategy, --batch, --seq, --set and degrees are for models"
            )
        from stage.summary import trace_summary

        report = trace_summary(open_source(target), rank=rank)
        (print_json if json else print_traces)(report)
        return
    if rank is not None:
        raise StageError(f"{target}: holds no traces, so it has no rank {rank}; --rank is for trace sets")
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
        **degrees,
    )
    (print_json if json else print_model)(report)
