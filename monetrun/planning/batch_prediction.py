"""Whether a batch that was not tried trains within a budget: its step is computed from two that were, and planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, ScheduleError
from monetrun.core.options import Options
from monetrun.core.plan import StepSchedules
from monetrun.core.reserved import reserved
from monetrun.core.step import StepRecord, StepTimeline, replay
from monetrun.planning import planner
from monetrun.planning.batch_sizes import Sizes
from monetrun.planning.planner import Baseline
from monetrun.planning.rescale import rescaled

SMALLEST_TRIAL = 4  # with fewer samples, convolutions and normalizations run other kernels than in training
_MAX_EXTRAPOLATION = 1024  # no prediction goes beyond this multiple of the largest batch that was tried
_SECONDS_OF_SILENCE = 10.0


@dataclass(frozen=True)
class BatchRequest:
    """The limits that the largest batch must keep, and how to search for it.

    Attributes:
        budget_bytes: of a training step on one device.
        max_overhead: over the plain step's seconds, as a fraction.
        sizes: the batches to choose from.
        trials: the two batches to begin with.
        algorithm: a name that ``solve.solver`` knows.
        options: for the solver; their seconds are for each plan that is verified, and for all predictions together.
    """

    budget_bytes: int
    max_overhead: float
    sizes: Sizes = field(default_factory=Sizes)
    trials: tuple[int, int] = (SMALLEST_TRIAL, 2 * SMALLEST_TRIAL)
    algorithm: str = "hierarchical"
    options: Options = field(default_factory=Options)


class Prediction:
    """Plans the step at batches that were not tried; schedules found for one batch are candidates for all.

    Attributes:
        found: the schedules of all plans made so far.
        frugal: the most frugal schedules found so far.
    """

    def __init__(self, request: BatchRequest, report: Callable[[str], None]) -> None:
        self.request = request
        self._report = report
        self._reported = time.monotonic()
        self.options = replace(request.options, seconds=max(0.3, request.options.seconds / 10))
        self.found: list[StepSchedules] = []
        self.frugal: list[StepSchedules] = []

    def largest(self, samples: Mapping[int, StepRecord], fits: int, fails: int | None) -> int:
        """The largest batch predicted to be within both limits, at least ``fits`` and less than ``fails``."""
        sizes = self.request.sizes

        def feasible(n: int) -> bool:
            return self._feasible(samples, sizes[n])

        low = sizes.number(fits)  # from here on numbers of sizes; ``low`` is within the limits, or 0
        if fails is None:
            end = sizes.number(_MAX_EXTRAPOLATION * max(samples)) + 1
            high = max(low, sizes.number(max(samples)), 1) + 1
            while high < end and (feasible(high) or self._feasible_after_search(samples, sizes[high])):
                high *= 2
            high = min(high, end)
        else:
            high = sizes.number(fails - 1) + 1
        most = _bisect(low, high, feasible)
        while most + 1 < high and self._feasible_after_search(samples, sizes[most + 1]):
            most = _bisect(most, high, feasible)
        number = _bisect(low, most + 1, lambda n: self.within(samples, sizes[n]))
        return sizes[number] if number else 0

    def within(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """Whether a plan within both limits is known for the step at ``batch``, or found now."""
        self._say(batch)
        record = step_at(samples, batch)
        base = self.baseline(record)
        budget_bytes = self.request.budget_bytes
        if planner.plain_bytes(record, base) <= budget_bytes:
            return True
        most_seconds = (1 + self.request.max_overhead) * base.plain.seconds
        for schedules in self.found:
            timeline = replayed(record, schedules)
            if timeline is None or timeline.peak_bytes > budget_bytes or timeline.seconds > most_seconds:
                continue
            if record.memory is None or _reserved_bytes(record, schedules) <= budget_bytes:
                return True
        try:
            plan = planner.plan_step(record, budget_bytes, self.request.algorithm, self.options, base)
        except (InfeasibleBudget, NoPlanInTime):
            return False
        self.found.append(StepSchedules(plan.graphs))
        return plan.overhead <= self.request.max_overhead

    def baseline(self, record: StepRecord) -> Baseline:
        """The record's baseline with the most frugal schedules known so far; searched for where none are valid."""
        known = [(timeline.peak_bytes, f) for f in self.frugal if (timeline := replayed(record, f)) is not None]
        if known:
            most_frugal = min(known, key=lambda one: one[0])[1]
            return planner.baseline(record, most_frugal.schedules_for(record.graphs))
        return self._searched_baseline(record)

    def _feasible(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """Whether the step at ``batch`` is known to allocate no more than the budget, whatever its overhead.

        On CUDA, where more than that is reserved, it may not fit yet: ``within`` tells.
        """
        return self.baseline(step_at(samples, batch)).frugal.peak_bytes <= self.request.budget_bytes

    def _feasible_after_search(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """``_feasible`` after a search at that batch: a schedule that is frugal at one need not be at another."""
        self._say(batch)
        self._searched_baseline(step_at(samples, batch))
        return self._feasible(samples, batch)

    def _say(self, batch: int) -> None:
        """Report that ``batch`` is looked at, if nothing has been reported for a while."""
        if time.monotonic() - self._reported >= _SECONDS_OF_SILENCE:
            self._report(f"predicting: looking at batch {batch}")
            self._reported = time.monotonic()

    def _searched_baseline(self, record: StepRecord) -> Baseline:
        base = planner.baseline(record)
        self.frugal.append(StepSchedules.of(record.graphs, base.frugal_schedules))
        return base


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number from ``low`` to below ``high`` for which ``holds``; it holds for ``low``."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def step_at(samples: Mapping[int, StepRecord], batch: int) -> StepRecord:
    """``rescaled``, without what a trial run at another batch has measured of the plain run on CUDA."""
    record = rescaled(samples, batch)
    if batch in samples or record.memory is None:
        return record
    return replace(record, memory=replace(record.memory, plain_reserved_bytes=0, plain_allocated_bytes=0))


def _reserved_bytes(record: StepRecord, schedules: StepSchedules) -> int:
    return reserved(record, schedules.schedules_for(record.graphs)).peak_bytes


def replayed(record: StepRecord, schedules: StepSchedules) -> StepTimeline | None:
    """The step, or None where the schedules are not valid at this batch, which may offer fewer implementations."""
    try:
        return replay(record, schedules.schedules_for(record.graphs))
    except ScheduleError:
        return None
