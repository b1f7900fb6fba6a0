"""The expert load that a strategy names: drawn, or read from a CSV or JSON file of histograms.

A file has one row for all MoE layers, or one for each.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stage.errors import StrategyError
from stage.expert_load import ExpertLoad, make_load, zipf_load
from stage.files import open_file
from stage.load_option import BALANCED, zipf_exponent
from stage.model import Model
from stage.strategy import Strategy

__all__ = ["read_expert_load", "resolve_expert_load"]

LARGEST: Final = 1 << 24
"""Bytes of a file: 1024 layers of 1024 experts with 16 characters each."""

MOST: Final = 1 << 20
"""Numbers of a file."""


def resolve_expert_load(model: Model, strategy: Strategy) -> ExpertLoad | None:
    """The popularities of a model's experts; None where loads are balanced and nothing is dropped or padded.

    A `StrategyError` says which options do not go together.
    """
    load, factor, seed = strategy.expert_load, strategy.capacity_factor, strategy.seed
    exponent = zipf_exponent(load)
    if strategy.pad_to_capacity and factor is None:
        raise StrategyError(
            "pad_to_capacity is given without capacity_factor, which says what to pad to; give both"
        )
    if seed is not None and exponent is None:
        raise StrategyError(
            f"seed = {seed}, but expert_load = {load} draws nothing; leave it out, or give zipf:EXPONENT"
        )
    if load == BALANCED and factor is None:
        return None
    if not model.moe:
        name = "expert_load" if load != BALANCED else "capacity_factor"
        raise StrategyError(
            f"{name} is of experts, but {model.name} has none; leave it out, or choose such a model"
        )
    if load == BALANCED and factor is not None and factor >= 1 and not strategy.pad_to_capacity:
        return None
    experts = model.values["experts"]
    if load == BALANCED:
        return ExpertLoad(((1,) * experts,))
    if exponent is not None:
        return zipf_load(exponent, experts, seed or 0)
    layers = len(model.moe_layers)
    return make_load(read_expert_load(Path(load)), experts, model.values["top_k"], layers, load)


def read_expert_load(path: Path) -> list[list[float]]:
    """The rows of a file; a `StrategyError` names the file, the row and what is no load.

    A `.json` file holds a list of numbers or a list of such lists; any other a row a line, with commas between
    numbers, where empty lines and lines that start with `#` say nothing.
    """
    try:
        with open_file(path) as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        raise StrategyError(f"{path}: {reason}; give a .csv or .json file of expert loads") from err
    if len(data) > LARGEST:
        raise StrategyError(
            f"{path}: is larger than {LARGEST:,} bytes; give a row of numbers for each MoE layer"
        )
    try:
        text = data.decode("utf-8-sig")
        rows = list(_json_rows(text, path) if path.suffix == ".json" else _csv_rows(text, path))
    except (ValueError, RecursionError) as err:
        raise StrategyError(f"{path}: not valid {path.suffix[1:]}: {err}") from err
    if not rows or sum(map(len, rows)) > MOST:
        found = "no row" if not rows else f"more than {MOST:,} numbers"
        raise StrategyError(f"{path}: has {found}; give a row of numbers for each MoE layer, or one for all")
    return rows


def _json_rows(text: str, path: Path) -> Iterator[list[float]]:
    value = json.loads(text)
    if not isinstance(value, list):
        raise StrategyError(f"{path}: holds no list; give [numbers], or a list of such lists")
    rows = value if any(isinstance(row, list) for row in value) else [value]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list):
            raise StrategyError(f"{path}: row {number} is no list; give a list of numbers for each MoE layer")
        wrong = [entry for entry in row if isinstance(entry, bool) or not isinstance(entry, int | float)]
        if wrong:
            raise _no_number(wrong[0], path, number)
        yield [_number(entry, path, number) for entry in row]


def _csv_rows(text: str, path: Path) -> Iterator[list[float]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for number, line in enumerate(lines, 1):
        yield [_number(entry.strip(), path, number) for entry in line.split(",")]


def _number(entry: str | float, path: Path, row: int) -> float:
    try:
        return float(entry)
    except (ValueError, OverflowError) as err:
        raise _no_number(entry, path, row) from err


def _no_number(entry: object, path: Path, row: int) -> StrategyError:
    shown = repr(entry) if len(repr(entry)) <= 40 else f"{repr(entry)[:38]}.."
    return StrategyError(
        f"{path}: row {row} has {shown}; a load is a number of tokens, or a fraction of them"
    )
