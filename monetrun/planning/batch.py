"""The largest batch that trains within a budget: predicted from two small trial runs, verified by one at that batch.

A model's graph has the same structure at two batches, and its bytes and seconds grow linearly with the batch. So the
step at any other batch can be computed without running it, and planned as if it had been recorded. The predicted batch
is then tried for real: its record improves the line through the two nearest batches, and the search continues from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from monetrun.core.budget import format_budget, format_bytes
from monetrun.core.errors import InfeasibleBudget, NeverTrained, NoPlanInTime, ScheduleError, ScriptFailed
from monetrun.core.options import Options
from monetrun.core.plan import Plan, StepSchedules
from monetrun.core.reserved import reserved
from monetrun.core.step import StepRecord, StepTimeline, replay
from monetrun.planning import planner
from monetrun.planning.batch_sizes import Sizes
from monetrun.planning.planner import Baseline
from monetrun.planning.rescale import check_alike, difference, rescaled
from monetrun.planning.summary import planned_bytes

SMALLEST_TRIAL = 4  # with fewer samples, convolutions and normalizations run other kernels than in training
MOST_OVERHEAD = 100.0  # added compute over the plain step's, as a fraction; no more can be asked for
_MAX_VERIFIED = 6
_MAX_EXTRAPOLATION = 1024  # no prediction goes beyond this multiple of the largest batch that was tried
_MIN_GAIN = 0.01  # a batch larger by less than this share is not worth another trial run
_SECONDS_OF_SILENCE = 10.0
_MIN_FED = 0.95  # a smaller share of the predicted bytes means that the script had fewer samples to feed


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


class Script(Protocol):
    """The user's script, which can be tried at a batch."""

    def trial(self, batch: int) -> StepRecord:
        """Its step at that batch, from a trial run."""

    def plan(self, batch: int) -> Plan:
        """That step's plan within the budget.

        Raises:
            InfeasibleBudget, NoPlanInTime: there is none.
        """


@dataclass(frozen=True)
class Verified:
    """One batch that was tried.

    Attributes:
        batch: its size.
        fits: within both limits.
        reason: why it does not fit, or empty.
    """

    batch: int
    fits: bool
    reason: str


@dataclass(frozen=True)
class Found:
    """The largest batch; bytes are of its step on one device, ``overhead`` and ``bound`` of the plan made for it.

    Attributes:
        batch: verified to fit in a trial run.
        next_batch: the smallest that did not fit, in a trial run or by prediction; 0 where there is no larger one.
        budget_bytes: the limit.
        max_overhead: the limit.
        plain_peak_bytes: of the step without monetrun.
        planned_peak_bytes: of the plan.
        overhead: of the plan.
        bound: no plan within the budget has less.
        verified: every batch that was verified on the way, in order.
        plain_reserved_bytes: on CUDA, where the budget bounds what is reserved: the plain step's; else None.
        planned_reserved_bytes: the same of the plan.
    """

    batch: int
    next_batch: int
    budget_bytes: int
    max_overhead: float
    plain_peak_bytes: int
    planned_peak_bytes: int
    overhead: float
    bound: float
    verified: tuple[Verified, ...]
    plain_reserved_bytes: int | None = None
    planned_reserved_bytes: int | None = None


def find(request: BatchRequest, script: Script, report: Callable[[str], None]) -> Found:
    """The largest batch within the limits, verified in a trial run.

    Args:
        request: the limits.
        script: to be tried.
        report: called with a line that describes each step of the search.

    Raises:
        InfeasibleBudget: not even the smallest batch is within the limits.
        UsageError: the trial runs do not differ, or differ in structure.
        NeverTrained, ScriptFailed: the first trial runs failed.
    """
    samples = {}
    for batch in request.trials:
        report(f"trying batch {batch}")
        samples[batch] = script.trial(batch)
    check_alike(samples)
    report("predicting the largest batch from both")
    search = _Search(request, script, samples, report)
    try:
        while len(search.verified) < _MAX_VERIFIED:
            batch = search.next_batch()
            if batch <= search.largest_fitting * (1 + _MIN_GAIN):
                break
            report(f"batch {batch} is predicted to fit, trying it")
            report(search.verify(batch))
    except (KeyboardInterrupt, SystemExit):
        if search.largest_fitting:
            report(f"stopped; batch {search.largest_fitting} fits, a larger one may")
        raise
    return search.found()


class _Search:
    """What the trial runs so far have shown.

    Attributes:
        samples: the steps recorded, by batch.
        largest_fitting: the largest batch verified to fit, 0 before any.
        smallest_failing: the smallest batch known not to fit, None before any.
        plan: of ``largest_fitting``.
        verified: every batch verified, in order.
    """

    def __init__(
        self, request: BatchRequest, script: Script, samples: dict[int, StepRecord], report: Callable[[str], None]
    ) -> None:
        self.request = request
        self.script = script
        self.samples = samples
        self.prediction = _Prediction(request, report)
        self.largest_fitting = 0
        self.smallest_failing: int | None = None
        self.plan: Plan | None = None
        self.verified: list[Verified] = []

    def next_batch(self) -> int:
        """The batch to verify next."""
        fails = self.smallest_failing
        batch = self.prediction.largest(self.samples, self.largest_fitting, fails)
        if self.verified and fails is not None and fails not in self.samples:  # it failed without giving a record
            known = max((b for b in self.samples if b < fails), default=0)
            sizes = self.request.sizes
            batch = min(batch, sizes[max(1, sizes.number((known + fails) // 2))])
        return batch

    def verify(self, batch: int) -> str:
        """Try and plan ``batch``; returns a line that says what came out."""
        plan, reason = None, ""
        try:
            plan, reason = self._tried(batch)
        except InfeasibleBudget as error:
            reason = f"it needs {format_bytes(error.smallest_bytes)}"
        except NoPlanInTime:
            reason = "no plan was found in time"
        except (NeverTrained, ScriptFailed) as error:
            reason = error.message
        self.verified.append(Verified(batch, not reason, reason))
        if plan is None:
            self.smallest_failing = batch if self.smallest_failing is None else min(self.smallest_failing, batch)
            return f"batch {batch} does not: {reason}"
        self.largest_fitting, self.plan = batch, plan
        return f"batch {batch} fits: planned {format_bytes(planned_bytes(plan))}, overhead {plan.overhead:+.1%}"

    def found(self) -> Found:
        """The largest batch that fits.

        Raises:
            InfeasibleBudget: none does; says what the smallest one needs.
        """
        request, plan = self.request, self.plan
        if plan is None:
            raise self._nothing_fits()
        next_batch = self.smallest_failing
        if next_batch is None:
            predicted = self.prediction.largest(self.samples, self.largest_fitting, None)
            next_batch = request.sizes.next_after(predicted)
        return Found(
            batch=self.largest_fitting,
            next_batch=next_batch,
            budget_bytes=request.budget_bytes,
            max_overhead=request.max_overhead,
            plain_peak_bytes=plan.plain_peak_bytes,
            planned_peak_bytes=plan.planned_peak_bytes,
            overhead=plan.overhead,
            bound=plan.bound,
            verified=tuple(self.verified),
            plain_reserved_bytes=None if plan.pool is None else plan.pool.plain_bytes,
            planned_reserved_bytes=None if plan.pool is None else plan.pool.planned_bytes,
        )

    def _tried(self, batch: int) -> tuple[Plan | None, str]:
        """The plan of ``batch`` and an empty reason, or None and why it does not fit."""
        record = self.script.trial(batch)
        fed = _batch_fed(self.samples, record, batch)
        if difference(self.samples[self.request.trials[0]], record):
            return None, "its step has another structure"
        if fed < _MIN_FED * batch:
            self.samples[fed], self.smallest_failing = record, self.request.sizes.next_after(fed)
            return None, f"the script feeds {fed} only"
        self.samples[batch] = record
        plan = self.script.plan(batch)
        if plan.overhead > self.request.max_overhead:
            return None, f"it needs {plan.overhead:+.1%} overhead"
        return plan, ""

    def _nothing_fits(self) -> InfeasibleBudget:
        """The error that says what the smallest batch needs."""
        request = self.request
        first = request.sizes[1]
        record = _step_at(self.samples, first)
        base = self.prediction.baseline(record)
        smallest = planner.smallest_bytes(record, base)
        budget = format_bytes(request.budget_bytes)
        hint = f"fits: --budget {format_budget(smallest)}"
        if smallest > request.budget_bytes:
            needed = format_bytes(smallest, exact=True)
            message = f"batch {first} needs {needed} at least, the budget is {budget}"
        else:
            share = f"{request.max_overhead:.0%}"
            message = f"no batch from {first} on trains within {budget} at {share} overhead"
            more = 2 * request.max_overhead or 0.1
            hint = "give a larger --budget"
            if more < MOST_OVERHEAD:
                hint += f", or allow more: --max-overhead {100 * more:g}%"
        for one in self.verified:
            message += f"\n  batch {one.batch}: {one.reason}"
        return InfeasibleBudget(
            message, hint, budget_bytes=request.budget_bytes, smallest_bytes=smallest, operator=base.frugal.peak_name
        )


def _batch_fed(samples: Mapping[int, StepRecord], record: StepRecord, batch: int) -> int:
    """The batch in ``record``, by its tensors' bytes; ``batch`` where these do not grow with the batch."""
    first, second = sorted(samples)[:2]
    one, other, now = (
        sum(t.nbytes for g in r.graphs for t in g.tensors) for r in (samples[first], samples[second], record)
    )
    return round(first + (now - one) * (second - first) / (other - one)) if other > one else batch


class _Prediction:
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
        record = _step_at(samples, batch)
        base = self.baseline(record)
        budget_bytes = self.request.budget_bytes
        if planner.plain_bytes(record, base) <= budget_bytes:
            return True
        most_seconds = (1 + self.request.max_overhead) * base.plain.seconds
        for schedules in self.found:
            timeline = _replayed(record, schedules)
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
        known = [(timeline.peak_bytes, f) for f in self.frugal if (timeline := _replayed(record, f)) is not None]
        if known:
            most_frugal = min(known, key=lambda one: one[0])[1]
            return planner.baseline(record, most_frugal.schedules_for(record.graphs))
        return self._searched_baseline(record)

    def _feasible(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """Whether the step at ``batch`` is known to allocate no more than the budget, whatever its overhead.

        On CUDA, where more than that is reserved, it may not fit yet: ``within`` tells.
        """
        return self.baseline(_step_at(samples, batch)).frugal.peak_bytes <= self.request.budget_bytes

    def _feasible_after_search(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """``_feasible`` after a search at that batch: a schedule that is frugal at one need not be at another."""
        self._say(batch)
        self._searched_baseline(_step_at(samples, batch))
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


def _step_at(samples: Mapping[int, StepRecord], batch: int) -> StepRecord:
    """``rescaled``, without what a trial run at another batch has measured of the plain run on CUDA."""
    record = rescaled(samples, batch)
    if batch in samples or record.memory is None:
        return record
    return replace(record, memory=replace(record.memory, plain_reserved_bytes=0, plain_allocated_bytes=0))


def _reserved_bytes(record: StepRecord, schedules: StepSchedules) -> int:
    return reserved(record, schedules.schedules_for(record.graphs)).peak_bytes


def _replayed(record: StepRecord, schedules: StepSchedules) -> StepTimeline | None:
    """The step, or None where the schedules are not valid at this batch, which may offer fewer implementations."""
    try:
        return replay(record, schedules.schedules_for(record.graphs))
    except ScheduleError:
        return None
