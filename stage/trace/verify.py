"""Proof that a set of traces, whoever wrote it, keeps what its consumers demand.

Most consumers end without an error on a hang, or read a zero for what they do not understand; so nothing
about a set is taken on trust. Ranks are read one after the other and little of them is kept; then their
collectives and messages are compared, and all ranks are run together.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from stage.errors import StageError
from stage.trace.limits import exceeded, needed
from stage.trace.report import Defect, Findings, Report, plural
from stage.trace.verify_groups import Groups, check_collectives, read_groups
from stage.trace.verify_messages import check_messages
from stage.trace.verify_rank import RankReader
from stage.trace.verify_record import RankRecord
from stage.trace.verify_run import run_together
from stage.trace.verify_splits import check_splits, members_by_rank
from stage.trace.verify_streams import check_one_slot, plan_ranks, warn_unchained

__all__ = ["Defect", "Report", "TraceSource", "compare_ranks", "verify"]

SAMPLE = 32
MISSING = 20


class TraceSource(Protocol):
    """A set of traces: the number of ranks of the job, the ranks at hand, their bytes, and process groups."""

    @property
    def world(self) -> int:
        """The number of ranks of the job."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that have a trace, ascending."""

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        """Members by name of group, in ring order; empty if the set says nothing of them."""

    def rank(self, rank: int, /) -> bytes:
        """Return the trace of a rank."""


def verify(
    source: TraceSource, *, groups: Mapping[str, Sequence[int]] | None = None, exhaustive: bool = True
) -> Report:
    """Return everything that is wrong with a set of traces, and what could not be checked.

    `groups` stand in for those of the set. Without `exhaustive` a sample of the ranks is read; the others
    count as missing.
    """
    findings = Findings()
    unchecked: list[str] = []
    table = source.groups if groups is None else groups
    known = read_groups(source.world, table, findings)
    reader = RankReader(source.world, known, findings)
    ranks = list(source.ranks) if exhaustive else sample(source.ranks)
    records = read_ranks(source, ranks, reader, findings)
    check_written(source, findings)
    note_missing(source, ranks, records, unchecked)
    if not known.known and any(group for record in records.values() for group in record.groups()):
        unchecked.append(
            "process groups are not given: members of a group are taken to be the ranks that use it"
        )
    compare_ranks(records, known, findings, unchecked)
    check_splits(members_by_rank(records, known), list(reader.splits), findings)
    for rule, text in (*exceeded(source.world, max(known.members, default=0), 0), *needed(source.world)):
        findings.warn(None, None, rule, text)
    return findings.report(
        unchecked, len(records), sum(len(record.structure.ids) for record in records.values())
    )


def compare_ranks(
    records: Mapping[int, RankRecord], known: Groups, findings: Findings, unchecked: list[str]
) -> None:
    """Check what ranks do together: their collectives, their messages, and that they run to the end."""
    comparable = {rank: record for rank, record in records.items() if record.comparable}
    count = len(findings.defects)
    members = check_collectives(comparable, known, findings)
    check_messages(comparable, findings)
    if len(findings.defects) > count:
        unchecked.append("deadlock: not looked for, since collectives or messages do not match already")
    else:
        check_run(comparable, members, findings, unchecked)


def sample(ranks: Sequence[int]) -> list[int]:
    """Return some of the ranks, evenly spread, with the first and the last."""
    if len(ranks) <= SAMPLE:
        return list(ranks)
    return [ranks[at * (len(ranks) - 1) // (SAMPLE - 1)] for at in range(SAMPLE)]


def read_ranks(
    source: TraceSource, ranks: Sequence[int], reader: RankReader, findings: Findings
) -> dict[int, RankRecord]:
    """Return the records of ranks, reporting what each breaks alone; a malformed file has none."""
    records: dict[int, RankRecord] = {}
    for rank in ranks:
        if not 0 <= rank < source.world:
            text = f"has a file, but the ranks are 0 to {source.world - 1}: remove it or correct the manifest"
            findings.add(rank, None, "rank-range", text)
            continue
        try:
            records[rank] = reader.read(rank, bytes(source.rank(rank)))
        except StageError as err:
            findings.add(rank, None, "file", str(err))
    return records


def check_written(source: TraceSource, findings: Findings) -> None:
    """Report the ranks that the manifest of a set, where it has one, says are written and that have no file."""
    have = {rank for rank in source.ranks if 0 <= rank < source.world}
    manifest = getattr(source, "manifest", None) if len(have) < source.world else None
    written = manifest.get("written") if isinstance(manifest, Mapping) else None
    listed: Sequence[int] = range(source.world) if written == "all" else ()
    if isinstance(written, list):
        listed = sorted({rank for rank in written if type(rank) is int and 0 <= rank < source.world})
    for rank in islice((rank for rank in listed if rank not in have), MISSING):
        text = "has no file, but the manifest says that it is written: copy the file, or write the set again"
        findings.add(rank, None, "rank-missing", text)
    more = len(listed) - len(have.intersection(listed)) - MISSING
    if more > 0:
        findings.add(None, None, "rank-missing", f"{plural(more, 'rank')} more without a file")


def note_missing(
    source: TraceSource, ranks: Sequence[int], records: Mapping[int, RankRecord], unchecked: list[str]
) -> None:
    """Say which ranks were left out, and of what."""
    absent = source.world - len(source.ranks)
    if absent > 0:
        have = set(source.ranks)
        first = next(rank for rank in range(source.world) if rank not in have)
        text = f"{plural(absent, 'rank')} of {source.world} without a file (the first: {first})"
        unchecked.append(f"{text}: the other side of their collectives and messages is taken to be right")
    if len(ranks) < len(source.ranks):
        unchecked.append(
            f"{len(source.ranks) - len(ranks)} of {plural(len(source.ranks), 'rank')} were not read"
        )
    left = [rank for rank in ranks if rank not in records or not records[rank].comparable]
    if left:
        text = f"{plural(len(left), 'rank')} with defects of their own (the first: {left[0]})"
        unchecked.append(f"{text}: not compared with the other ranks")


def check_run(
    records: Mapping[int, RankRecord],
    members: Mapping[int, Sequence[int]],
    findings: Findings,
    unchecked: list[str],
) -> None:
    """Run all ranks together and report where they are blocked."""
    stuck = [rank for rank, record in records.items() if not record.runnable]
    if stuck:
        text = f"{plural(len(stuck), 'rank')} (the first: {stuck[0]})"
        unchecked.append(f"deadlock: not looked for, since dependencies of {text} are broken")
        return
    plans = plan_ranks(records)
    warn_unchained(records, plans, findings)
    blocked = run_together(records, plans, members)
    if blocked is not None:
        findings.add(blocked.rank, blocked.node, blocked.rule, blocked.message)
        return
    strict = run_together(records, plans, members, rendezvous=True)
    if strict is not None:
        text = f"if a send waits for its receive, {strict.message}; buffered sends, as in ASTRA-sim, run"
        findings.warn(strict.rank, strict.node, "rendezvous", text)
    check_one_slot(records, members, findings)
