"""`stage synth`: a trace set from a model and a strategy."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

import stage
from stage.cli.options import (
    Attention,
    Batch,
    Jobs,
    Json,
    Mask,
    ModelName,
    Mtp,
    Resume,
    Seq,
    Sizes,
    StrategyName,
)
from stage.cli.output import interruptible, print_json, print_report, print_warning, progress_bar
from stage.cli.parse import parse_ranks, parse_sizes, parse_stage_layers, read_placement
from stage.errors import StageError

__all__ = ["HELP", "synth"]

HELP = """Synthesize one Chakra trace a rank.

\b
Examples:
  stage synth llama3-8b --gpus 64 --tp 4 --pp 4 --batch 128 --out traces/
  stage synth config.json --strategy fsdp --gpus 32 --batch 64 --out t/
  stage synth my_model.py --strategy my_strategy.toml \\
      --set d_model=20480,layers=120 --gpus 8 --batch 8 --out t/
  stage synth mixtral-8x7b --gpus 16 --ep 4 --tp 2 --batch 16 --out t/
  stage synth llama3-8b --gpus 64 --batch 128 --format bundle --out j.stage"""

MESH, STEP, OUTPUT = "Mesh", "Step", "Output"


def _degree(flag: str, text: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(flag, min=1, metavar="N", help=text, rich_help_panel=MESH)
    return info


Gpus = Annotated[int | None, _degree("--gpus", "All ranks; fills dp.")]
Dp = Annotated[int | None, _degree("--dp", "Data parallel degree.")]
Tp = Annotated[int, _degree("--tp", "Tensor parallel degree.")]
Pp = Annotated[int, _degree("--pp", "Pipeline stages.")]
Cp = Annotated[int, _degree("--cp", "Context parallel degree.")]
Ep = Annotated[int, _degree("--ep", "Expert parallel degree, carved out of dp x cp x tp.")]
Etp = Annotated[int, _degree("--etp", "Tensor parallel degree of the experts.")]
Vpp = Annotated[
    int | None, _degree("--vpp", "Virtual pipeline stages a rank; by default the schedule's least.")
]
DpShard = Annotated[int | None, _degree("--dp-shard", "Inner size of dp that shards (HSDP).")]
Placement = Annotated[
    Path | None,
    typer.Option(
        "--placement", metavar="FILE", help="The rank of each place of the mesh.", rich_help_panel=MESH
    ),
]
MicroBatch = Annotated[
    int,
    typer.Option(
        "--micro-batch", min=1, metavar="N", help="Sequences a microbatch, a rank.", rich_help_panel=STEP
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Pipeline schedule; 1f1b, gpipe, interleaved, looped-bfs, zb-h1, zb-v or dualpipe-v.",
        rich_help_panel=STEP,
    ),
]
Zero = Annotated[
    int | None,
    typer.Option(
        "--zero", metavar="0|1|2|3", help="Shard optimizer, gradients, parameters.", rich_help_panel=STEP
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute", metavar="none|full|selective", help="Activations computed again.", rich_help_panel=STEP
    ),
]
StageLayers = Annotated[
    str | None,
    typer.Option("--stage-layers", metavar="7,8x14,7", help="Layers of each stage.", rich_help_panel=STEP),
]
GradReduce = Annotated[
    Literal["step", "microbatch"],
    typer.Option("--grad-reduce", help="How often gradients are reduced.", rich_help_panel=STEP),
]
BucketSize = Annotated[
    int | None,
    typer.Option(
        "--bucket-size",
        min=0,
        metavar="N",
        help="Elements of a gradient bucket; 0 is one bucket.",
        rich_help_panel=STEP,
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="Of parameters and activations.", rich_help_panel=STEP)]
GradDtype = Annotated[str, typer.Option("--grad-dtype", help="Of gradients.", rich_help_panel=STEP)]
Clip = Annotated[
    bool, typer.Option("--clip/--no-clip", help="Reduce the norm of the gradients.", rich_help_panel=STEP)
]
Dropout = Annotated[bool, typer.Option("--dropout", help="Store dropout masks.", rich_help_panel=STEP)]
VocabMultiple = Annotated[
    int | None,
    typer.Option(
        "--vocab-multiple",
        min=1,
        metavar="N",
        help="Pad vocab to a multiple; by default 128 tp.",
        rich_help_panel=STEP,
    ),
]
Steps = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Training steps.", rich_help_panel=STEP)
]
Ranks = Annotated[
    str | None,
    typer.Option("--ranks", metavar="0-7,64", help="Write only these ranks.", rich_help_panel=OUTPUT),
]
Out = Annotated[
    str,
    typer.Option("--out", metavar="PATH|URL", help="The folder or bundle to write.", rich_help_panel=OUTPUT),
]
Format = Annotated[
    Literal["directory", "bundle"],
    typer.Option("--format", help="A file a rank, or one for all of them.", rich_help_panel=OUTPUT),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.", rich_help_panel=OUTPUT)]
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask", metavar="ADDRESS", help="Write on a Dask cluster: tcp://host:8786.", rich_help_panel=OUTPUT
    ),
]


def synth(
    model: ModelName,
    *,
    out: Out,
    strategy: StrategyName = None,
    sizes: Sizes = None,
    batch: Batch = None,
    seq: Seq = None,
    mask: Mask = "causal",
    attention: Attention = "fused",
    mtp: Mtp = False,
    gpus: Gpus = None,
    dp: Dp = None,
    tp: Tp = 1,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    vpp: Vpp = None,
    dp_shard: DpShard = None,
    placement: Placement = None,
    micro_batch: MicroBatch = 1,
    schedule: Schedule = None,
    zero: Zero = None,
    recompute: Recompute = None,
    stage_layers: StageLayers = None,
    grad_reduce: GradReduce = "step",
    bucket_size: BucketSize = None,
    dtype: Dtype = "bf16",
    grad_dtype: GradDtype = "fp32",
    clip: Clip = True,
    dropout: Dropout = False,
    vocab_multiple: VocabMultiple = None,
    steps: Steps = 1,
    ranks: Ranks = None,
    form: Format = "directory",
    force: Force = False,
    resume: Resume = False,
    jobs: Jobs = 1,
    dask: Dask = None,
    json: Json = False,
) -> None:
    """Synthesize a trace set, write it, and print what was written."""
    started = time.perf_counter()
    wanted = None if ranks is None else parse_ranks(ranks)
    if wanted is not None and form == "bundle":
        raise StageError("--ranks: a bundle holds all ranks; leave it out, and choose them with stage unpack")
    if form == "bundle" and (resume or jobs > 1 or dask is not None):
        raise StageError("--format bundle writes one small file: leave out --resume, --jobs and --dask")
    if not out:
        raise StageError("--out is empty; name the folder, file or URL to write")
    traces = stage.synthesize(
        model,
        strategy,
        gpus=gpus,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        dp_shard=dp_shard,
        batch=batch,
        micro_batch=micro_batch,
        seq=seq,
        schedule=schedule,
        zero=zero,
        recompute=recompute,
        stage_layers=None if stage_layers is None else parse_stage_layers(stage_layers),
        grad_reduce=grad_reduce,
        dtype=dtype,
        grad_dtype=grad_dtype,
        clip=clip,
        vocab_multiple=vocab_multiple,
        dropout=dropout,
        steps=steps,
        sizes=parse_sizes(sizes or []),
        attention=attention,
        mask=mask,
        mtp=mtp,
        bucket_size=bucket_size,
        placement=None if placement is None else read_placement(placement),
    )
    with interruptible(), progress_bar("writing traces", quiet=json) as progress:
        if form == "bundle":
            summary = traces.write_bundle(out, force=force, progress=progress)
        else:
            summary = traces.write(
                out, ranks=wanted, force=force, resume=resume, jobs=jobs, dask=dask, progress=progress
            )
    report = {"out": out, **summary, "seconds": round(time.perf_counter() - started, 3)}
    if json:
        print_json(report | {"warnings": traces.warnings})
        return
    print_report(report)
    if traces.warnings:
        print_warning("; ".join(traces.warnings))
