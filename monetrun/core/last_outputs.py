"""The outputs of the last step that the script still holds when a step begins, and where in the step it drops them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.keeping import with_events
from monetrun.core.step import LAST_OUTPUTS, OUTSIDE, Event, StepRecord


def with_last_outputs(events: Sequence[Event], nbytes: int, held: Sequence[tuple[int, int]]) -> list[Event]:
    """The events of a step before which the script holds ``nbytes`` of the last step's outputs.

    It holds them until it has new ones; when that is, one step does not tell: before the backward begins at the latest.

    Args:
        events: of the step.
        nbytes: of all outputs.
        held: those that graphs have given: graph, and bytes. New ones come with the first forward of the same graph.
    """
    if nbytes <= 0:
        return list(events)
    first = _next_backward(events, 0)
    later: list[tuple[int, int]] = []  # event before which an output is dropped, bytes
    for graph, size in held:
        forward = next((i for i, e in enumerate(events) if (e.kind, e.graph) == (FORWARD, graph)), 0)
        if size and forward > first:
            later.append((_next_backward(events, forward), size))
    found = list(events)
    for place, size in sorted(later, reverse=True):
        found.insert(place, _drop(size))
    if rest := nbytes - sum(size for _, size in later):
        found.insert(first, _drop(rest))
    return [Event(OUTSIDE, -1, nbytes, nbytes, LAST_OUTPUTS), *found]


def last_outputs_bytes(record: StepRecord) -> int:
    """Bytes of the last step's outputs, which the script holds when a step begins."""
    return sum(e.delta_bytes for e in record.events if e.name == LAST_OUTPUTS and e.delta_bytes > 0)


def with_more_outputs(record: StepRecord, nbytes: int) -> StepRecord:
    """The record of a step before which the script holds so many bytes more of them, until its backward begins."""
    return with_events(record, partial(with_last_outputs, nbytes=nbytes, held=()))


def dropped_later(events: Sequence[Event]) -> list[int]:
    """Bytes of each of the last step's outputs that is still held after the step's first backward."""
    first = _next_backward(events, 0)
    return [-e.delta_bytes for e in events[first:] if is_drop(e)]


def is_drop(event: Event) -> bool:
    """Whether the script drops outputs of the last step."""
    return event.name == LAST_OUTPUTS and event.delta_bytes < 0


def with_outputs_dropped(record: StepRecord, freed: Sequence[tuple[int, int]]) -> StepRecord:
    """The record, where the script drops the last step's outputs as it was seen to.

    Args:
        record: of a step.
        freed: bytes of them that are dropped when what follows each call, in order, is at its peak, and at the end of
            that; grows. Those that were not dropped in what was seen are dropped where the record has it after that, or
            with the step's end.
    """
    return with_events(record, partial(_dropped_after_calls, freed=freed))


def _dropped_after_calls(recorded: Sequence[Event], freed: Sequence[tuple[int, int]]) -> list[Event]:
    events: list[Event] = []
    total, told, calls = -sum(e.delta_bytes for e in recorded if is_drop(e)), 0, 0
    dropped = 0  # by now, as recorded

    def tell(nbytes: int) -> None:
        nonlocal told
        if (more := min(nbytes, total) - told) > 0:
            events.append(_drop(more))
            told += more

    for event in recorded:
        if is_drop(event):
            dropped -= event.delta_bytes
            if calls >= len(freed):
                tell(dropped)
            continue
        is_call = event.kind in (FORWARD, BACKWARD)
        if is_call and 0 < calls <= len(freed):
            tell(freed[calls - 1][1])
        events.append(event)
        calls += is_call
        if is_call and calls <= len(freed):
            tell(freed[calls - 1][0])
    tell(total)
    return events


def dropping_outputs_early(events: Sequence[Event], *, all_of_them: bool = True) -> tuple[Event, ...]:
    """The events with the last step's outputs freed right after a forward: the first one since a backward.

    Without ``all_of_them`` only those that are held after the step's first backward.
    """
    found: list[Event] = []
    place = 0  # after the first forward since a backward
    waits = all_of_them
    for event in events:
        if is_drop(event) and place and not waits:
            found.insert(place, event)
            continue
        found.append(event)
        if event.kind == FORWARD and waits:
            place, waits = len(found), False
        waits |= event.kind == BACKWARD
    return tuple(found)


def _next_backward(events: Sequence[Event], start: int) -> int:
    return next((i for i, e in enumerate(events) if i >= start and e.kind == BACKWARD), len(events))


def _drop(nbytes: int) -> Event:
    return Event(OUTSIDE, -1, -nbytes, 0, LAST_OUTPUTS)
