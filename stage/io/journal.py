"""The journal of a set that is being written: what it will be, and the checksum of every rank written so far.

It stands in the set until that is complete, so a set with a journal is unfinished whatever else is there. The first
line is the manifest as it will be; each further line holds a rank with the size and the CRC-32 of its file. A rank
counts as written when its file has them, never because the journal says so. The last line may be torn.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stage.errors import TraceError
from stage.io.engine import Written, checked
from stage.io.parts import JOURNAL
from stage.io.store import Store

__all__ = ["Journal", "check_inputs", "find_intact", "read_journal"]

LINE = re.compile(rb"([0-9]{1,10}) ([0-9]{1,18}) ([0-9a-f]{8})")
SECONDS, REMOTE_SECONDS = 0.25, 5.0
SHOWN = 40
DERIVED = ("class_axes", "classes", "groups", "ranks", "world")


class Journal:
    """Notes ranks as they are written; what is noted reaches the store a few times a second."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        self._store = store
        self._lines: list[bytes] = []
        self._pause = REMOTE_SECONDS if store.batch else SECONDS
        self._flushed = time.monotonic()

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Start the journal of a set with this manifest."""
        self._store.write({JOURNAL: json.dumps(manifest, sort_keys=True).encode() + b"\n"})

    def resume(self, count: int) -> None:
        """Go on after what is there, `count` ranks of which stand."""
        self.count = count
        self._store.append(JOURNAL, b"\n")

    def note(self, written: Written) -> None:
        """Note that a rank's file is written."""
        self.count += 1
        self._lines.append(b"%d %d %08x\n" % written)
        if time.monotonic() - self._flushed > self._pause:
            self.flush()

    def flush(self) -> None:
        """Hand what is noted to the store."""
        if self._lines:
            self._store.append(JOURNAL, b"".join(self._lines))
        self._lines.clear()
        self._flushed = time.monotonic()


def read_journal(store: Store) -> tuple[Mapping[str, Any], dict[int, Written]] | None:
    """Return the manifest and the checksums of a journal, None where there is no usable one."""
    if not store.has(JOURNAL):
        return None
    head, _, body = store.read(JOURNAL).partition(b"\n")
    try:
        manifest = json.loads(head)
    except (ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict):
        return None
    found = (LINE.fullmatch(line) for line in body.split(b"\n")[:-1])
    noted = [(int(line[1]), int(line[2]), int(line[3], 16)) for line in found if line]
    return manifest, {written[0]: written for written in noted}


def check_inputs(place: str, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise if a journal is that of another set, naming what differs."""
    asked = json.loads(json.dumps(asked))
    for key in sorted(begun.keys() | asked.keys(), key=lambda key: (key in DERIVED, key)):
        before, now = begun.get(key), asked.get(key)
        if before != now:
            inner = _first_difference(before, now)
            raise TraceError(
                f"{place} was begun with other inputs ({key}{inner}): resume with the same, "
                "or start over without --resume"
            )


def _first_difference(before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                return f".{key}{_first_difference(before.get(key), now.get(key))}"
    return f" was {_short(before)}, now {_short(now)}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 2]}.."


def find_intact(store: Store, noted: Mapping[int, Written], name: Callable[[int], str]) -> Iterator[int]:
    """Yield the ranks noted whose files are as they were written."""
    present = set(store.names())
    for rank, written in noted.items():
        if name(rank) in present and checked(rank, store.read(name(rank))) == written:
            yield rank
