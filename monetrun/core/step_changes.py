"""Records of steps with what was learned after they were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from monetrun.core.keeping import with_events
from monetrun.core.last_outputs import dropping_outputs_early
from monetrun.core.plain import PlainPeaks
from monetrun.core.plain_step import plain_step
from monetrun.core.reserved import reserved_under
from monetrun.core.sharding import seconds_known, with_seconds
from monetrun.core.step import HELD_SINCE, Segment, StepRecord


def with_plain_peaks(record: StepRecord, plain: PlainPeaks) -> StepRecord:
    """The record with the measured peaks of the plain run.

    They also tell when the script drops the last step's outputs, which one recorded step does not: as soon as it has
    new ones, or not before the backward begins. Where they do not tell, outputs of a graph that runs after the first
    backward are dropped at once, as by ``fake = generator(noise)``; a model in parts may return long after that graph.
    """
    if record.memory is None:
        return record
    measured = replace(
        record.memory,
        plain_allocated_bytes=plain.allocated_bytes,
        plain_reserved_bytes=plain.reserved_bytes,
    )
    late = replace(record, memory=measured)
    early = with_events(late, dropping_outputs_early)
    if early.events == late.events:
        return late
    later_early = with_events(late, partial(dropping_outputs_early, all_of_them=False))
    candidates = (late, early, later_early) if record.breaks else (later_early, late, early)

    def error(candidate: StepRecord) -> int:
        allocated = reserved_under(*plain_step(candidate), measured.plain_settings).allocated_peak_bytes
        return abs(allocated - plain.allocated_bytes)

    return min(candidates, key=error)


def with_excess(record: StepRecord, excess_bytes: int) -> StepRecord:
    """The record with what planned steps were seen to reserve beyond the plan; the same one where that is not more."""
    if record.memory is None or excess_bytes <= record.memory.excess_bytes:
        return record
    return replace(record, memory=replace(record.memory, excess_bytes=excess_bytes))


def with_collectives(record: StepRecord, found: Sequence[tuple[str, int, float]]) -> StepRecord:
    """The record with what its sharded modules' collectives took, where that was not known; else the same one."""
    if record.sharding is None or not found or seconds_known(record.sharding):
        return record
    return replace(record, sharding=with_seconds(record.sharding, found))


def with_more_held(record: StepRecord, nbytes: int) -> StepRecord:
    """The record of a step before which so many bytes more are held than in the recorded one."""
    memory = record.memory
    if memory is not None:
        memory = replace(memory, base=(*memory.base, Segment(False, (nbytes,))))
    ledger = {**record.ledger, HELD_SINCE: record.ledger.get(HELD_SINCE, 0) + nbytes}
    return replace(record, base_bytes=record.base_bytes + nbytes, ledger=ledger, memory=memory)
