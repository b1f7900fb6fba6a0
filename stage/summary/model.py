"""A model in numbers: parameters and FLOPs, for the whole and for each kind of block, and its closed forms."""

from collections import Counter
from collections.abc import Mapping
from math import gcd, prod
from pathlib import Path
from typing import Any

from stage.catalog import load_strategy
from stage.counting import count_block_flops, count_block_parameters, count_parameters
from stage.errors import StageError
from stage.graph import Options
from stage.model import Model, SizeValue
from stage.pipeline.stages import cut
from stage.request import Request, resolve_degrees, resolve_request
from stage.sizes import build_model
from stage.strategy import Strategy
from stage.summary.forms import closed_forms

__all__ = ["model_summary"]

AXES = ("dp", "tp", "pp", "cp", "ep", "etp")
KNOWN = {"mask": ("causal", "full"), "attention": ("fused", "unfused")}


def model_summary(
    target: str | Path | Model,
    *,
    strategy: str | Path | Strategy | None = None,
    batch: int | None = None,
    seq: int | None = None,
    mask: str = "causal",
    attention: str = "fused",
    mtp: bool = False,
    sizes: Mapping[str, SizeValue] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The counts of a model for `batch` sequences (1 by default) of `seq` tokens, as plain values.

    Parameters are those of the published model, with the vocabulary unpadded. FLOPs are the model's: 2 a multiply-add
    of its matrix multiplications, backward twice forward. With a `strategy`, or with degrees among the `options`
    (those of `stage.synthesize`), `closed_forms` says what each device does, in symbols and in numbers; without
    degrees every axis of the strategy has one.

    >>> report = model_summary("llama3-8b", mask="full")
    >>> report["parameters"], report["flops"]["backward"] == 2 * report["flops"]["forward"]
    (8030261248, True)
    """
    for name, value in (("mask", mask), ("attention", attention)):
        if value not in KNOWN[name]:
            raise StageError(f"{name} is {value!r}; choose one of {', '.join(KNOWN[name])}")
    model, origin = build_model(target, sizes, options=Options(attention, mask), mtp=mtp)
    batch = 1 if batch is None else batch
    seq = model.values["seq"] if seq is None else seq
    if batch < 1 or seq < 1:
        raise StageError(f"batch = {batch} and seq = {seq} must both be at least 1; change the smaller one")
    report = {"name": model.name, "origin": origin, **_counts(model, batch, seq)}
    given = {name: value for name, value in options.items() if value is not None}
    if strategy is None and not given:
        return report
    shape = {"seq": seq, "mask": mask, "attention": attention, "mtp": mtp, "sizes": sizes or None}
    request = _request(target, model, strategy, {**shape, **given})
    if request.degrees["pp"] > 1:
        cut(request.model, request.pipeline, request.stage_layers)  # refuses layers that stages can not share
    return {**report, "closed_forms": closed_forms(request)}


def _counts(model: Model, batch: int, seq: int) -> dict[str, Any]:
    """Parameters and FLOPs of the model and of one block of each kind."""
    blocks, total = [], {"forward": 0, "backward": 0}
    for block, count in Counter(model.blocks).items():
        flops = count_block_flops(model, block, batch, seq)
        own = count_block_parameters(model, block)
        blocks.append(
            {
                "kind": block.kind,
                "count": count,
                "parameters": own,
                "forward_flops": flops.forward,
                "backward_flops": flops.backward,
            }
        )
        total["forward"] += count * flops.forward
        total["backward"] += count * flops.backward
    return {
        "parameters": count_parameters(model),
        "flops": total,
        "batch": batch,
        "seq": seq,
        "mask": model.options.mask,
        "tied": model.tied,
        "sizes": {
            name: list(value) if isinstance(value, tuple) else value for name, value in model.sizes.items()
        },
        "blocks": blocks,
    }


def _request(
    target: str | Path | Model, model: Model, strategy: str | Path | Strategy | None, options: dict[str, Any]
) -> Request:
    """The job of these options, or where they have no degrees one in which every axis of the strategy has a degree."""
    if isinstance(strategy, str | Path):
        strategy = load_strategy(strategy)
    if isinstance(strategy, Strategy) and not options.keys() & {*AXES, "gpus", "dp_shard", "tp_x"}:
        options |= _example(strategy, model)
    given = {axis: options.get(axis, None if axis == "dp" else 1) for axis in AXES}
    degrees = resolve_degrees(given, options.get("gpus"))
    enough = (
        2 * degrees["pp"] * degrees["dp"]
    )  # sequences, one a micro-batch, so that every schedule has enough
    return resolve_request(target, strategy, **{"batch": enough * options.get("micro_batch", 1), **options})


def _example(strategy: Strategy, model: Model) -> dict[str, int]:
    """A degree for every axis that a strategy uses, such that no two axes are the same ranks where it can be helped.

    Experts are spread over all of cp and tp and half of dp, so that `ep` and `edp` are neither of them dense axes.
    """
    used = {axis for _, axes in strategy.shard for axis in axes}
    degrees: dict[str, int] = {axis: 2 for axis in ("cp", "tp") if axis in used and axis in strategy.mesh}
    if strategy.tp_x > 1:
        degrees["tp"] = gcd(model.values.get("heads", 1), 2 * strategy.tp_x)
    degrees["dp"] = 4 if "ep" in used or strategy.dp_shard is not None else 2
    if strategy.dp_shard is not None:
        degrees["dp_shard"] = 2
    if "ep" in used and "experts" in model.values:
        degrees["ep"] = gcd(model.values["experts"], prod(degrees.values()) // 2)
    return degrees
