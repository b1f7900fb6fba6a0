"""Comparing a rank's recorded events with its synthesized ones, exactly and in order.

Where they differ, **explanations** are tried. An explanation is a rule of its own name that rewrites the synthesized
events into what the other code is known to issue, from the configuration and the numbers of the job. After the rules
the two must be equal event by event: phase, op, group, bytes, dtype and order. If no choice of rules makes them so,
the difference is unexplained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from benchmarks.records.event import Event
from stage.mesh import Mesh

__all__ = ["Comparison", "Context", "Explanation", "compare", "difference"]


@dataclass(frozen=True)
class Context:
    """What an explanation may read: the record's configuration, the rank, the mesh, and the recorded events."""

    config: Mapping[str, Any]
    rank: int
    mesh: Mesh
    recorded: Sequence[Event]


Rewrite = Callable[[list[Event], Context], list[Event]]
"""Makes of the synthesized events those that the other code would issue."""


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


def compare(ours: Sequence[Event], rules: Sequence[Explanation], context: Context) -> Comparison:
    """The comparison of one rank's events: explained by the fewest rules, in the order given, that make them equal.

    If none do, the rest is shown after those rules that bring the two closer.
    """
    chosen = _fewest(list(ours), rules, context)
    current, explained = list(ours), {}
    for rule in rules if chosen is None else chosen:
        candidate = rule.rewrite(current, context)
        if chosen is None and difference(candidate, context.recorded) >= difference(
            current, context.recorded
        ):
            continue
        explained[rule.slug] = difference(current, candidate)
        current = candidate
    return Comparison(explained, tuple(_lines(current, context.recorded)) if chosen is None else ())


def _fewest(ours: list[Event], rules: Sequence[Explanation], context: Context) -> list[Explanation] | None:
    """The fewest of the rules that, one after the other, make `ours` what is recorded; None if no choice does."""
    if ours == list(context.recorded):
        return []
    best: list[Explanation] | None = None
    for i, rule in enumerate(rules):
        candidate = rule.rewrite(ours, context)
        if candidate == ours:
            continue
        rest = _fewest(candidate, rules[i + 1 :], context)
        if rest is not None and (best is None or len(rest) + 1 < len(best)):
            best = [rule, *rest]
    return best


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
