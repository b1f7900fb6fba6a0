"""What a verification found: defects by rule, warnings, and what could not be checked."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

__all__ = ["Defect", "Findings", "Report", "plural", "short"]

LIMIT = 20
SHOWN = 60


@dataclass(frozen=True, slots=True)
class Defect:
    """One breach of a rule: in which rank and node (None: of the whole set, or file), and what is wrong."""

    rank: int | None
    node: int | None
    rule: str
    message: str

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        where += [] if self.node is None else [f"node {self.node}"]
        return f"{' '.join(where) or 'set'}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a verification.

    `defects` make some consumer fail, hang or read wrong numbers; `warnings` are limits and risks of single
    consumers; `unchecked` says what the set did not allow to check.
    """

    defects: tuple[Defect, ...]
    warnings: tuple[Defect, ...]
    unchecked: tuple[str, ...]
    ranks: int
    nodes: int

    @property
    def ok(self) -> bool:
        """Whether no defect was found."""
        return not self.defects

    def to_json(self) -> str:
        """Return the report as JSON text, the same for the same set."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1, sort_keys=True) + "\n"


@dataclass(slots=True)
class Findings:
    """Collects what is found; of one rule it keeps the first `LIMIT` of each rank and counts the rest."""

    defects: list[Defect] = field(default_factory=list)
    warnings: list[Defect] = field(default_factory=list)
    counts: Counter[tuple[int | None, str]] = field(default_factory=Counter)

    def add(self, rank: int | None, node: int | None, rule: str, message: str) -> None:
        """Note a defect."""
        self.counts[rank, rule] += 1
        if self.counts[rank, rule] <= LIMIT:
            self.defects.append(Defect(rank, node, rule, message))

    def warn(self, rank: int | None, node: int | None, rule: str, message: str) -> None:
        """Note a warning."""
        self.counts[rank, rule] += 1
        if self.counts[rank, rule] <= LIMIT:
            self.warnings.append(Defect(rank, node, rule, message))

    def report(self, unchecked: list[str], ranks: int, nodes: int) -> Report:
        """Return the report of everything found."""
        warned = {(found.rank, found.rule) for found in self.warnings}
        for (rank, rule), count in self.counts.items():
            if count > LIMIT:
                target = self.warnings if (rank, rule) in warned else self.defects
                target.append(Defect(rank, None, rule, f"{count - LIMIT} more like those above"))
        return Report(tuple(self.defects), tuple(self.warnings), tuple(unchecked), ranks, nodes)


def short(value: object) -> str:
    """Return a value as text of bounded length, since a file may hold any.

    >>> short("matmul"), len(short("x" * 10**6))
    ("'matmul'", 60)
    """
    text = repr(value[: SHOWN + 1] if isinstance(value, (str, bytes, tuple)) else value)
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + ".."


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "rank"), plural(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
