"""Printing what `stage show` says: counts and closed forms of a model, classes of a trace set and what they send."""

from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

from stage.cli.output import formula, print_report, print_table, quantity

__all__ = ["print_model", "print_traces"]

PHASES = ("forward", "backward")
WIDTH = 80


def print_model(report: Mapping[str, Any]) -> None:
    """Print the counts of a model, and its closed forms where the report has them."""
    flops = {f"{phase}_flops": report["flops"][phase] for phase in PHASES}
    asked = {key: report[key] for key in ("batch", "seq", "mask")}
    print_report({"model": report["name"], "parameters": report["parameters"], **flops, **asked})
    _print_sizes("sizes", report["sizes"])
    _section("blocks, one of each kind", report["blocks"])
    if "closed_forms" in report:
        _print_forms(report["closed_forms"])


def print_traces(report: Mapping[str, Any]) -> None:
    """Print the summary of a trace set or of a rank; classes that do the same share a row."""
    shared = {
        key: _merged(report[key]) if key in report and "rank" not in report else report.get(key)
        for key in ("classes", "communication")
    }
    print_report({key: shared.get(key, value) for key, value in report.items()})


def _merged(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that differ in their class alone as one, with the classes as ranges."""
    found: dict[str, tuple[Mapping[str, Any], list[int]]] = {}
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("class", "first_rank")}
        found.setdefault(str(rest), (rest, []))[1].append(int(row["class"]))
    return [{"class": _ranges(classes), **rest} for rest, classes in found.values()]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as text: `0`, `1-14`, `1-3 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _print_sizes(title: str, sizes: Mapping[str, Any]) -> None:
    """Names and values as they are written for `--set`."""
    words = [f"{name}={_compact(value)}" for name, value in sizes.items()]
    print(f"\n{title}\n{fill(' '.join(words), WIDTH, break_long_words=False, break_on_hyphens=False)}")


def _compact(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(int(value))


def _print_forms(forms: Mapping[str, Any]) -> None:
    print(f"\nCLOSED FORMS of {forms['strategy']}: what each device does for one micro-batch,")
    print("`batch` being its sequences over all devices. An axis of degree 1 is left out.")
    at = {key: forms[key] for key in ("batch", "seq", "vocab")}
    _print_sizes("values are at", {**forms["degrees"], **forms["parts"], **at})
    _section("parameters on a device", _parameters(forms))
    _section("saved for backward, of one micro-batch", _saved(forms))
    _section("matrix multiplications", (_work(entry) for entry in forms["flops"]))
    _section("communication of activations", (_sent(entry) for entry in forms["communication"]))
    _section("communication of parameters and gradients", _data_parallel(forms))
    _section("message to the next pipeline stage", [_sized(forms["message"])])
    for phase in PHASES:
        for block in forms["blocks"]:
            _section(f"{block['kind']} {phase}, op by op", (_op(entry) for entry in block[phase]["ops"]))


def _section(title: str, rows: Iterable[Mapping[str, object]]) -> None:
    records = list(rows)
    if records:
        print(f"\n{title}")
        print_table(records)


def _parameters(forms: Mapping[str, Any]) -> list[dict[str, object]]:
    rows = [*forms["blocks"], {**forms, "kind": "all", "count": 1}]
    return [
        {
            "block": row["kind"], "count": row["count"], "parameters": formula(row["parameters"]),
            "value": quantity("parameters", row["parameters_value"]),
        }
        for row in rows
    ]  # fmt: skip


def _saved(forms: Mapping[str, Any]) -> list[dict[str, object]]:
    return [
        {"block": block["kind"], "count": block["count"], **_sized(block["saved"])}
        for block in forms["blocks"]
    ]


def _work(entry: Mapping[str, Any]) -> dict[str, object]:
    named = {"block": entry["block"], "phase": entry["phase"], "flops": formula(entry["flops"])}
    return {**named, "value": quantity("flops", entry["flops_value"])}


def _sized(entry: Mapping[str, Any]) -> dict[str, object]:
    return {"bytes": formula(entry["bytes"]), "value": quantity("bytes", entry["bytes_value"])}


def _sent(entry: Mapping[str, Any]) -> dict[str, object]:
    what = f"{entry['count']} {entry['kind']} over {entry['axes']}"
    return {"block": entry["block"], "phase": entry["phase"], "sends": what, **_sized(entry)}


def _data_parallel(forms: Mapping[str, Any]) -> list[dict[str, object]]:
    return [
        {
            "block": block["kind"], "what": entry["tensors"], "per": entry["per"],
            "sends": f"{entry['count']} {entry['kind']} over {entry['axes']}", **_sized(entry),
        }
        for block in forms["blocks"]
        for entry in block["data_parallel"]
    ]  # fmt: skip


def _op(entry: Mapping[str, Any]) -> dict[str, object]:
    said = {"recompute": " (again)", "once": " (once a step)"}
    name = entry["name"] + said.get(entry["phase"], "")
    return {"op": name, "flops": formula(entry["flops"]), "bytes": formula(entry["bytes"])}
