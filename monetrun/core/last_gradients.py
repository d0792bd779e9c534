"""The gradients of the last step that are still there when a step begins."""

from __future__ import annotations

from collections.abc import Sequence

from monetrun.core.graph import BACKWARD
from monetrun.core.keeping import with_events
from monetrun.core.step import LAST_GRADIENTS, OUTSIDE, Event, StepRecord


def are_there(nbytes: int) -> Event:
    """A step begins with so many bytes of them."""
    return Event(OUTSIDE, -1, nbytes, nbytes, LAST_GRADIENTS)


def are_freed(nbytes: int) -> Event:
    """So many bytes of them are freed."""
    return Event(OUTSIDE, -1, -nbytes, 0, LAST_GRADIENTS)


def last_gradients_bytes(record: StepRecord) -> int:
    """Bytes of the last step's gradients that are there when the step begins, and that it frees."""
    return sum(e.delta_bytes for e in record.events if e.name == LAST_GRADIENTS and e.delta_bytes > 0)


def with_gradients_kept(record: StepRecord, nbytes: int) -> StepRecord:
    """The record of a step that begins with so many bytes more of the last step's gradients, to which it adds its own.

    They are freed when the new ones are there, which stay in their place.
    """

    def kept(events: Sequence[Event]) -> list[Event]:
        end = 1 + max((i for i, e in enumerate(events) if e.kind == BACKWARD), default=-1)
        return [are_there(nbytes), *events[:end], are_freed(nbytes), *events[end:]]

    return with_events(record, kept) if nbytes > 0 else record
