"""The options of a job, declared once for every command that makes one from a model and a strategy."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from stage.cli.options import MESH, STEP, Attention, Batch, Mask, Mtp, Seq, Sizes, StrategyName
from stage.cli.overlap import OverlapChunks, SharedOverlap, Streams
from stage.cli.parse import parse_reshard, parse_sizes, parse_stage_layers, read_placement
from stage.cli.precision import Fp8, Fp8Dispatch, Fp8ParamGather

__all__ = ["JobOptions", "takes_job"]


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
TpX = Annotated[
    int | None, _degree("--tp-x", "Inner size of tp that shards d_model (2-D tensor parallelism).")
]
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
        "--recompute",
        metavar="POLICY",
        help="Computed again in backward: none, full, selective, every:2, ops:norm,act.",
        rich_help_panel=STEP,
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="How attention meets keys of other cp ranks; all_gather, ring, ulysses or ring:AxB.",
        rich_help_panel=STEP,
    ),
]
ContextBalance = Annotated[
    str | None,
    typer.Option(
        "--context-balance",
        metavar="zigzag|none",
        help="Parts of the sequence over cp: of equal work, or consecutive.",
        rich_help_panel=STEP,
    ),
]
StageLayers = Annotated[
    str | None,
    typer.Option("--stage-layers", metavar="7,8x14,7", help="Layers of each stage.", rich_help_panel=STEP),
]
Reshard = Annotated[
    str | None,
    typer.Option(
        "--reshard-after-forward",
        metavar="true|false|N",
        help="With --zero 3: drop gathered parameters, keep them, or shard them over N ranks.",
        rich_help_panel=STEP,
    ),
]
Prefetch = Annotated[
    int | None,
    typer.Option(
        "--prefetch",
        min=0,
        metavar="N",
        help="With --zero 3: gather parameters N blocks ahead.",
        rich_help_panel=STEP,
    ),
]
GradReduce = Annotated[
    Literal["step", "microbatch"] | None,
    typer.Option(
        "--grad-reduce",
        help="How often gradients are reduced; with --zero 2 each microbatch, else each step.",
        rich_help_panel=STEP,
    ),
]
OverlapGrad = Annotated[
    bool | None,
    typer.Option(
        "--overlap-grad/--no-overlap-grad",
        help="Reduce gradients as soon as they are complete.",
        rich_help_panel=STEP,
    ),
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
Dtype = Annotated[str, typer.Option("--dtype", help="Of computation and activations.", rich_help_panel=STEP)]
GradDtype = Annotated[str, typer.Option("--grad-dtype", help="Of gradients.", rich_help_panel=STEP)]
ParamDtype = Annotated[
    str | None,
    typer.Option(
        "--param-dtype",
        help="Of parameters as stored and gathered; by default --dtype.",
        rich_help_panel=STEP,
    ),
]
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
        help="Pad vocab to a multiple of N tp; by default N is 128.",
        rich_help_panel=STEP,
    ),
]
Steps = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Training steps.", rich_help_panel=STEP)
]
ExpertLoad = Annotated[
    str | None,
    typer.Option(
        "--expert-load",
        metavar="FILE|zipf:1.1",
        help="Tokens of the experts: a .csv or .json histogram, or drawn; else balanced.",
        rich_help_panel=STEP,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, metavar="N", help="Which experts a drawn load makes popular.", rich_help_panel=STEP
    ),
]
CapacityFactor = Annotated[
    float | None,
    typer.Option(
        "--capacity-factor",
        metavar="F",
        help="Drop an expert's tokens above F times its balanced share.",
        rich_help_panel=STEP,
    ),
]
PadToCapacity = Annotated[
    bool | None,
    typer.Option("--pad-to-capacity", help="Every expert computes its whole capacity.", rich_help_panel=STEP),
]
AllToAll = Annotated[
    str | None,
    typer.Option(
        "--alltoall",
        metavar="collective|p2p",
        help="An all-to-all as one node, or as its pairwise sends and receives.",
        rich_help_panel=STEP,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What a job is made of beside its model: one field an option, in the order of the help."""

    strategy: StrategyName = None
    sizes: Sizes = None
    batch: Batch = None
    seq: Seq = None
    mask: Mask = "causal"
    attention: Attention = "fused"
    mtp: Mtp = False
    gpus: Gpus = None
    dp: Dp = None
    tp: Tp = 1
    pp: Pp = 1
    cp: Cp = 1
    ep: Ep = 1
    etp: Etp = 1
    vpp: Vpp = None
    dp_shard: DpShard = None
    tp_x: TpX = None
    placement: Placement = None
    micro_batch: MicroBatch = 1
    schedule: Schedule = None
    zero: Zero = None
    context: Context = None
    recompute: Recompute = None
    context_balance: ContextBalance = None
    expert_load: ExpertLoad = None
    seed: Seed = None
    capacity_factor: CapacityFactor = None
    pad_to_capacity: PadToCapacity = None
    alltoall: AllToAll = None
    stage_layers: StageLayers = None
    reshard_after_forward: Reshard = None
    prefetch: Prefetch = None
    grad_reduce: GradReduce = None
    overlap_grad: OverlapGrad = None
    bucket_size: BucketSize = None
    dtype: Dtype = "bf16"
    grad_dtype: GradDtype = "fp32"
    param_dtype: ParamDtype = None
    fp8: Fp8 = None
    fp8_param_gather: Fp8ParamGather = None
    fp8_dispatch: Fp8Dispatch = None
    clip: Clip = True
    dropout: Dropout = False
    vocab_multiple: VocabMultiple = None
    steps: Steps = 1
    tp_overlap_chunks: OverlapChunks = None
    moe_shared_expert_overlap: SharedOverlap = None
    streams: Streams = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `stage.synthesize`: the texts among the options are parsed."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        layers, placement, reshard = self.stage_layers, self.placement, self.reshard_after_forward
        return given | {
            "sizes": parse_sizes(self.sizes or []),
            "stage_layers": None if layers is None else parse_stage_layers(layers),
            "reshard_after_forward": None if reshard is None else parse_reshard(reshard),
            "placement": None if placement is None else read_placement(placement),
        }


def takes_job(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a job in place of its keyword parameter `job`."""
    hints = get_type_hints(JobOptions, include_extras=True)
    options = {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(JobOptions)
    }
    own = inspect.signature(command, eval_str=True)
    parameters = [
        parameter
        for name, kept in own.parameters.items()
        for parameter in (options.values() if name == "job" else [kept])
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        job = JobOptions(**{name: given.pop(name) for name in options})
        command(**given, job=job)

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
