"""Programs: what one device runs, as instances of templates in the order they run.

An instance gives a template ids, a layer, a micro-batch and connections. Ids ascend in program order, which is also
the priority in which a consumer issues nodes that are free at the same time.
"""

from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stage.trace.template import Template

__all__ = ["COLUMNS", "PORTS", "Assembly", "Instance", "Program"]

Ints = NDArray[np.int64]

STREAMS = ("compute", "comm", "recv")
COLUMNS: Final = ("base", "forward", "layer", "micro_batch", "step", "tag", "bucket")
"""Columns of instances: their first id, that of the forward instance, and the numbers they are named by."""

NONE: Final = repeat(-1)
"""The id of a port that is connected to nothing, for each of them."""

PORTS: Final = len(COLUMNS)
"""The first of the columns that hold an id for each port of the template, -1 for none."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance as plain values: the number of its template, its columns, and ids of its ports, -1 for none."""

    template: int
    base: int
    forward: int
    layer: int
    micro_batch: int
    step: int
    tag: int
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
    """A program while it is put together."""

    nodes: int = 0
    step: int = 0
    _placing: dict[int, _Placing] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, -1))
    _order: list[_Placing] = field(default_factory=list)

    def last(self, stream: str) -> int:
        """The id of the last node placed on a stream, -1 if there is none."""
        return self._last[stream]

    def _learn(self, template: Template) -> _Placing:
        lasts = ((stream, template.last(stream)) for stream in STREAMS)
        known = tuple((stream, last) for stream, last in lasts if last is not None)
        found = _Placing(template, template.ports, len(template.nodes), known)
        self._placing[id(template)] = found
        self._order.append(found)
        return found

    def place(
        self,
        template: Template,
        layer: int = -1,
        micro_batch: int = -1,
        forward: int = -1,
        tag: int = 0,
        bucket: int = -1,
        **ports: int,
    ) -> int:
        """Add an instance after all others and return its first id; ports that are streams connect by themselves."""
        placing = self._placing.get(id(template)) or self._learn(template)
        last, base = self._last, self.nodes
        connected = map((last | ports).get, placing.ports, NONE)
        placing.rows.append((base, forward, layer, micro_batch, self.step, tag, bucket, *connected))
        for stream, offset in placing.lasts:
            last[stream] = base + offset
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
