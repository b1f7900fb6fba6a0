"""Writing a set, whole or not at all: a run that is stopped leaves what it wrote for another to go on with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import TraceError
from stage.io.engine import Engine
from stage.io.journal import Journal, check_inputs, find_intact, read_journal
from stage.io.parts import GROUPS, JOURNAL, MANIFEST, groups_text, json_text, trace_name
from stage.io.store import reading, writing
from stage.io.target import Target, open_target

__all__ = ["Content", "write_set"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Content:
    """What a set holds: `ranks` of the `world` and their `size`s in bytes, groups and manifest.

    `size` is None where the sizes are not known before the ranks are made.
    """

    world: int
    ranks: Sequence[int]
    size: Callable[[int], int] | None
    groups: Mapping[str, Sequence[int]]
    manifest: Mapping[str, Any]
    prefix: str = "trace"

    def __post_init__(self) -> None:
        assert all(0 <= rank < self.world for rank in self.ranks), self.world
        assert "/" not in self.prefix, self.prefix

    def name(self, rank: int) -> str:
        """The name of a rank's file."""
        return trace_name(self.prefix, rank)


def write_set(
    place: str | Path,
    content: Content,
    engine: Engine,
    *,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a set at a path or URL by an engine, the manifest last.

    What stands there is an error, or with `force` replaced, if it is a trace set and nothing else. With `resume` the
    ranks that an interrupted run of the same inputs has written are kept where they are intact; without, it starts
    over. `progress` is called with the number of ranks written and of those to write.
    """
    target = open_target(place)
    target.check(force=force)
    manifest = {"world": content.world, **content.manifest}
    texts = {GROUPS: groups_text(content.groups).encode(), MANIFEST: json_text(manifest).encode()}
    kept = find_kept(target, content, manifest) if resume else None
    todo = [rank for rank in content.ranks if rank not in (kept or ())]
    if content.size is not None:
        target.check_room([*map(content.size, todo), *map(len, texts.values())])
    journal = Journal(target.store)
    with writing(target.name):
        begin(target, journal, content, manifest, kept)
    with keeping(target, journal, len(content.ranks)):
        for written in engine(target.store, content.prefix, todo):
            journal.note(written)
            if progress is not None:
                progress(journal.count, len(content.ranks))
        assert journal.count == len(content.ranks), "an engine writes every rank once"
        for name, text in texts.items():
            target.store.write({name: text})
        target.finish()


def find_kept(target: Target, content: Content, manifest: Mapping[str, Any]) -> set[int] | None:
    """Return the ranks that an interrupted run left intact, None where it left nothing to go on with."""
    with reading(target.store.where()):
        found = read_journal(target.store)
        if found is None:
            return None
        check_inputs(target.store.where(), found[0], manifest)
        return set(find_intact(target.store, found[1], content.name)) & set(content.ranks)


def begin(
    target: Target,
    journal: Journal,
    content: Content,
    manifest: Mapping[str, Any],
    kept: set[int] | None,
) -> None:
    """Start a set, or go on with one of which only what is intact stays."""
    if kept is None:
        target.clear()
        journal.begin(manifest)
        return
    staying = {JOURNAL, *map(content.name, kept)}
    target.store.remove([name for name in target.store.names() if name not in staying])
    journal.resume(len(kept))


@contextmanager
def keeping(target: Target, journal: Journal, total: int) -> Iterator[None]:
    """Leave the ranks that are written for another run when this one stops, and say so."""
    try:
        yield
    except BaseException as err:
        with suppress(OSError):
            journal.flush()
            if not journal.count:
                target.abandon()
        left = f"{journal.count:,} of {total:,} ranks are in {target.store.where()}"
        if isinstance(err, OSError):
            happened = f"{target.name} cannot be written ({err.strerror or err})"
            if journal.count:
                raise TraceError(f"{happened}: {left}; check space and rights, then --resume") from err
            raise TraceError(f"{happened}, and nothing was: check space and rights") from err
        if journal.count:
            err.add_note(f"{left}; --resume goes on from there")
        raise
