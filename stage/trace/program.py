"""Programs: what one device runs, as instances of templates in the order they run.

An instance gives a template ids, a layer, a micro-batch and connections. Ids ascend in program order, which is also
the priority in which a consumer issues nodes that are free at the same time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stage.trace.template import EARLIER, Template

__all__ = ["COLUMNS", "NO_EARLIER", "PIPELINE_PHASES", "PORTS", "Assembly", "Instance", "Program", "Rows"]

Ints = NDArray[np.int64]

COLUMNS: Final = (
    "base",
    *EARLIER,
    "layer",
    "micro_batch",
    "step",
    "tag",
    "chunk",
    "pipeline_phase",
    "bucket",
)
"""Columns of instances: their first id, those of earlier ones, and the numbers they are named by or marked with."""

PORTS: Final = len(COLUMNS)
"""The first of the columns that hold an id for each port of the template, -1 for none."""

PIPELINE_PHASES: Final = ("", "warmup", "steady", "cooldown")
"""What the numbers of a phase of the pipeline mean; the first is none."""

NO_EARLIER: Final = (-1,) * len(EARLIER)


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance as plain values: the number of its template, its columns, and ids of its ports, -1 for none."""

    template: int
    base: int
    forward: int
    input: int
    layer: int
    micro_batch: int
    step: int
    tag: int
    chunk: int
    pipeline_phase: int
    bucket: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The templates of one rank class, and for each its instances, a row each; `nodes` is how many nodes they make."""

    templates: tuple[Template, ...]
    instances: tuple[Ints, ...]
    nodes: int

    def counts(self) -> list[int]:
        """How many instances each template has."""
        return [len(rows) for rows in self.instances]

    def in_order(self) -> list[Instance]:
        """The instances in the order they run."""
        found = [
            Instance(number, **dict(zip(COLUMNS, row, strict=False)), ports=tuple(row[PORTS:]))
            for number, rows in enumerate(self.instances)
            for row in rows.tolist()
        ]
        return sorted(found, key=lambda instance: instance.base)


@dataclass(slots=True)
class Rows:
    """The instances of a template that are placed, one by one and many at a time, and what placing needs to know."""

    template: Template
    ports: tuple[str, ...]
    nodes: int
    lasts: tuple[tuple[str, int], ...]
    placed: list[tuple[int, ...]] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)

    @classmethod
    def of(cls, template: Template) -> "Rows":
        """No instances yet."""
        return cls(template, template.ports, len(template.nodes), tuple(template.lasts().items()))

    def in_order(self) -> Ints:
        """All of them, a row each, in the order of their ids."""
        own = np.array(self.placed, np.int64).reshape(-1, PORTS + len(self.ports))
        rows = np.concatenate([own, *self.columns])
        return rows[np.argsort(rows[:, 0])]


@dataclass(slots=True)
class Assembly:
    """A program while it is put together; `step`, `chunk` and `pipeline_phase` are those of what is placed next."""

    nodes: int = 0
    step: int = 0
    chunk: int = 0
    pipeline_phase: int = 0
    _rows: dict[int, Rows] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)

    @property
    def templates(self) -> list[Rows]:
        """The instances of each template."""
        return list(self._rows.values())

    def rows(self, template: Template) -> Rows:
        """The instances of a template."""
        found = self._rows.get(id(template))
        if found is None:
            found = self._rows[id(template)] = Rows.of(template)
        return found

    def last(self, queue: str) -> int:
        """The id of the last node placed on a queue, -1 if there is none."""
        return self._last.get(queue, -1)

    def place(
        self,
        template: Template,
        layer: int = -1,
        micro_batch: int = -1,
        earlier: tuple[int, ...] = NO_EARLIER,
        tag: int = 0,
        bucket: int = -1,
        **ports: int,
    ) -> int:
        """Add an instance after all others and return its first id; ports that are queues connect by themselves."""
        rows, base = self.rows(template), self.nodes
        connected = [ports[name] if name in ports else self.last(name) for name in rows.ports]
        numbers = (layer, micro_batch, self.step, tag, self.chunk, self.pipeline_phase, bucket)
        rows.placed.append((base, *earlier, *numbers, *connected))
        self.advance(rows.nodes, {queue: base + offset for queue, offset in rows.lasts})
        return base

    def advance(self, nodes: int, lasts: Mapping[str, int]) -> None:
        """Go on after so many more nodes, the last of which on their queues are these."""
        self.nodes += nodes
        self._last.update(lasts)

    def program(self) -> Program:
        """What has been placed, as a program."""
        placed = [(rows.template, rows.in_order()) for rows in self.templates]
        placed.sort(key=lambda item: int(item[1][0, 0]))
        return Program(
            tuple(template for template, _ in placed), tuple(rows for _, rows in placed), self.nodes
        )
