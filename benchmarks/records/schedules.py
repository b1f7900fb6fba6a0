"""Records of torch's pipelining: what its runtimes executed, and the action tables it plans with.

A runtime is compared in full, compute marks and messages; a table in its order of forwards and backwards, and also in
its messages where it has them, which runtimes execute as planned.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.records.case import Case
from benchmarks.records.compare import Context, Explanation
from benchmarks.records.event import MARKS, Event, mark, recorded
from benchmarks.records.reference_model import model
from stage.catalog import load_strategy
from stage.pipeline.schedules import order, plan_pipeline
from stage.synthesis import synthesize
from stage.traceset import TraceSet

__all__ = [
    "RECEIVED_EARLY",
    "SCHEDULE_RULES",
    "read_runtime",
    "read_tables",
    "seen",
    "skip_reason",
    "synthesize_case",
]

SCHEDULES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "zb-h1",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}
ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)")


def read_runtime(data: Mapping[str, Any]) -> list[Case]:
    """The cases of a record of executed schedules, one a run; the second step is the one without set-up."""
    cases = []
    for run in data["runs"]:
        config = {**_config(run, run["virtual"]), "kind": "runtime", "dims": data["dims"]}
        several = run["pp"] if run["virtual"] > 1 else 0
        skipped = skip_reason(config)
        ranks = {} if skipped else {int(rank): recorded(ops, several) for rank, ops in run["step1"].items()}
        cases.append(Case(f"{_title(config)} executed", config, ranks))
    return cases


def read_tables(data: Mapping[str, Any]) -> list[Case]:
    """The cases of a record of action tables, two for one that has messages."""
    cases = []
    for table in data["schedules"]:
        config = _config(table, table["virtual_stages_per_rank"])
        for kind, key in (("order", "compute_order"), ("planned", "with_comms")):
            if key == "with_comms" and (key not in table or skip_reason(config)):
                continue
            cells = {} if skip_reason(config) else table[key]
            ranks = {int(rank): _planned(actions, config) for rank, actions in cells.items()}
            cases.append(Case(f"{_title(config)} {kind}", {**config, "kind": kind}, ranks))
    return cases


def _config(entry: Mapping[str, Any], virtual: int) -> dict[str, Any]:
    name = str(entry["schedule"])
    return {
        "schedule": SCHEDULES.get(name, ""), "name": name, "virtual": virtual, "pp": entry["pp"],
        "micro_batches": entry["microbatches"],
    }  # fmt: skip


def _title(config: Mapping[str, Any]) -> str:
    parts = [config["name"], f"pp {config['pp']}"] + (
        [f"vpp {config['virtual']}"] if config["virtual"] > 1 else []
    )
    return ", ".join([*parts, f"{config['micro_batches']} micro-batches"])


def skip_reason(config: Mapping[str, Any]) -> str:
    """Why a schedule can not be compared, or nothing."""
    return "" if config["schedule"] else f"{config['name']} is not a schedule of this version"


def _planned(actions: Sequence[str | None], config: Mapping[str, Any]) -> list[Event]:
    """The events of one rank's actions; bubbles and what is no compute or message are left out."""
    pipeline = plan_pipeline(config["schedule"], config["pp"], config["micro_batches"], config["virtual"])
    events = []
    for found in ACTION.findall(" ".join(filter(None, actions))):
        stage, kind, micro_batch = int(found[0]), found[1], int(found[2])
        if kind in MARKS:
            events.append(mark(kind, micro_batch, pipeline.place(stage)[1] if pipeline.chunks > 1 else -1))
            continue
        op, _, direction = kind.partition("_")
        other = stage + (1 if (op == "SEND") == (direction == "F") else -1)
        events.append(Event("pipeline", op.lower(), (pipeline.place(other)[0],), micro_batch, ""))
    return events


def synthesize_case(config: Mapping[str, Any]) -> TraceSet:
    """A pipeline of one layer a stage whose messages have the recorded shape."""
    dims = config.get("dims", {"B": 1, "S": 2, "D": 2})
    width = dims["D"]
    sizes = {
        "layers": config["pp"] * config["virtual"],
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
        vpp=config["virtual"],
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
        return [event for event in events if event.op in MARKS]
    return [
        event if event.op in MARKS else replace(event, bytes=event.micro_batch, dtype="") for event in events
    ]


def _last_rank_off_by_one(ours: list[Event], context: Context) -> list[Event]:
    config = context.config
    if config["schedule"] != "1f1b" or config["kind"] != "order" or context.rank != config["pp"] - 1:
        return ours
    return [mark("F", event.bytes + 1) if event.op == "F" else event for event in ours]


def _sent_after_both(ours: list[Event], context: Context) -> list[Event]:
    """Both compute marks of each pair, then what either sends."""
    pairs = _pairs(context)
    computed, result, held = 0, list[Event](), list[Event]()
    for event in ours:
        if event.op == "send" and computed - 1 in pairs:
            held.append(event)
            continue
        result.append(event)
        if event.op in MARKS:
            computed += 1
            if computed - 2 in pairs:
                result += held
                held = []
    return result


def _pairs(context: Context) -> set[int]:
    """Which actions of a rank are forwards that run as one with the backward behind them.

    In DualPipe-V they do not where that backward waits for that forward, first of all on the last rank.
    """
    config, rank = context.config, context.rank
    dual = config.get("schedule") == "dualpipe-v"
    if not dual and ((config.get("vpp") or 1) == 1 or config.get("overlap_p2p") is not False):
        return set()
    name, chunks = ("dualpipe-v", 2) if dual else ("interleaved", config["vpp"])
    micro_batches = config["micro_batches"] if dual else config["m"]
    phases = order(name, plan_pipeline(name, config["pp"], micro_batches, chunks), rank)
    kinds, first = [action.kind for action in phases.actions], len(phases.warmup)
    found = {i for i in range(first, len(kinds) - 1) if kinds[i : i + 2] == ["F", "B"]}
    return found - ({first} if dual and rank == config["pp"] - 1 else set())


def _received_early(ours: list[Event], context: Context) -> list[Event]:
    """What is recorded, if it differs from ours in that some receives stand before the place of their use."""
    theirs = list(context.recorded)
    if [e for e in ours if e.op != "recv"] != [e for e in theirs if e.op != "recv"]:
        return ours
    if Counter(e for e in ours if e.op == "recv") != Counter(e for e in theirs if e.op == "recv"):
        return ours
    early = all(
        counted[event] <= known[event]
        for counted, known in zip(_received(ours), _received(theirs), strict=True)
        for event in counted
    )
    return theirs if early else ours


def _received(events: Sequence[Event]) -> list[Counter[Event]]:
    """How many receives of each kind stand before each other event."""
    count: Counter[Event] = Counter()
    found = []
    for event in events:
        if event.op == "recv":
            count[event] += 1
        else:
            found.append(count.copy())
    return found


RECEIVED_EARLY = Explanation(
    "received-early",
    "with several stages a rank, torch and Megatron-core start a receive some actions before its tensor is used; a "
    "trace has it right before its use, and nothing makes it wait for what stands before it",
    _received_early,
)

SENT_AFTER_BOTH = Explanation(
    "sent-after-both",
    "torch's DualPipe-V, and Megatron-core without overlap of messages, run a forward and the backward beside it, then "
    "send what both made",
    _sent_after_both,
)

SCHEDULE_RULES = (
    Explanation(
        "last-rank-off-by-one",
        "torch's 1F1B table counts the last rank's forwards from 1 (its own check rejects it); its runtime, and Stage, "
        "from 0",
        _last_rank_off_by_one,
    ),
    SENT_AFTER_BOTH,
    RECEIVED_EARLY,
)
"""Of torch's pipelines; the last two also of Megatron-core's."""
