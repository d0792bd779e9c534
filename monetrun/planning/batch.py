"""The largest batch that trains within a budget: predicted from two small trial runs, verified by one at that batch.

A model's graph has the same structure at two batches, and its bytes and seconds grow linearly with the batch. So the
step at any other batch can be computed without running it, and planned as if it had been recorded. The predicted batch
is then tried for real: its record improves the line through the two nearest batches, and the search continues from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from monetrun.core.budget import format_budget, format_bytes, format_percent
from monetrun.core.errors import InfeasibleBudget, NeverTrained, NoPlanInTime, ScriptFailed
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.planning import planner
from monetrun.planning.batch_prediction import BatchRequest, Prediction, step_at
from monetrun.planning.rescale import check_alike, difference
from monetrun.planning.summary import planned_bytes

MOST_OVERHEAD = 100.0  # added compute over the plain step's, as a fraction; no more can be asked for
_MAX_VERIFIED = 6
_MIN_GAIN = 0.01  # a batch larger by less than this share is not worth another trial run
_MIN_FED = 0.95  # a smaller share of the predicted bytes means that the script had fewer samples to feed


class Script(Protocol):
    """The user's script, which can be tried at a batch."""

    def trial(self, batch: int) -> StepRecord:
        """Its step at that batch, from a trial run."""

    def plan(self, batch: int) -> Plan:
        """That step's plan within the budget.

        Raises:
            InfeasibleBudget, NoPlanInTime: there is none.
        """


def feeds_only(batch: int) -> str:
    """Why a larger batch than this one does not fit: the script's data ends there."""
    return f"the script feeds {batch} only"


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
        try:
            samples[batch] = script.trial(batch)
        except ScriptFailed as failed:
            smaller = request.sizes[1], request.sizes[2]
            failed.hint = failed.hint or f"if batch {batch} is too large: --trials {smaller[0]},{smaller[1]}"
            raise
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
        if search.plan is None and (batch := search.largest_recorded()):
            report(f"trying batch {batch}, whose step is known")
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
        self.prediction = Prediction(request, report)
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
            batch = min(batch, sizes[max(1, sizes.number(math.isqrt(max(1, known) * fails)))])
        return batch

    def largest_recorded(self) -> int:
        """The largest batch of which a step was recorded, and that was not verified; 0: there is none."""
        verified = {one.batch for one in self.verified}
        return max((b for b in self.samples if b not in verified), default=0)

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
            return f"batch {batch} does not fit: {reason}"
        self.largest_fitting, self.plan = batch, plan
        overhead = format_percent(plan.overhead, signed=True)
        return f"batch {batch} fits: planned {format_bytes(planned_bytes(plan))}, overhead {overhead}"

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
            return None, feeds_only(fed)
        self.samples[batch] = record
        plan = self.script.plan(batch)
        if plan.overhead > self.request.max_overhead:
            return None, f"the best plan found has {format_percent(plan.overhead, signed=True)} overhead"
        return plan, ""

    def _nothing_fits(self) -> InfeasibleBudget:
        """The error that says what the smallest batch needs."""
        request = self.request
        first = request.sizes[1]
        record = step_at(self.samples, first)
        base = self.prediction.baseline(record)
        smallest = planner.smallest_bytes(record, base)
        budget = format_bytes(request.budget_bytes)
        hint = f"fits: --budget {format_budget(smallest)}"
        if smallest > request.budget_bytes:
            needed = format_bytes(smallest, exact=True)
            message = f"batch {first} needs {needed} at least, the budget is {budget}"
        else:
            share = f"{100 * request.max_overhead:g}%"
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
