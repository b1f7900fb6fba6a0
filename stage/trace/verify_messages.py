"""Messages between ranks: the ends each node names, and a receive for every send."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from stage.trace.report import Findings, plural
from stage.trace.verify_node import RECV, SEND, Facts
from stage.trace.verify_record import CHANNEL, KIND, PARTNER, PEER, SIZE, TAG, Columns, RankRecord

__all__ = ["check_ends", "check_messages"]

ENDS = 4
"""The first rows of a table of messages, which a send and its receive have in common: src, dst, channel, tag.

Then follow size, position and the other rank by name."""
AT, NAMED = ENDS + 1, ENDS + 2

Key = tuple[int, ...]


def check_ends(rank: int, world: int, communication: Iterable[Facts], findings: Findings) -> bool:
    """Check the ranks that messages of a rank name; return whether all are possible."""
    sound = True
    for facts in communication:
        if facts.kind in {SEND, RECV} and facts.usable:
            for rule, message in end_problems(rank, world, facts):
                findings.add(rank, facts.id, rule, message)
                sound = False
    return sound


def end_problems(rank: int, world: int, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the ends of one message."""
    peer, own = ("comm_dst", "comm_src") if facts.kind == SEND else ("comm_src", "comm_dst")
    if facts.peer == rank:
        yield "self-message", f"has {peer} {rank}, its own rank, and waits for ever: name another rank"
    elif not 0 <= facts.peer < world:
        yield "peer-range", f"has {peer} {facts.peer}, but the ranks are 0 to {world - 1}"
    if facts.own not in {-1, rank}:
        yield "own-rank", f"has {own} {facts.own}, but stands in the file of rank {rank}"


def check_messages(records: Mapping[int, RankRecord], findings: Findings) -> None:
    """Check that sends and receives between ranks at hand pair up on (tag, src, dst, size), and in order."""
    sends, receives = table(records, SEND), table(records, RECV)
    if np.array_equal(sends[: ENDS + 1], receives[: ENDS + 1]):
        return
    sent, received = split(sends), split(receives)
    none = np.zeros((ENDS + 3, 0), np.int64)
    for key in sorted({*sent, *received}):
        compare(key, sent.get(key, none), received.get(key, none), records, findings)


def table(records: Mapping[int, RankRecord], kind: int) -> Columns:
    """Return all sends or all receives whose other rank is at hand, by their ends, then in order."""
    parts = [np.zeros((ENDS + 3, 0), np.int64)]
    available = np.array(sorted(records), np.int64)
    for rank, record in records.items():
        columns, positions = record.in_order()
        chosen = (columns[KIND] == kind) & np.isin(columns[PARTNER], available)
        own = np.full(int(chosen.sum()), rank, np.int64)
        partner, *rest = (columns[row][chosen] for row in (PARTNER, CHANNEL, TAG, SIZE, PEER))
        ends = (own, partner) if kind == SEND else (partner, own)
        parts.append(np.vstack((*ends, *rest[:-1], positions[chosen], rest[-1])))
    joined = np.concatenate(parts, axis=1)
    return joined[:, np.lexsort(joined[ENDS - 1 :: -1])]


def split(messages: Columns) -> dict[Key, Columns]:
    """Return the messages by their ends."""
    if not messages.shape[1]:
        return {}
    ends = messages[:ENDS]
    starts = 1 + np.flatnonzero(np.any(ends[:, 1:] != ends[:, :-1], axis=0))
    parts = np.split(messages, starts, axis=1)
    return {tuple(part[:ENDS, 0].tolist()): part for part in parts}


def compare(
    key: Key,
    sent: Columns,
    received: Columns,
    records: Mapping[int, RankRecord],
    findings: Findings,
) -> None:
    """Report what does not pair up of the messages from one rank to another with one tag."""
    if np.array_equal(sent[ENDS], received[ENDS]):
        return
    src, dst, _, tag = key
    lonely_sends = without_partner(sent, received)
    lonely_receives = without_partner(received, sent)
    pairs = min(len(lonely_sends), len(lonely_receives))
    for first, second in zip(lonely_sends[:pairs], lonely_receives[:pairs], strict=True):
        other = records[dst].ident(received[AT, second])
        text = (
            f"sends {plural(int(sent[ENDS, first]), 'byte')} to rank {sent[NAMED, first]} with tag {tag}, but "
            f"node {other} there receives {received[ENDS, second]}: sizes must agree"
        )
        findings.add(src, records[src].ident(sent[AT, first]), "message-size", text)
    for at in lonely_sends[pairs:]:
        text = (
            f"sends {plural(int(sent[ENDS, at]), 'byte')} to rank {sent[NAMED, at]} with tag {tag}, "
            "which nobody receives"
        )
        findings.add(src, records[src].ident(sent[AT, at]), "send-unmatched", text)
    for at in lonely_receives[pairs:]:
        text = (
            f"receives {plural(int(received[ENDS, at]), 'byte')} from rank {received[NAMED, at]} "
            f"with tag {tag}, never sent"
        )
        findings.add(dst, records[dst].ident(received[AT, at]), "recv-unmatched", text)
    if not len(lonely_sends) and not len(lonely_receives):
        at = int(np.flatnonzero(sent[ENDS] != received[ENDS])[0])
        other = records[dst].ident(received[AT, at])
        text = (
            f"sends {plural(int(sent[ENDS, at]), 'byte')} to rank {sent[NAMED, at]} with tag {tag} where node {other} "
            f"there receives {received[ENDS, at]}: use one order, or a tag for each"
        )
        findings.add(src, records[src].ident(sent[AT, at]), "message-order", text)


def without_partner(messages: Columns, others: Columns) -> list[int]:
    """Return which messages are left when each takes another of its size, first come first served."""
    free = Counter(others[ENDS].tolist())
    left = []
    for at, size in enumerate(messages[ENDS].tolist()):
        free[size] -= 1
        if free[size] < 0:
            left.append(at)
    return left
