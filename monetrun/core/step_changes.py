"""Records of steps with what was learned after they were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from monetrun.core.graph import FORWARD
from monetrun.core.plain import PlainPeaks
from monetrun.core.plain_step import plain_step
from monetrun.core.requests import reserved_under
from monetrun.core.step import HELD_SINCE, LAST_OUTPUTS, OUTSIDE, Event, Segment, StepRecord


def with_plain_peaks(record: StepRecord, plain: PlainPeaks) -> StepRecord:
    """The record with the measured peaks of the plain run.

    They also tell when the script drops the last step's outputs, which one recorded step does not: as soon as it has
    new ones, or not before the backward begins.
    """
    if record.memory is None:
        return record
    measured = replace(
        record.memory,
        plain_allocated_bytes=plain.allocated_bytes,
        plain_reserved_bytes=plain.reserved_bytes,
    )
    late = replace(record, memory=measured)
    early = replace(late, events=_dropping_outputs_early(record.events))
    if early.events == late.events:
        return late

    def error(candidate: StepRecord) -> int:
        allocated = reserved_under(*plain_step(candidate), measured.plain_settings).allocated_peak_bytes
        return abs(allocated - plain.allocated_bytes)

    return min(late, early, key=error)


def with_excess(record: StepRecord, excess_bytes: int) -> StepRecord:
    """The record with what planned steps were seen to reserve beyond the plan; the same one where that is not more."""
    if record.memory is None or excess_bytes <= record.memory.excess_bytes:
        return record
    return replace(record, memory=replace(record.memory, excess_bytes=excess_bytes))


def with_more_held(record: StepRecord, nbytes: int) -> StepRecord:
    """The record of a step before which so many bytes more are held than in the recorded one."""
    memory = record.memory
    if memory is not None:
        memory = replace(memory, base=(*memory.base, Segment(False, (nbytes,))))
    ledger = {**record.ledger, HELD_SINCE: record.ledger.get(HELD_SINCE, 0) + nbytes}
    return replace(record, base_bytes=record.base_bytes + nbytes, ledger=ledger, memory=memory)


def last_outputs_bytes(record: StepRecord) -> int:
    """Bytes of the last step's outputs, which the script holds when a step begins."""
    return sum(e.delta_bytes for e in record.events if e.name == LAST_OUTPUTS and e.delta_bytes > 0)


def with_outputs_dropped(record: StepRecord, freed_bytes: Sequence[int]) -> StepRecord:
    """The record, where the script drops the last step's outputs after forwards, and not before the backward begins.

    Args:
        record: of a step.
        freed_bytes: how much of them is dropped when what follows each forward, in order, is at its peak; grows.
    """
    events: list[Event] = []
    forwards = before = 0
    for event in record.events:
        if event.name == LAST_OUTPUTS and event.delta_bytes < 0:
            event = replace(event, delta_bytes=min(0, event.delta_bytes + before))
        events.append(event)
        if event.kind == FORWARD and forwards < len(freed_bytes):
            if more := freed_bytes[forwards] - before:
                events.append(Event(OUTSIDE, -1, -more, 0, LAST_OUTPUTS))
            before = freed_bytes[forwards]
            forwards += 1
    return replace(record, events=tuple(events))


def _dropping_outputs_early(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events with the last step's outputs freed right after the first forward."""
    drops = [e for e in events if e.name == LAST_OUTPUTS and e.delta_bytes < 0]
    forward = next((i for i, e in enumerate(events) if e.kind == FORWARD), None)
    if not drops or forward is None:
        return tuple(events)
    rest = [e for e in events if e not in drops]
    forward = rest.index(events[forward])
    return (*rest[: forward + 1], *drops, *rest[forward + 1 :])
