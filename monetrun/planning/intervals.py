"""Planned and measured bytes of a training step, stretch by stretch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from monetrun.core import codec
from monetrun.core.event import is_optimizer_step
from monetrun.core.graph import FORWARD
from monetrun.core.plan import Schedule
from monetrun.core.step import OUTSIDE, StepRecord, replay


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes measured in one stretch of a training step.

    Attributes:
        kind: ``"forward"`` or ``"backward"`` (a call of a graph), or ``"outside"`` (the script between two calls).
        graph: index of the graph in the step's record, -1 outside.
        name: of an optimizer's step (``"SGD.step"``), else empty.
        start_bytes: allocated at its start.
        peak_bytes: the most allocated during it.
        end_bytes: allocated at its end.
    """

    kind: str
    graph: int
    name: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Planned and measured bytes of one stretch of a training step.

    Attributes:
        kind: as in ``Stretch``.
        name: of the graph, or of the optimizer's step; empty for the script between two calls.
        planned_start_bytes: allocated at its start, as ``step.replay`` has it.
        planned_peak_bytes: the most allocated during it, as ``step.replay`` has it.
        measured_start_bytes: the same, measured.
        measured_peak_bytes: the same, measured.
    """

    kind: str
    name: str
    planned_start_bytes: int
    planned_peak_bytes: int
    measured_start_bytes: int
    measured_peak_bytes: int

    @property
    def label(self) -> str:
        """``"ResNet forward"``, ``"ResNet backward"``, ``"SGD.step"`` or ``"between calls"``."""
        if self.kind == OUTSIDE:
            return self.name or "between calls"
        return f"{self.name} {self.kind}"

    @property
    def difference_bytes(self) -> int:
        """The measured peak minus the planned peak."""
        return self.measured_peak_bytes - self.planned_peak_bytes

    @property
    def difference(self) -> float:
        """The same as a share of the planned peak; 0.0 where nothing is planned."""
        return self.difference_bytes / self.planned_peak_bytes if self.planned_peak_bytes else 0.0


@dataclass(frozen=True, slots=True)
class RankIntervals:
    """The intervals of one rank's settled step, in order; there is at least one."""

    rank: int
    intervals: tuple[Interval, ...]

    @property
    def largest_measured_peak(self) -> int:
        """Index of the interval with the largest measured peak."""
        peaks = [interval.measured_peak_bytes for interval in self.intervals]
        return peaks.index(max(peaks))

    @property
    def largest_difference(self) -> int:
        """Index of the interval whose peaks differ most in bytes, in either direction."""
        differences = [abs(interval.difference_bytes) for interval in self.intervals]
        return differences.index(max(differences))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Planned and measured bytes of one settled training step, of every rank that measured them, by rank."""

    ranks: tuple[RankIntervals, ...]


def as_plain(step: MeasuredStep) -> list[dict[str, Any]]:
    """The data for JSON; ``largest_...`` are indices in ``intervals``."""
    return [
        {
            "rank": rank.rank,
            "intervals": [
                {
                    **codec.to_plain(interval),
                    "label": interval.label,
                    "difference_bytes": interval.difference_bytes,
                    "difference": interval.difference,
                }
                for interval in rank.intervals
            ],
            "largest_measured_peak": rank.largest_measured_peak,
            "largest_difference": rank.largest_difference,
        }
        for rank in step.ranks
    ]


def intervals(record: StepRecord, schedules: Sequence[Schedule], measured: Sequence[Stretch]) -> tuple[Interval, ...]:
    """Pair what is planned for each stretch of a step with what was measured in it.

    Args:
        record: of the step.
        schedules: of all its graphs.
        measured: the stretches of one step from its first call to its end.

    Returns:
        One interval for each call, for each optimizer's step and for what lies between, in order, from the first call
        on. Empty where the measured step has other calls than the record.

    Raises:
        ScheduleError: a schedule is not valid for its graph.
    """
    planned = _joined(_planned(record, schedules))
    found = _joined(list(measured))
    if [(s.kind, s.graph) for s in planned] != [(s.kind, s.graph) for s in found]:
        return ()
    return tuple(
        Interval(
            kind=one.kind,
            name=other.name if one.kind == OUTSIDE else record.graphs[one.graph].name,
            planned_start_bytes=one.start_bytes,
            planned_peak_bytes=one.peak_bytes,
            measured_start_bytes=other.start_bytes,
            measured_peak_bytes=other.peak_bytes,
        )
        for one, other in zip(planned, found, strict=True)
    )


def optimizer_steps(record: StepRecord) -> int:
    """How many optimizer steps the recorded training step has."""
    return sum(is_optimizer_step(event.kind, event.name) for event in record.events)


def counted_steps(record: StepRecord | None) -> tuple[int, int]:
    """``optimizer_steps``, and how many of them are the first after a forward; (0, 0): not known.

    One optimizer for each parameter steps within the backward, when that has its gradient.
    """
    after_forwards, forward = 0, False
    for event in () if record is None else record.events:
        if is_optimizer_step(event.kind, event.name):
            after_forwards, forward = after_forwards + forward, False
        forward |= event.kind == FORWARD
    return (0, 0) if record is None else (optimizer_steps(record), after_forwards)


def _planned(record: StepRecord, schedules: Sequence[Schedule]) -> list[Stretch]:
    """The record's events, with the bytes that ``replay`` derives."""
    timeline = replay(record, schedules)
    rows = zip(record.events, timeline.start_bytes, timeline.high_bytes, strict=True)
    return [Stretch(e.kind, e.graph, e.name, start, max(start, high), start) for e, start, high in rows]


def _joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """``stretches`` from the first call on; what the script does between two calls or optimizer steps is one stretch.

    A record has several events there: bytes that were added to it or freed in it take no time.
    """
    found: list[Stretch] = []
    for stretch in stretches:
        if stretch.kind != OUTSIDE:
            found.append(stretch)
        elif is_optimizer_step(stretch.kind, stretch.name) or (found and found[-1].kind != OUTSIDE):
            name = stretch.name if is_optimizer_step(stretch.kind, stretch.name) else ""
            found.append(replace(stretch, name=name))
        elif found:
            found[-1] = replace(found[-1], peak_bytes=max(found[-1].peak_bytes, stretch.peak_bytes))
    return found
