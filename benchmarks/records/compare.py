"""Comparing a rank's recorded events with its synthesized ones, exactly and in order.

Where they differ, **explanations** are tried. An explanation is a rule of its own name that rewrites the synthesized
events into what the other code is known to issue, from the configuration and the numbers of the job. It counts only
if it brings the two lists closer, and after all rules they must be equal event by event: phase, op, group, bytes,
dtype and order. What remains is unexplained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from benchmarks.records.event import Event
from stage.traceset import TraceSet

__all__ = ["Comparison", "Context", "Explanation", "compare", "difference"]


@dataclass(frozen=True)
class Context:
    """What an explanation may read: the record's configuration, the rank, and the synthesized job."""

    config: Mapping[str, Any]
    rank: int
    traces: TraceSet


Rewrite = Callable[[list[Event], Sequence[Event], Context], list[Event]]
"""(synthesized events, recorded events, context) -> the synthesized events as the other code would issue them."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A known difference: its name, one sentence that says why it is there, and the rule that recognises it."""

    slug: str
    reason: str
    rewrite: Rewrite


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome for one rank: how many events each explanation accounts for, and the lines that none does."""

    explained: Mapping[str, int] = field(default_factory=dict)
    unexplained: tuple[str, ...] = ()


def difference(ours: Sequence[Event], theirs: Sequence[Event]) -> int:
    """How many events must be removed from or added to `ours` to make it `theirs`."""
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    return sum((i2 - i1) + (j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def compare(
    ours: Sequence[Event], theirs: Sequence[Event], rules: Sequence[Explanation], context: Context
) -> Comparison:
    """The comparison of one rank's events, with the rules tried in the order given."""
    current, explained = list(ours), {}
    left = difference(current, theirs)
    for rule in rules:
        if not left:
            break
        candidate = rule.rewrite(current, theirs, context)
        after = left if candidate == current else difference(candidate, theirs)
        if after < left:
            explained[rule.slug] = left - after
            current, left = candidate, after
    return Comparison(explained, tuple(_lines(current, theirs)) if left else ())


def _lines(ours: Sequence[Event], theirs: Sequence[Event], context: int = 2) -> list[str]:
    """A readable difference: `-` what only the record has, `+` what only the synthesized trace has."""
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(context):
        lines.append(f"@@ record event {group[0][1]}, synthesized event {group[0][3]} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f"  {event}" for event in theirs[i1:i2]]
                continue
            lines += [f"- {event}" for event in theirs[i1:i2]]
            lines += [f"+ {event}  ({event.name})" for event in ours[j1:j2]]
    return lines
