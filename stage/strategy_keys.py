"""The keys of a strategy: what each may be, and the message for what it is not."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from stage.context import parse_context
from stage.errors import StrategyError
from stage.load_option import check_expert_load
from stage.precision import FP8_RECIPES
from stage.recomputation import Recomputation, parse_recomputation

__all__ = ["AXES", "DIMS", "KEYS", "MESH", "SCHEDULES", "check_keys"]

MESH = ("pp", "dp", "cp", "tp")
AXES = ("dp", "cp", "tp", "tp_y", "tp_x", "edp", "ep", "etp")
DIMS = (
    "heads",
    "kv_heads",
    "d_ff",
    "shared_d_ff",
    "vocab",
    "experts",
    "expert_d_ff",
    "slots",  # token slots of the experts, after dispatch
    "batch",
    "seq",
    "d_model",
)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")
ALLTOALL = ("collective", "p2p")
LARGEST_FACTOR = 1_000_000
MOST_CHUNKS = 256
GRAD_REDUCE = ("step", "microbatch")
CONTEXT_BALANCES = ("zigzag", "none")
STREAMS = ("single", "per-axis")
ARCHITECTURES = ("dense", "moe")


def check_keys(values: Mapping[str, object], where: str) -> dict[str, Any]:
    """The values as a strategy has them; a `StrategyError` names `where` and the first key that is wrong."""
    for key in values:
        if key not in KEYS:
            hint = f"{_near(key, KEYS)}; known keys: {_listed(KEYS)}"
            raise StrategyError(f"{where}: unknown key '{key}'{hint}")
    return {key: KEYS[key](value, f"{where}: {key}") for key, value in values.items()}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise StrategyError(f"{where} is {value!r}; a text is expected")
    return value


def _context(value: object, where: str) -> str:
    text = _text(value, where)
    try:
        return parse_context(text).name
    except StrategyError as err:
        raise StrategyError(f"{where.removesuffix('context')}{err}") from err


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise StrategyError(f"{where} is {value!r}; true or false is expected")
    return value


def _integer(low: int, high: int | None = None) -> Callable[[object, str], int]:
    span = f"of at least {low}" if high is None else f"from {low} to {high}"

    def check(value: object, where: str) -> int:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= low
        if not fits or (high is not None and isinstance(value, int) and value > high):
            raise StrategyError(f"{where} is {value!r}; an integer {span} is expected")
        assert isinstance(value, int)
        return value

    return check


def _factor(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FACTOR:
        raise StrategyError(f"{where} is {value!r}; a number above 0 and up to {LARGEST_FACTOR} is expected")
    return float(value)


def _reshard(value: object, where: str) -> bool | int:
    return (
        value
        if isinstance(value, bool)
        else _integer(2)(value, f"{where} (true, false or a number of ranks)")
    )


def _recompute(value: object, where: str) -> Recomputation:
    if isinstance(value, Recomputation):
        return value
    text = _text(value, where)
    try:
        return parse_recomputation(text)
    except StrategyError as err:
        raise StrategyError(f"{where.removesuffix('recompute')}{err}") from None


def _choice(known: tuple[str, ...]) -> Callable[[object, str], str]:
    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise StrategyError(f"{where} is {value!r}{_near(value, known)}; known: {_listed(known)}")
        return value

    return check


def _names(known: tuple[str, ...], kind: str) -> Callable[[object, str], tuple[str, ...]]:
    def check(value: object, where: str) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise StrategyError(f"{where} is {value!r}; a list of names is expected, such as [{known[0]!r}]")
        for name in value:
            if name not in known:
                hint = f"{_near(name, known)}; known: {_listed(known)}"
                raise StrategyError(f"{where}: unknown {kind} {name!r}{hint}")
        if len(set(value)) < len(value):
            raise StrategyError(f"{where} is {list(value)}; each {kind} may appear once")
        return tuple(value)

    return check


def _mesh(value: object, where: str) -> tuple[str, ...]:
    mesh = _names(MESH, "axis")(value, where)
    ordered = tuple(axis for axis in MESH if axis in mesh)
    if mesh != ordered:
        raise StrategyError(f"{where} is {list(mesh)}; list the axes outermost first: {list(ordered)}")
    return mesh


def _shard(value: object, where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    rows = dict(value) if isinstance(value, Mapping | tuple) else None
    if rows is None:
        raise StrategyError(f"{where} is {value!r}; a table of dim = [axes] is expected")
    for dim in rows:
        if dim not in DIMS:
            raise StrategyError(f"{where}: unknown dim '{dim}'{_near(dim, DIMS)}; known: {_listed(DIMS)}")
    return tuple((dim, _names(AXES, "axis")(axes, f"{where}: {dim}")) for dim, axes in rows.items())


def _near(name: object, known: Mapping[str, object] | tuple[str, ...]) -> str:
    found = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean '{found[0]}'?)" if found else ""


def _listed(known: Mapping[str, object] | tuple[str, ...]) -> str:
    return ", ".join(known)


KEYS: dict[str, Callable[[object, str], object]] = {
    "title": _text,
    "source": _text,
    "mesh": _mesh,
    "shard": _shard,
    "schedule": _choice(SCHEDULES),
    "vpp": _integer(1),
    "recompute": _recompute,
    "zero": _integer(0, 3),
    "regather": _names(AXES, "axis"),
    "overlap_grad": _flag,
    "bucket_size": _integer(0),
    "dp_shard": _integer(1),
    "tp_x": _integer(1),
    "reshard_after_forward": _reshard,
    "context": _context,
    "prefetch": _integer(0),
    "grad_reduce": _choice(GRAD_REDUCE),
    "context_balance": _choice(CONTEXT_BALANCES),
    "bucket_first_stage": _flag,
    "tp_overlap_chunks": _integer(1, MOST_CHUNKS),
    "moe_shared_expert_overlap": _flag,
    "streams": _choice(STREAMS),
    "fuse": _flag,
    "expert_load": check_expert_load,
    "seed": _integer(0, (1 << 63) - 1),
    "capacity_factor": _factor,
    "pad_to_capacity": _flag,
    "alltoall": _choice(ALLTOALL),
    "fp8": _choice(FP8_RECIPES),
    "fp8_param_gather": _flag,
    "fp8_dispatch": _flag,
    "default_for": _names(ARCHITECTURES, "architecture"),
}
