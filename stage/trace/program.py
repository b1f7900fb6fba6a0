"""Programs: what one device runs, as instances of templates in the order they run.

An instance gives a template ids, a layer, a micro-batch and connections. Ids ascend in program order, which is also
the priority in which a consumer issues nodes that are free at the same time.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stage.trace.template import Ref, Template

__all__ = ["COLUMNS", "PORTS", "Assembly", "Instance", "Program"]

Ints = NDArray[np.int64]

STREAMS = ("compute", "comm", "recv")
COLUMNS: Final = ("base", "forward", "layer", "micro_batch", "step", "tag")
"""Columns of instances: their first id, that of the forward instance, and the numbers they are named by."""

PORTS: Final = len(COLUMNS)
"""The first of the columns that hold an id for each port of the template, -1 for none."""


class Instance(NamedTuple):
    """A template at a place of a program: its number, its first id, that of its forward instance, ids of its ports."""

    template: int
    base: int
    forward: int
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


@dataclass(slots=True)
class _Placing:
    """What placing a template needs to know of it, and the instances that are placed."""

    number: int
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
    _numbered: list[_Placing] = field(default_factory=list)

    def last(self, stream: str) -> int:
        """The id of the last node placed on a stream, -1 if there is none."""
        return self._last[stream]

    def _learn(self, template: Template) -> _Placing:
        lasts = ((stream, template.last(stream)) for stream in STREAMS)
        known = tuple((stream, last) for stream, last in lasts if last is not None)
        found = _Placing(len(self._numbered), template, template.ports, len(template.nodes), known)
        self._placing[id(template)] = found
        self._numbered.append(found)
        return found

    def place(
        self,
        template: Template,
        *,
        layer: int = -1,
        micro_batch: int = -1,
        forward: int = -1,
        tag: int = 0,
        **ports: int,
    ) -> Instance:
        """Add an instance after all others; ports that are streams connect by themselves."""
        placing = self._placing.get(id(template)) or self._learn(template)
        last, base = self._last, self.nodes
        connected = tuple([ports[p] if p in ports else last.get(p, -1) for p in placing.ports])
        placing.rows.append((base, forward, layer, micro_batch, self.step, tag, *connected))
        for stream, offset in placing.lasts:
            last[stream] = base + offset
        self.nodes = base + placing.nodes
        return Instance(placing.number, base, forward, connected)

    def resolve(self, instance: Instance, ref: Ref | None) -> int:
        """The id a reference of the instance's template means, -1 for none."""
        if ref is None:
            return -1
        if ref.kind == "port":
            ports = self._numbered[instance.template].ports
            return instance.ports[ports.index(str(ref.target))] if ref.target in ports else -1
        return (instance.base if ref.kind == "self" else instance.forward) + int(ref.target)

    def program(self) -> Program:
        """What has been placed, as a program."""
        templates = tuple(placing.template for placing in self._numbered)
        columns = tuple(
            np.array(placing.rows, np.int64).reshape(-1, PORTS + len(placing.ports))
            for placing in self._numbered
        )
        return Program(templates, columns, self.nodes)
