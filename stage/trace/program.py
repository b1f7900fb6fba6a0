"""Programs: what one device runs, as instances of templates in the order they run.

An instance gives a template ids, a layer, a micro-batch and connections. Ids ascend in program order, which is also
the priority in which a consumer issues nodes that are free at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stage.trace.template import EARLIER, Ref, Template

__all__ = ["Assembly", "Instance", "Program"]

NONE = (-1,) * len(EARLIER)


@dataclass(frozen=True, slots=True)
class Instance:
    """A template at a place of a program.

    `earlier` are the bases of the instances in `EARLIER`, and `ports` an id for each of the template's ports, -1 for
    none. `pipeline_phase` is `warmup`, `steady` or `cooldown` where there is a pipeline.
    """

    template: int
    base: int
    earlier: tuple[int, ...] = NONE
    ports: tuple[int, ...] = ()
    layer: int = -1
    micro_batch: int = -1
    step: int = 0
    tag: int = 0
    chunk: int = 0
    pipeline_phase: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """The templates and instances of one rank class; `nodes` is how many nodes they make."""

    templates: tuple[Template, ...]
    instances: tuple[Instance, ...]
    nodes: int

    def counts(self) -> list[int]:
        """How many instances each template has."""
        counts = [0] * len(self.templates)
        for instance in self.instances:
            counts[instance.template] += 1
        return counts


@dataclass(slots=True)
class Assembly:
    """A program while it is put together; `step`, `chunk` and `pipeline_phase` are those of what is placed next."""

    templates: list[Template] = field(default_factory=list)
    instances: list[Instance] = field(default_factory=list)
    nodes: int = 0
    step: int = 0
    chunk: int = 0
    pipeline_phase: str = ""
    _index: dict[int, int] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)
    _lasts: list[dict[str, int]] = field(default_factory=list)

    def last(self, stream: str) -> int:
        """The id of the last node placed on a stream, -1 if there is none."""
        return self._last.get(stream, -1)

    def place(
        self,
        template: Template,
        *,
        layer: int = -1,
        micro_batch: int = -1,
        earlier: tuple[int, ...] = NONE,
        tag: int = 0,
        **ports: int,
    ) -> Instance:
        """Add an instance after all others; ports that are streams connect by themselves."""
        index = self._index.get(id(template))
        if index is None:
            index = self._index[id(template)] = len(self.templates)
            self.templates.append(template)
            self._lasts.append(template.lasts())
        known = {**self._last, **ports}
        connected = tuple(known.get(port, -1) for port in template.ports)
        instance = Instance(
            index, self.nodes, earlier, connected, layer, micro_batch,
            self.step, tag, self.chunk, self.pipeline_phase,
        )  # fmt: skip
        self.instances.append(instance)
        for stream, last in self._lasts[index].items():
            self._last[stream] = self.nodes + last
        self.nodes += len(template.nodes)
        return instance

    def resolve(self, instance: Instance, ref: Ref | None) -> int:
        """The id a reference of the instance's template means, -1 for none."""
        if ref is None:
            return -1
        if ref.kind == "port":
            ports: Sequence[str] = self.templates[instance.template].ports
            return instance.ports[ports.index(str(ref.target))] if ref.target in ports else -1
        base = instance.base if ref.kind == "self" else instance.earlier[EARLIER.index(ref.kind)]
        return base + int(ref.target)

    def program(self) -> Program:
        """What has been placed, as a program."""
        return Program(tuple(self.templates), tuple(self.instances), self.nodes)
