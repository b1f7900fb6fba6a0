"""What explanations share: where an event stands, groups of ranks, and moving events to where a record has them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from benchmarks.records.compare import Context
from benchmarks.records.event import Event
from stage.symbols import dtype_bytes

__all__ = [
    "block",
    "by_block",
    "group_over",
    "is_forward",
    "is_reduction",
    "like_recorded",
    "move",
    "part",
    "resized",
    "without",
]


def part(event: Event) -> str:
    """The name of what made an event, without phase and numbers: `layer0.moe.permute.all_to_all`."""
    return event.name.partition("/")[0]


def block(event: Event) -> str:
    """The block an event belongs to, with its micro-batch and phase: `layer0/backward/mb1`; nothing for a mark."""
    name = part(event)
    if not name or event.micro_batch < 0:
        return ""
    return f"{name.partition('.')[0]}/{event.phase}/{event.micro_batch}"


def is_forward(event: Event) -> bool:
    """Whether an event is part of a forward, run for the first time or recomputed."""
    return event.phase == "forward" or event.name.partition("/")[2].startswith("recompute")


def is_reduction(event: Event) -> bool:
    """Whether an event reduces a gradient bucket."""
    return part(event).removeprefix("expert_").startswith("bucket")


def without(events: Iterable[Event], dropped: Callable[[Event], bool]) -> list[Event]:
    """The events for which `dropped` is false."""
    return [event for event in events if not dropped(event)]


def group_over(context: Context, axes: Sequence[str]) -> tuple[int, ...]:
    """The ranks that share the group over these axes with the context's rank."""
    row = context.mesh.group_index(axes, context.rank)
    return tuple(int(rank) for rank in context.mesh.groups(axes)[row])


def by_block(
    events: Sequence[Event], chosen: Callable[[Event], bool], rewrite: Callable[[list[Event]], list[Event]]
) -> list[Event]:
    """The events with each run of consecutive chosen ones of one block and direction rewritten."""
    result: list[Event] = []
    run: list[Event] = []
    for event in [*events, None]:
        if run and (event is None or not chosen(event) or _side(event) != _side(run[0])):
            result += rewrite(run)
            run = []
        if event is not None:
            (run if chosen(event) else result).append(event)
    return result


def _side(event: Event) -> tuple[str, bool]:
    return block(event), is_forward(event)


def like_recorded(theirs: Sequence[Event], moved: Sequence[Event], span: range) -> list[int] | None:
    """Indices, in `theirs` and within `span`, of the events `moved`; None unless exactly these are there."""
    wanted = Counter(moved)
    found = [i for i in span if theirs[i] in wanted]
    return found if Counter(theirs[i] for i in found) == wanted else None


def move(rest: Sequence[Event], theirs: Sequence[Event], places: Sequence[int]) -> list[Event]:
    """`rest` with the events of `theirs` at `places` put in after as many others as stand before them there."""
    result = list(rest)
    for place in places:
        if place > len(result):
            return list(rest)
        result.insert(place, theirs[place])
    return result


def resized(event: Event, elements: int, dtype: str, **changes: object) -> Event:
    """The event with another number of elements and dtype."""
    return replace(event, bytes=elements * dtype_bytes(dtype), dtype=dtype, **changes)  # type: ignore[arg-type]
