"""Programs: what one device runs, as instances of templates in the order they run.

An instance gives a template ids, a layer, a micro-batch and connections. Ids ascend in program order, which is also
the priority in which a consumer issues nodes that are free at the same time.
"""

from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stage.trace.template import EARLIER, Template

__all__ = ["COLUMNS", "NO_EARLIER", "PIPELINE_PHASES", "PORTS", "Assembly", "Instance", "Program"]

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

NONE: Final = repeat(-1)
"""The id of a port that is connected to nothing, for each of them."""

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
class _Placing:
    """What placing a template needs to know of it, and the instances that are placed."""

    template: Template
    ports: tuple[str, ...]
    nodes: int
    lasts: tuple[tuple[str, int], ...]
    rows: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Assembly:
    """A program while it is put together; `step`, `chunk` and `pipeline_phase` are those of what is placed next."""

    nodes: int = 0
    step: int = 0
    chunk: int = 0
    pipeline_phase: int = 0
    _placing: dict[int, _Placing] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)
    _order: list[_Placing] = field(default_factory=list)

    def last(self, queue: str) -> int:
        """The id of the last node placed on a queue, -1 if there is none."""
        return self._last.get(queue, -1)

    def _learn(self, template: Template) -> _Placing:
        found = _Placing(template, template.ports, len(template.nodes), tuple(template.lasts().items()))
        self._placing[id(template)] = found
        self._order.append(found)
        return found

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
        placing = self._placing.get(id(template)) or self._learn(template)
        last, base = self._last, self.nodes
        connected = map((last | ports).get, placing.ports, NONE)
        numbers = (layer, micro_batch, self.step, tag, self.chunk, self.pipeline_phase, bucket)
        placing.rows.append((base, *earlier, *numbers, *connected))
        for queue, offset in placing.lasts:
            last[queue] = base + offset
        self.nodes = base + placing.nodes
        return base

    def program(self) -> Program:
        """What has been placed, as a program."""
        templates = tuple(placing.template for placing in self._order)
        columns = tuple(
            np.array(placing.rows, np.int64).reshape(-1, PORTS + len(placing.ports))
            for placing in self._order
        )
        return Program(templates, columns, self.nodes)
