"""Parallelism strategies: which mesh axes shard each tensor dim, and how a step is organised.

A strategy is a TOML file: a table *dim -> axes* and a few names. For an op, going down the table, each dim
that the op has takes those of its axes that are still free in this op, so the order of the rows is their
priority.

Invariants:
    * every key, dim, axis and name is a known one, and the message for any other lists the known ones;
    * an axis appears at most once in a row, and the mesh is listed outermost first;
    * an axis that a strategy does not mention has degree 1 (`check_degrees`).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from stage.context import Context, parse_context
from stage.errors import StrategyError
from stage.load_option import BALANCED
from stage.precision import check_precision
from stage.recomputation import NO_RECOMPUTATION, Recomputation
from stage.strategy_keys import AXES, DIMS, MESH, SCHEDULES, check_keys

__all__ = ["AXES", "DIMS", "MESH", "SCHEDULES", "Strategy", "parse_strategy"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to split a model over a mesh, as read from a file and changed by options.

    >>> strategy = parse_strategy('shard = {heads = ["tp"], batch = ["dp"]}', "mine", "mine.toml")
    >>> strategy.axes("heads"), strategy.axes("seq"), strategy.replace(zero=3, schedule=None).zero
    (('tp',), (), 3)
    >>> strategy.replace(schedule="zigzag")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    stage.errors.StrategyError: strategy mine: schedule is 'zigzag'; known: 1f1b, gpipe, interleaved, looped-bfs, ...
    """

    name: str
    shard: tuple[tuple[str, tuple[str, ...]], ...]
    title: str = ""
    source: str = ""
    mesh: tuple[str, ...] = MESH
    schedule: str = "1f1b"
    vpp: int | None = None  # virtual stages a rank; None is the least that the schedule can have
    recompute: Recomputation = NO_RECOMPUTATION
    zero: int = 0  # sharded over data parallel ranks: 1 optimizer states, 2 also gradients, 3 also parameters
    regather: tuple[str, ...] = ()  # axes whose gathered inputs are gathered again in backward, not kept
    overlap_grad: bool = False  # a bucket's gradients are reduced as soon as they are complete
    bucket_size: int = 0  # elements of a gradient bucket; 0 is one bucket
    dp_shard: int | None = None  # inner size of dp within which parameters are sharded; None is all of dp
    tp_x: int = 1  # inner size of tp = tp_y x tp_x, over which d_model may be sharded
    fuse: bool = False  # q, k, v and gate, up are one matrix multiplication each
    reshard_after_forward: bool | int = (
        True  # zero 3: False keeps what forward gathered, a number shards it over as many
    )
    context: str = "all_gather"  # how attention meets keys of other cp ranks; `stage.context` has the forms
    prefetch: int = 1  # zero 3: how many blocks ahead of the compute parameters are gathered
    grad_reduce: str | None = (
        None  # gradients are reduced once a `step` or `microbatch`; None is by the zero stage
    )
    context_balance: str = "zigzag"  # parts of a sequence that have equal causal work, or "none": consecutive
    tp_overlap_chunks: int = 1  # of a collective next to a matrix multiplication, and of that
    moe_shared_expert_overlap: bool = False  # shared experts run while tokens are dispatched to the others
    streams: str = "single"  # of communication: one, or one for each set of axes
    bucket_first_stage: bool = False  # only the first pipeline stage cuts its gradients into buckets
    expert_load: str = BALANCED  # tokens of the experts: balanced, zipf:EXPONENT, or a file of histograms
    seed: int | None = None  # which experts a drawn load makes popular; None is 0
    capacity_factor: float | None = None  # an expert drops what exceeds so many times its balanced share
    pad_to_capacity: bool = False  # every expert computes its capacity, whatever it got
    alltoall: str = "collective"  # or "p2p": its pairwise sends and receives
    fp8: str = "none"  # recipe by which products with weights are computed in 8 bits
    fp8_param_gather: bool = False  # such weights are stored and gathered over data parallel ranks in 8 bits
    fp8_dispatch: bool = False  # tokens and their gradients are sent to experts in 8 bits
    default_for: tuple[str, ...] = ()  # architectures that take this strategy when none is named

    def __post_init__(self) -> None:
        for axis in (axis for _, row in self.shard for axis in row):
            if axis in MESH and axis not in self.mesh:
                raise StrategyError(
                    f"strategy {self.name}: [shard] uses {axis}, which is not in mesh = {list(self.mesh)}; "
                    "add it there"
                )
        check_precision(
            f"strategy {self.name}", self.fp8, self.zero, stored=self.fp8_param_gather, sent=self.fp8_dispatch
        )
        if self.zero < 3 and (self.reshard_after_forward is not True or self.prefetch != 1):
            key = "prefetch" if self.prefetch != 1 else "reshard_after_forward"
            raise StrategyError(
                f"strategy {self.name}: {key} = {str(getattr(self, key)).lower()} is of gathered parameters, but "
                f"zero = {self.zero} gathers none before a block runs; set zero = 3, or leave it out"
            )

    def axes(self, dim: str) -> tuple[str, ...]:
        """The axes that may shard `dim`, major first; none for a dim that the table does not have."""
        return dict(self.shard).get(dim, ())

    @property
    def contexts(self) -> Context:
        """How attention meets the keys of other ranks."""
        return parse_context(self.context)

    def replace(self, **options: object) -> "Strategy":
        """This strategy with the options that are not None set, checked as the file's keys are."""
        given = {key: value for key, value in options.items() if value is not None}
        current = {field.name: getattr(self, field.name) for field in fields(self)}
        return Strategy(**current | check_keys(given, f"strategy {self.name}"))

    def check_degrees(self, degrees: Mapping[str, int]) -> None:
        """A `StrategyError` for an axis of a degree above 1 that this strategy does not use."""
        used = {*self.mesh, *(axis for _, row in self.shard for axis in row)}
        for axis, degree in degrees.items():
            if degree > 1 and axis not in used:
                known = ", ".join(axis for axis in (*MESH, "ep", "etp") if axis in used)
                raise StrategyError(
                    f"strategy {self.name} does not use the axis {axis}, but its degree is {degree}; "
                    f"leave it at 1 or take a strategy that uses it (this one uses {known})"
                )


def parse_strategy(text: str, name: str, origin: str) -> Strategy:
    """The strategy in the TOML `text` of the file `origin`; a `StrategyError` names the file and the key."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as err:  # TOMLDecodeError, and absurd numbers or nesting
        raise StrategyError(f"{origin}: not valid TOML: {err}") from err
    if "shard" not in table:
        raise StrategyError(f"{origin}: table [shard] is missing; it says which axes shard each dim")
    return Strategy(name=name, **check_keys(table, origin))
