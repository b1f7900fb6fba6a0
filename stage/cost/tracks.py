"""From the programs of a job to tracks of the timeline, one for each class of ranks that do the same at the same time.

What links tracks is a formula of the mesh. A message goes to the class of the peer; where ranks send to ranks of their
own class (a ring) its receive is met by a send of the same track. A collective whose group spans several classes is a
meeting of their tracks.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stage.cost.timeline import Track
from stage.trace.groups import PIPELINE_ENDS
from stage.trace.job import Job
from stage.trace.partition import STAGES, Partition
from stage.trace.peer import Peer, peer_positions
from stage.trace.program import COLUMNS, PORTS, Program
from stage.trace.template import EARLIER, Template

__all__ = ["Nodes", "job_tracks", "program_nodes"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BASE, TAG = COLUMNS.index("base"), COLUMNS.index("tag")
SOURCE = {"self": BASE} | {name: COLUMNS.index(name) for name in EARLIER}


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a program by their ids: the template that each is of, its place there, its row, and dependencies.

    `after[n, k]` are ids, -1 for none.
    """

    template: Ints
    place: Ints
    row: Ints
    after: Ints

    def expand(self, values: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
        """What `values` has for each node of each template, as a column over all nodes."""
        firsts = np.cumsum([0, *(len(part) for part in values)])[:-1]
        column: NDArray[np.generic] = np.concatenate(values)[firsts[self.template] + self.place]
        return column


def program_nodes(program: Program) -> Nodes:
    """All nodes of a program, in the order of their ids."""
    width = max(len(node.deps) for template in program.templates for node in template.nodes)
    after = np.full((program.nodes, max(width, 1)), -1, np.int64)
    template, place, row = (np.empty(program.nodes, np.int64) for _ in range(3))
    for number, (one, rows) in enumerate(zip(program.templates, program.instances, strict=True)):
        ids = rows[:, BASE, None] + np.arange(len(one.nodes))
        template[ids], place[ids], row[ids] = number, np.arange(len(one.nodes)), np.arange(len(rows))[:, None]
        for at, node in enumerate(one.nodes):
            for k, ref in enumerate(node.deps):
                after[ids[:, at], k] = _ids(one, rows, ref.kind, ref.target)
    return Nodes(template, place, row, after)


def _ids(template: Template, rows: Ints, kind: str, target: int | str) -> Ints:
    """The ids that a dependency means for each instance, -1 for none."""
    if kind == "port":
        connected: Ints = rows[:, PORTS + template.ports.index(str(target))]
        return connected
    found: Ints = rows[:, SOURCE[kind]] + int(target)
    return found


Times = Callable[[Template, int], Floats]
"""Seconds of each node of a template on the ranks of a class."""


def job_tracks(job: Job, nodes: Sequence[Nodes], seconds: Times, host: Times | None = None) -> list[Track]:
    """A track for each class of ranks, whose nodes take these seconds; `nodes` are those of each program.

    `host` is how long the host takes to issue each node. It issues them in the order of the program, waits for none,
    and is not waited for without.
    """
    classes = Partition.of(job.mesh, job.variants)
    found = []
    for number, (program, own) in enumerate(zip(job.programs, nodes, strict=True)):
        issued = None if host is None else np.cumsum(_column(program, own, host, number))
        links = _Links(classes, number, program).of(own)
        found.append(Track(_column(program, own, seconds, number), own.after, *links, issued))
    return found


def _column(program: Program, nodes: Nodes, times: Times, number: int) -> Floats:
    """The times of all nodes of a program."""
    column: Floats = nodes.expand([times(template, number) for template in program.templates]).astype(float)
    return column


class _Links:
    """What a class has to do with others, and with itself."""

    def __init__(self, classes: Partition, number: int, program: Program) -> None:
        self.classes, self.number, self.program = classes, number, program
        self.first = np.array([classes.first(number)], np.int64)
        self.place = classes.coordinates(number)
        self.turns: dict[tuple[str, ...], int] = {}

    def of(
        self, nodes: Nodes
    ) -> tuple[dict[int, Hashable], dict[int, Hashable], dict[int, tuple[Hashable, int]]]:
        """Messages sent and received, and meetings, by the id of their node."""
        sends: dict[int, Hashable] = {}
        receives: dict[int, Hashable] = {}
        meets: dict[int, tuple[Hashable, int]] = {}
        kinds = [np.array([_kind(n.kind) for n in t.nodes], np.int64) for t in self.program.templates]
        column = nodes.expand(kinds)
        for at in np.flatnonzero(column).tolist():
            template = self.program.templates[nodes.template[at]]
            node = template.nodes[nodes.place[at]]
            if node.peer is None:
                members = self._members(node.axes)
                if members > 1:
                    turn = self.turns[node.axes] = self.turns.get(node.axes, -1) + 1
                    meets[at] = (node.axes, turn, *self._elsewhere(node.axes)), members
                continue
            tag = int(self.program.instances[nodes.template[at]][nodes.row[at], TAG]) + node.tag_offset
            message = self._message(node.peer, tag, sends=node.kind == "send")
            (sends if node.kind == "send" else receives)[at] = message
        return sends, receives, meets

    def _members(self, axes: tuple[str, ...]) -> int:
        """Tracks that have members in a group over these axes."""
        if axes == PIPELINE_ENDS:
            return 2
        return self.classes.mesh.degree([axis for axis in self.classes.axes if axis in axes])

    def _elsewhere(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Where the group stands on the class axes that it does not span."""
        spanned = (STAGES,) if axes == PIPELINE_ENDS else axes
        return tuple(at for axis, at in self.place.items() if axis not in spanned)

    def _message(self, peer: Peer, tag: int, *, sends: bool) -> Hashable:
        """What a send and its receive both call a message: the classes it is between, how far it goes, and its tag."""
        other = int(self.classes.numbers(peer_positions(self.classes.mesh, self.first, peer))[0])
        degree = self.classes.mesh.degree(peer.atoms)
        ends, step = (self.number, other), peer.offset % degree
        return (*ends, peer.atoms, step, tag) if sends else (*ends[::-1], peer.atoms, -step % degree, tag)


def _kind(kind: str) -> int:
    return int(kind != "compute")
