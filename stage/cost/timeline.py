"""The timeline: when each node of a job starts and ends, given how long each takes.

A node starts once all that it depends on has ended; streams are chains of dependencies, so nothing else keeps two nodes
of one stream apart. Two kinds of nodes wait for other devices: a collective starts when all its members are ready, and
a receive ends when the message has arrived, which is when its send ends.

A **track** is one device, or all devices of a rank class: they run the same program, so they do the same at the same
time. Nodes are taken in their order on each track, which never blocks for a program in which nothing waits for what
stands behind it; for any other the nodes whose turn has come are looked for.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stage.errors import TraceError

__all__ = ["Span", "Track", "run_tracks"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Track:
    """The nodes of a device in an order in which each stands behind all it depends on.

    `seconds[n]` says how long each takes. `after[n, k]` are the places of what a node depends on, -1 for none. No node
    starts before its `issued[n]`, when the host hands it to the device; without, the host is always ahead.
    `sends` and `receives` give the message of each, by their places; a message has one send and one receive. `meets`
    gives the meeting of a collective that devices of several tracks take part in, and how many tracks these are.
    """

    seconds: Floats
    after: Ints
    sends: Mapping[int, Hashable] = field(default_factory=dict)
    receives: Mapping[int, Hashable] = field(default_factory=dict)
    meets: Mapping[int, tuple[Hashable, int]] = field(default_factory=dict)
    issued: Floats | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """When the nodes of a track start and end, in seconds from the start of the job.

    A receive lasts from the arrival of its message on, which is no time: waiting is not work.
    """

    start: Floats
    end: Floats


class _Device:
    """A track while it runs: `ends` of what has run, then a 0 for what depends on nothing."""

    def __init__(self, track: Track) -> None:
        self.seconds = track.seconds.tolist()
        self.after = track.after.tolist()
        self.issued = [0.0] * len(self.seconds) if track.issued is None else track.issued.tolist()
        self.sends, self.meets, self.receives = track.sends, track.meets, track.receives
        self.special = {*track.sends, *track.receives, *track.meets}
        self.ends: list[float | None] = [*[None] * len(self.seconds), 0.0]
        self.starts = [0.0] * len(self.seconds)
        self.next = 0

    def ready(self, at: int) -> float:
        """When a node could start for all that its own device knows; what it depends on has run."""
        ready: float = max(self.issued[at], *[self.ends[k] for k in self.after[at]])
        return ready


class _Clock:
    """All devices of a job, what has been sent, and who has come to which meeting."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.devices = [_Device(track) for track in tracks]
        self.arrived: dict[Hashable, float] = {}
        self.ready: dict[Hashable, dict[int, float]] = {}

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for number in range(len(self.devices)):
                moved = self._go_on(number) or moved
            if not moved:
                for number in range(len(self.devices)):
                    moved = self._skip_ahead(number) or moved

    def _go_on(self, number: int) -> bool:
        """Run the nodes of a device until one waits for another device; whether any has run."""
        device, first = self.devices[number], self.devices[number].next
        ends, after, seconds, starts = device.ends, device.after, device.seconds, device.starts
        special, issued, at, count = device.special, device.issued, device.next, len(device.seconds)
        while at < count:
            if at in special or ends[at] is not None:
                if ends[at] is None and not self._run_special(number, at):
                    break
            else:
                ready = max(issued[at], *[ends[k] for k in after[at]])
                starts[at], ends[at] = ready, ready + seconds[at]
            at += 1
        device.next = at
        return at > first

    def _run_special(self, number: int, at: int) -> bool:
        """Run a node that has to do with other devices, if it can; what it depends on has run."""
        device = self.devices[number]
        ready = device.ready(at)
        start: float | None = ready
        if at in device.receives:
            arrival = self.arrived.get(device.receives[at])
            start = None if arrival is None else max(ready, arrival)
        elif at in device.meets:
            key, members = device.meets[at]
            come = self.ready.setdefault(key, {})
            come[number] = ready
            start = max(come.values()) if len(come) == members else None
        if start is None:
            return False
        device.starts[at], device.ends[at] = start, start + device.seconds[at]
        if at in device.sends:
            self.arrived[device.sends[at]] = start + device.seconds[at]
        return True

    def _skip_ahead(self, number: int) -> bool:
        """Run what can run behind a node that waits; whether any has run."""
        device, moved = self.devices[number], False
        for at in range(device.next, len(device.seconds)):
            if device.ends[at] is not None or any(device.ends[k] is None for k in device.after[at]):
                continue
            if at in device.special:
                moved = self._run_special(number, at) or moved
                continue
            ready = device.ready(at)
            device.starts[at], device.ends[at], moved = ready, ready + device.seconds[at], True
        return moved


def run_tracks(tracks: Sequence[Track]) -> list[Span]:
    """When each node of each track starts and ends.

    A `TraceError` names the first node that waits for ever: for a message that is never sent, or a member that never
    comes.

    >>> kernels = Track(np.array([1.0, 2.0]), np.array([[-1], [0]]), sends={1: "m"})
    >>> run_tracks([kernels, Track(np.array([0.0, 1.0]), np.array([[-1], [0]]), receives={0: "m"})])[1].end.tolist()
    [3.0, 4.0]
    """
    clock = _Clock(tracks)
    clock.run()
    spans = []
    for number, device in enumerate(clock.devices):
        for at, end in enumerate(device.ends):
            if end is None:
                raise TraceError(
                    f"node {at} of track {number} waits for ever: verify the set to see what is missing"
                )
        spans.append(Span(np.array(device.starts), np.array(device.ends[:-1], np.float64)))
    return spans
