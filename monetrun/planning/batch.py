"""The largest batch that trains within a budget: predicted from two small trial runs, verified by one at that batch.

A model's graph at two batches has the same structure, and its bytes and seconds grow along a line. So the step at any
other batch is written down without running it, and planned as if it had been recorded. What is found is tried for real:
its record makes the line through the nearest two better, and the search goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from monetrun.core.budget import format_budget, format_bytes
from monetrun.core.errors import InfeasibleBudget, NeverTrained, NoPlanInTime, ScheduleError, ScriptFailed
from monetrun.core.options import Options
from monetrun.core.plan import Plan, Schedule
from monetrun.core.step import StepRecord, StepTimeline, replay
from monetrun.planning import planner
from monetrun.planning.planner import Baseline
from monetrun.planning.rescale import check_alike, difference, rescaled

SMALLEST_TRIAL = 4  # less, and convolutions and normalizations run other kernels than they will
_MOST_VERIFIED = 6
_FARTHEST = 1024  # no line is followed farther than so many times the largest batch that was tried
_NEAR = 0.01  # a batch larger by less than this share is not worth another trial run
_FED = 0.95  # tensors smaller than this share of what the line says: the script had fewer samples to feed


@dataclass(frozen=True)
class Limits:
    """What is looked for.

    Attributes:
        budget_bytes: of a training step on one device.
        max_overhead: over the plain step's seconds, as a fraction.
        multiple: the batch is a multiple of this.
        trials: the two batches to begin with.
        algorithm: a name that ``solve.solver`` knows.
        options: for the solver; their seconds are for each plan that is verified, and for all predictions together.
    """

    budget_bytes: int
    max_overhead: float
    multiple: int = 1
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
        reason: why not, or empty.
    """

    batch: int
    fits: bool
    reason: str


@dataclass(frozen=True)
class Found:
    """The largest batch; bytes are of its step on one device, ``overhead`` and ``bound`` of the plan made for it.

    Attributes:
        batch: seen to fit in a trial run of its own.
        next_batch: the smallest that is predicted, or was seen, not to fit.
        budget_bytes: the limit.
        max_overhead: the limit.
        plain_peak_bytes: of the step without monetrun.
        planned_peak_bytes: of the plan.
        overhead: of the plan.
        bound: no plan within the budget has less.
        verified: what was tried on the way, in order.
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


def find(limits: Limits, script: Script, say: Callable[[str], None]) -> Found:
    """The largest batch within the limits, seen to be so in a trial run.

    Args:
        limits: what is looked for.
        script: to be tried.
        say: told, in a line, what is being done.

    Raises:
        InfeasibleBudget: not even the smallest batch is within the limits.
        UsageError: the script's batch does not vary, or its structure does.
        NeverTrained, ScriptFailed: the first trial runs failed.
    """
    samples = {}
    for batch in limits.trials:
        say(f"trying batch {batch}")
        samples[batch] = script.trial(batch)
    check_alike(samples)
    say("predicting the largest batch from both")
    prediction = _Prediction(limits)
    fits = 0  # the largest seen to fit
    fails: int | None = None  # the smallest seen not to
    plan: Plan | None = None
    verified: list[Verified] = []
    while len(verified) < _MOST_VERIFIED:
        batch = prediction.largest(samples, fits, fails)
        if verified and fails is not None and fails not in samples:  # it failed, and nothing is known but that
            known = max(b for b in samples if b < fails)
            batch = min(batch, (known + fails) // 2 // limits.multiple * limits.multiple)
        if batch <= fits * (1 + _NEAR):
            break
        say(f"batch {batch} is predicted to fit, trying it")
        reason = ""
        try:
            record = script.trial(batch)
            fed = _fed(samples, record, batch) // limits.multiple * limits.multiple
            if difference(samples[limits.trials[0]], record):
                reason = "its step has another structure"
            elif fed < _FED * batch:
                reason = f"the script feeds {fed} only"
                samples[fed], fails = record, fed + limits.multiple
            else:
                samples[batch] = record
                own = script.plan(batch)
                if own.overhead > limits.max_overhead:
                    reason = f"it needs {own.overhead:+.1%} overhead"
        except InfeasibleBudget as error:
            reason = f"it needs {format_bytes(error.smallest_bytes)}"
        except NoPlanInTime:
            reason = "no plan was found in time"
        except (NeverTrained, ScriptFailed) as error:
            reason = error.message
        verified.append(Verified(batch, not reason, reason))
        if reason:
            fails = batch if fails is None else min(fails, batch)
            say(f"batch {batch} does not: {reason}")
        else:
            fits, plan = batch, own
            say(f"batch {batch} fits: planned {format_bytes(own.planned_peak_bytes)}, overhead {own.overhead:+.1%}")
    if plan is None:
        raise _nothing_fits(limits, prediction, samples, verified)
    return Found(
        batch=fits,
        next_batch=fails if fails is not None else prediction.largest(samples, fits, fails) + limits.multiple,
        budget_bytes=limits.budget_bytes,
        max_overhead=limits.max_overhead,
        plain_peak_bytes=plan.plain_peak_bytes,
        planned_peak_bytes=plan.planned_peak_bytes,
        overhead=plan.overhead,
        bound=plan.bound,
        verified=tuple(verified),
    )


def _fed(samples: Mapping[int, StepRecord], record: StepRecord, batch: int) -> int:
    """How large the batch in ``record`` is, by its tensors' bytes."""
    first, second = sorted(samples)[:2]
    one, other, now = (
        sum(t.nbytes for g in r.graphs for t in g.tensors) for r in (samples[first], samples[second], record)
    )
    return round(first + (now - one) * (second - first) / (other - one)) if other > one else batch


class _Prediction:
    """Plans the step at batches that were not tried; schedules found for one batch are candidates for all."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.options = replace(limits.options, seconds=max(0.3, limits.options.seconds / 10))
        self.found: list[Sequence[Schedule]] = []
        self.frugal: list[tuple[Schedule, ...]] = []

    def largest(self, samples: Mapping[int, StepRecord], fits: int, fails: int | None) -> int:
        """The largest batch that is predicted to be within the limits, at least ``fits`` and less than ``fails``."""
        step = self.limits.multiple

        def feasible(n: int) -> bool:
            return self._feasible(samples, n * step)

        low = fits // step  # in multiples: is within the limits, or 0
        if fails is None:
            high = max(low, max(samples) // step, 1) + 1
            far = _FARTHEST * max(samples) // step
            while high < far and (feasible(high) or self._more_frugal(samples, high * step)):
                high *= 2
        else:
            high = -(-fails // step)
        most = _split(low, high, feasible)
        while most + 1 < high and self._more_frugal(samples, (most + 1) * step):
            most = _split(most, high, feasible)
        return _split(low, most + 1, lambda n: self.within(samples, n * step)) * step

    def within(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """Whether a plan within the limits is known for the step at ``batch``, or found now."""
        record = rescaled(samples, batch)
        base = self.baseline(record)
        budget_bytes = self.limits.budget_bytes
        if base.plain.peak_bytes <= budget_bytes:
            return True
        for schedules in self.found:
            timeline = _replayed(record, schedules)
            if timeline is not None and timeline.peak_bytes <= budget_bytes and self._cheap(timeline.seconds, base):
                return True
        try:
            plan = planner.plan_step(record, budget_bytes, self.limits.algorithm, self.options, base)
        except (InfeasibleBudget, NoPlanInTime):
            return False
        self.found.append([g.schedule for g in plan.graphs])
        return plan.overhead <= self.limits.max_overhead

    def baseline(self, record: StepRecord) -> Baseline:
        """The record's plain step, and the most frugal one that is known so far."""
        known = [(timeline.peak_bytes, f) for f in self.frugal if (timeline := _replayed(record, f)) is not None]
        if known:
            return planner.baseline(record, min(known, key=lambda one: one[0])[1])
        base = planner.baseline(record)
        self.frugal.append(base.frugal_schedules)
        return base

    def _cheap(self, seconds: float, base: Baseline) -> bool:
        return seconds <= (1 + self.limits.max_overhead) * base.plain.seconds

    def _feasible(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """Whether the step at ``batch`` is known to fit, whatever its overhead."""
        return self.baseline(rescaled(samples, batch)).frugal.peak_bytes <= self.limits.budget_bytes

    def _more_frugal(self, samples: Mapping[int, StepRecord], batch: int) -> bool:
        """Whether it is after a search at that batch: what is frugal at one need not be at another."""
        self.frugal.append(planner.baseline(rescaled(samples, batch)).frugal_schedules)
        return self._feasible(samples, batch)


def _split(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number under ``high`` for which ``holds``, which it does for ``low`` and all below."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _replayed(record: StepRecord, schedules: Sequence[Schedule]) -> StepTimeline | None:
    """The step, or None where an implementation that the schedules use is not there at this batch."""
    try:
        return replay(record, schedules)
    except ScheduleError:
        return None


def _nothing_fits(
    limits: Limits, prediction: _Prediction, samples: Mapping[int, StepRecord], verified: Sequence[Verified]
) -> InfeasibleBudget:
    """The error that says what the smallest batch needs."""
    record = rescaled(samples, limits.multiple)
    base = prediction.baseline(record)
    smallest = base.frugal.peak_bytes
    budget = format_bytes(limits.budget_bytes)
    hint = f"fits: --budget {format_budget(smallest)}"
    if smallest > limits.budget_bytes:
        message = f"batch {limits.multiple} needs {format_bytes(smallest, exact=True)} at least, the budget is {budget}"
    else:
        message = f"no batch from {limits.multiple} on trains within {budget} at {limits.max_overhead:.0%} overhead"
        hint = f"give more (--budget), or allow more: --max-overhead {min(0.99, 2 * limits.max_overhead or 0.1):.0%}"
    for one in verified:
        message += f"\n  batch {one.batch}: {one.reason}"
    return InfeasibleBudget(
        message, hint, budget_bytes=limits.budget_bytes, smallest_bytes=smallest, operator=base.frugal.peak_name
    )
