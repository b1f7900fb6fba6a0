"""Records of torch's pipelining: what its runtimes executed, and the action tables it plans with.

A runtime is compared in full, compute marks and messages; a table in its order of forwards and backwards, and for
GPipe, whose runtime executes it as planned, also in its messages. Schedules with several stages a rank, or that split
the backward, are not schedules of this version.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.records.case import Case
from benchmarks.records.compare import Context, Explanation
from benchmarks.records.event import Event, mark, recorded
from benchmarks.records.reference_model import model
from stage.catalog import load_strategy
from stage.synthesis import synthesize
from stage.traceset import TraceSet

__all__ = ["SCHEDULE_RULES", "read_runtime", "read_tables", "seen", "skip_reason", "synthesize_case"]

SCHEDULES = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
ACTION = re.compile(r"(\d+)(F|B|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)")


def read_runtime(data: Mapping[str, Any]) -> list[Case]:
    """The cases of a record of executed schedules, one a run; the second step is the one without set-up."""
    cases = []
    for run in data["runs"]:
        config = {**_config(run, run["virtual"]), "kind": "runtime", "dims": data["dims"]}
        ranks = (
            {} if skip_reason(config) else {int(rank): recorded(ops) for rank, ops in run["step1"].items()}
        )
        cases.append(Case(f"{_title(config)} executed", config, ranks))
    return cases


def read_tables(data: Mapping[str, Any]) -> list[Case]:
    """The cases of a record of action tables, two for one that has messages."""
    cases = []
    for table in data["schedules"]:
        config = _config(table, table["virtual_stages_per_rank"])
        for kind, key in (("order", "compute_order"), ("planned", "with_comms")):
            if key == "with_comms" and (
                key not in table or skip_reason(config) or config["schedule"] != "gpipe"
            ):
                continue
            ranks = (
                {}
                if skip_reason(config)
                else {int(r): _planned(actions) for r, actions in table[key].items()}
            )
            cases.append(Case(f"{_title(config)} {kind}", {**config, "kind": kind}, ranks))
    return cases


def _config(entry: Mapping[str, Any], virtual: int) -> dict[str, Any]:
    name = str(entry["schedule"])
    known = SCHEDULES.get(name, name) if virtual == 1 else name
    return {
        "schedule": known, "name": name, "virtual": virtual, "pp": entry["pp"], "micro_batches": entry["microbatches"],
    }  # fmt: skip


def _title(config: Mapping[str, Any]) -> str:
    parts = [config["name"], f"pp {config['pp']}"] + (
        [f"vpp {config['virtual']}"] if config["virtual"] > 1 else []
    )
    return ", ".join([*parts, f"{config['micro_batches']} micro-batches"])


def skip_reason(config: Mapping[str, Any]) -> str:
    """Why a schedule can not be compared, or nothing."""
    if config["schedule"] in SCHEDULES.values():
        return ""
    return f"{config['name']} with {config['virtual']} stages a rank is not a schedule of this version"


def _planned(actions: Sequence[str | None]) -> list[Event]:
    """The events of one rank's actions; bubbles and what is no forward, backward or message are left out."""
    events = []
    for action in actions:
        found = ACTION.fullmatch(action or "")
        if found is None:
            continue
        stage, kind, micro_batch = int(found[1]), found[2], int(found[3])
        if kind in ("F", "B"):
            events.append(mark(kind, micro_batch))
            continue
        op, _, direction = kind.partition("_")
        ahead = (op == "SEND") == (direction == "F")
        events.append(Event("pipeline", op.lower(), (stage + (1 if ahead else -1),), micro_batch, ""))
    return events


def synthesize_case(config: Mapping[str, Any]) -> TraceSet:
    """A pipeline of one layer a stage whose messages have the recorded shape."""
    dims = config.get("dims", {"B": 1, "S": 2, "D": 2})
    width = dims["D"]
    sizes = {
        "layers": config["pp"],
        "d_model": width,
        "d_ff": width,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": width,
        "vocab": width,
        "seq": dims["S"],
        "tied": False,
    }
    strategy = load_strategy("ddp").replace(schedule=config["schedule"])
    return synthesize(
        model(sizes),
        strategy,
        pp=config["pp"],
        batch=dims["B"] * config["micro_batches"],
        micro_batch=dims["B"],
        seq=dims["S"],
        vocab_multiple=1,
        dtype="fp32",
        clip=False,
    )


def seen(events: Sequence[Event], kind: str) -> list[Event]:
    """The events of a synthesized trace as a record of this kind holds them: a plan's messages have no size."""
    if kind == "runtime":
        return list(events)
    if kind == "order":
        return [event for event in events if event.op in ("F", "B")]
    return [
        event if event.op in ("F", "B") else replace(event, bytes=event.micro_batch, dtype="")
        for event in events
    ]


def _last_rank_off_by_one(ours: list[Event], context: Context) -> list[Event]:
    config = context.config
    if config["schedule"] != "1f1b" or config["kind"] != "order" or context.rank != config["pp"] - 1:
        return ours
    return [mark("F", event.bytes + 1) if event.op == "F" else event for event in ours]


SCHEDULE_RULES = (
    Explanation(
        "last-rank-off-by-one",
        "torch's 1F1B table counts the last rank's forwards from 1 (its own check rejects it); its runtime, and Stage, "
        "from 0",
        _last_rank_off_by_one,
    ),
)
