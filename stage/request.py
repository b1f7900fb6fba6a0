"""What a user asks for, made definite: the model with its sizes, the strategy, the degrees and the batch.

Every mistake in it is found here, before any work, and said in one line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stage.catalog import default_strategy, load_strategy
from stage.errors import MeshError, StageError, StrategyError
from stage.expert_load import ExpertLoad
from stage.graph import Options
from stage.io.expert_load import resolve_expert_load
from stage.mesh import Mesh, build_mesh
from stage.model import Model, SizeValue
from stage.passes.shard import Table
from stage.pipeline.schedule import Pipeline
from stage.pipeline.schedules import plan_pipeline
from stage.precision import check_use
from stage.recomputation import MODULES, Recomputation
from stage.sizes import build_model
from stage.strategy import Strategy

__all__ = ["Request", "resolve_request"]

VOCAB_MULTIPLE = 128
FLOATS = ("bf16", "fp16", "fp32", "fp64", "fp8")


@dataclass(frozen=True)
class Request:
    """A job, definite.

    `sizes` are the model's with a padded vocabulary, and the `batch` and `seq` of one micro-batch of all ranks.
    """

    model: Model
    origin: str
    strategy: Strategy
    mesh: Mesh
    degrees: Mapping[str, int]
    sizes: Mapping[str, int]
    batch: int
    micro_batch: int
    pipeline: Pipeline
    seq: int
    dtype: str
    grad_dtype: str
    param_dtype: str
    grad_reduce: str
    clip: bool
    steps: int
    stage_layers: tuple[int, ...] | None
    placement: tuple[int, ...] | None
    expert_load: ExpertLoad | None = None

    @property
    def table(self) -> Table:
        """The rows of the strategy's `shard`, and what its `context` adds within the attention core."""
        return self.strategy.contexts.table(self.strategy.shard, self.degrees["cp"])

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.pipeline.micro_batches


def resolve_degrees(given: Mapping[str, int | None], gpus: int | None) -> dict[str, int]:
    """The degrees with `dp` filled in so that they multiply to `gpus`."""
    degrees = {axis: 1 if value is None else value for axis, value in given.items()}
    for axis, value in degrees.items():
        if value < 1:
            raise MeshError(f"{axis} = {value} is not a degree; give a whole number of at least 1")
    rest = degrees["pp"] * degrees["cp"] * degrees["tp"]
    if gpus is not None and given["dp"] is None:
        if gpus < 1 or gpus % rest:
            raise MeshError(
                f"pp x cp x tp = {rest} does not divide {gpus} gpus; change the degrees or --gpus"
            )
        degrees["dp"] = gpus // rest
    world = rest * degrees["dp"]
    if gpus is not None and world != gpus:
        text = " x ".join(f"{axis} {degrees[axis]}" for axis in ("pp", "dp", "cp", "tp"))
        raise MeshError(
            f"{text} = {world} is not {gpus} gpus; change a degree or --gpus, or leave --dp out to fill it"
        )
    return degrees


def _micro_batches(batch: int | None, micro_batch: int, dp: int) -> tuple[int, int]:
    """The batch, and how many micro-batches each pipeline runs of it."""
    share = micro_batch * dp
    batch = share if batch is None else batch
    if micro_batch < 1 or batch < 1 or batch % share:
        raise StrategyError(
            f"batch = {batch} does not divide by micro_batch x dp = {micro_batch} x {dp} = {share}; "
            f"choose a multiple of {max(share, 1)}"
        )
    return batch, batch // share


def _strategy(
    strategy: str | Path | Strategy | None, model: Model, options: Mapping[str, object]
) -> Strategy:
    if strategy is None:
        strategy = default_strategy("moe" if model.moe else "dense")
    elif not isinstance(strategy, Strategy):
        strategy = load_strategy(strategy)
    return strategy.replace(**options)


def _check_recomputation(model: Model, policy: Recomputation, asked: bool) -> None:
    """Modules to recompute must be in some layer: each that was asked for, and one of those a strategy names."""
    if not policy.modules:
        return
    nodes = [node for block in dict.fromkeys(model.layers) for node in model.graph(block).nodes]
    known = [name for name, module in MODULES.items() if any(map(module.matches, nodes))]
    for name in policy.modules:
        if name not in known and (asked or not set(known) & set(policy.modules)):
            raise StrategyError(
                f"recompute is '{policy}', but no layer of {model.name} has {name}; it has {', '.join(known)}"
            )


def _check_experts(model: Model, degrees: Mapping[str, int]) -> None:
    """Expert degrees need experts."""
    for axis in ("ep", "etp"):
        if degrees[axis] > 1 and not model.moe:
            raise StrategyError(
                f"{axis} = {degrees[axis]} shards experts, but {model.name} has none; set --{axis} 1"
            )


def _check_heads(model: Model, tp: int, ulysses: int) -> None:
    """Heads are shared out over tp, and over the ranks that exchange them, before KV heads are fitted to these."""
    for axes, degree in (("tp", tp), ("tp x ulysses", tp * ulysses)):
        heads = model.values.get("heads", degree)
        if heads % degree:
            raise StrategyError(
                f"heads = {heads} of {model.name} does not divide by {axes} = {degree}; "
                f"choose a {axes} that divides it, or other heads"
            )


def _check_part(name: str, part: int | None, axis: str, degree: int) -> None:
    """An inner size that was asked for, not only named by a strategy for whatever degree there is, must fit."""
    if part is not None and degree % part:
        raise MeshError(f"{name} = {part} does not divide {axis} = {degree}; choose one that divides it")


def _resharded(strategy: Strategy, dp: int, asked: bool) -> Strategy:
    """The strategy with a number of ranks to reshard over that is smaller than dp; all of dp is no number.

    One that was asked for, not only named by a strategy for whatever dp there is, must fit.
    """
    between = strategy.reshard_after_forward
    if isinstance(between, bool):
        return strategy
    if (asked or between < dp) and dp % between:
        raise StrategyError(
            f"reshard_after_forward = {between} does not divide dp = {dp}; choose a number that does, true or false"
        )
    return strategy if between < dp else strategy.replace(reshard_after_forward=True)


def _one_of(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise StrategyError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    return value


def _placement(placement: Sequence[int] | None, world: int) -> tuple[int, ...] | None:
    if placement is None:
        return None
    if sorted(placement) != list(range(world)):
        raise MeshError(
            f"placement lists {len(placement)} ranks; give each of the {world} ranks from 0 to {world - 1} exactly once"
        )
    return tuple(placement)


def resolve_request(
    model: str | Path | Model,
    strategy: str | Path | Strategy | None = None,
    *,
    gpus: int | None = None,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    batch: int | None = None,
    micro_batch: int = 1,
    seq: int | None = None,
    stage_layers: Sequence[int] | None = None,
    dtype: str = "bf16",
    grad_dtype: str = "fp32",
    param_dtype: str | None = None,
    clip: bool = True,
    vocab_multiple: int | None = None,
    dropout: bool = False,
    steps: int = 1,
    sizes: Mapping[str, SizeValue] | None = None,
    attention: str = "fused",
    mask: str = "causal",
    mtp: bool = False,
    placement: Sequence[int] | None = None,
    **changes: object,
) -> Request:
    """The job that these options ask for; a `StageError` in one line for what is wrong with them.

    `changes` are keys of a strategy (`schedule`, `zero`, `recompute` ...) that replace its own, where not None.
    """
    options = Options(
        _one_of("attention", attention, ("fused", "unfused")),
        _one_of("mask", mask, ("causal", "full")),
        dropout,
    )
    built, origin = build_model(model, sizes, options=options, mtp=mtp)
    chosen = _strategy(strategy, built, changes)
    degrees = resolve_degrees({"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep, "etp": etp}, gpus)
    chosen.check_degrees(degrees | {"tp_x": chosen.tp_x})
    _check_recomputation(built, chosen.recompute, changes.get("recompute") is not None)
    _check_experts(built, degrees)
    chosen.contexts.check(chosen.name, chosen.axes("seq"), attention)
    ulysses = chosen.contexts.ulysses(degrees["cp"])
    _check_heads(built, degrees["tp"], ulysses)
    check_use(chosen.fp8, dtype, built.name, dispatch=chosen.fp8_dispatch and not built.moe)
    for name, part, axis in (("dp_shard", chosen.dp_shard, "dp"), ("tp_x", chosen.tp_x, "tp")):
        if changes.get(name) is not None:
            _check_part(name, part, axis, degrees[axis])
    chosen = _resharded(chosen, degrees["dp"], changes.get("reshard_after_forward") is not None)
    values = built.values
    mesh = build_mesh(
        **degrees,
        dp_shard=_shard_degree(chosen, degrees["dp"]),
        kv_heads=values.get("kv_heads"),
        tp_x=min(chosen.tp_x, degrees["tp"]),
        ulysses=ulysses,
    )
    batch, micro_batches = _micro_batches(batch, micro_batch, degrees["dp"])
    seq = values["seq"] if seq is None else seq
    if seq < 1 or steps < 1:
        raise StageError(f"seq = {seq} and steps = {steps} must both be at least 1; change the smaller one")
    param_dtype = dtype if param_dtype is None else param_dtype
    for name, kind in (("dtype", dtype), ("grad_dtype", grad_dtype), ("param_dtype", param_dtype)):
        _one_of(name, kind, FLOATS)
    return Request(
        model=built,
        origin=origin,
        strategy=chosen,
        mesh=mesh,
        degrees=degrees,
        sizes=_padded(values, vocab_multiple, degrees["tp"])
        | {"batch": micro_batch * degrees["dp"], "seq": seq},
        batch=batch,
        micro_batch=micro_batch,
        pipeline=plan_pipeline(chosen.schedule, degrees["pp"], micro_batches, chosen.vpp),
        seq=seq,
        dtype=dtype,
        grad_dtype=grad_dtype,
        param_dtype=param_dtype,
        grad_reduce=chosen.grad_reduce or ("microbatch" if chosen.zero == 2 else "step"),
        clip=clip,
        steps=steps,
        stage_layers=None if stage_layers is None else tuple(stage_layers),
        placement=_placement(placement, mesh.world),
        expert_load=resolve_expert_load(built, chosen),
    )


def _shard_degree(strategy: Strategy, dp: int) -> int | None:
    """The inner size of data parallelism, where the strategy has one that is smaller than dp.

    It is that of HSDP, or that of the ranks among which parameters are sharded between forward and backward.
    """
    inner, between = strategy.dp_shard, strategy.reshard_after_forward
    if not isinstance(between, bool):
        if inner is not None:
            raise StrategyError(
                f"strategy {strategy.name} has dp_shard = {inner} and reshard_after_forward = {between}; "
                "give one of them, for they both split dp"
            )
        inner = between
    if inner is None or inner >= dp:
        return None
    return inner


def _padded(values: Mapping[str, int], multiple: int | None, tp: int) -> dict[str, int]:
    """The sizes with the vocabulary padded to a multiple of `multiple` x tp, as Megatron-LM pads it."""
    unit = (VOCAB_MULTIPLE if multiple is None else multiple) * tp
    if unit < 1:
        raise StageError(f"vocab multiple is {multiple}; give a whole number of at least 1")
    return {**values, "vocab": -(-values["vocab"] // unit) * unit}
