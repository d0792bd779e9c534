"""Schedules within a budget of *reserved* bytes, which solvers do not know: they count allocated ones.

The solver gets less than the budget: what rounding and fragmentation took of it before. What its schedules reserve is
replayed; where it is too much, or much less than the budget, the solver gets another target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, plain_schedule
from monetrun.core.requests import Reserved, reserved, reserved_under
from monetrun.core.step import StepRecord, replay

# The first target gets half of the solver's time, the others share the rest.
_TARGETS = 6
# Where schedules that fit and schedules that do not are this close, as a share of the budget, nothing more is tried.
_UNUSED = 0.02


@dataclass(frozen=True)
class Found:
    """The schedules of all graphs, a lower bound on the step's seconds, and the solver's status."""

    schedules: tuple[Schedule, ...]
    bound_seconds: float
    status: str


class OverBudget(Exception):
    """No target gave schedules that reserve no more than the budget."""


Within = Callable[[int, Options, Sequence[Sequence[Schedule]]], Found]


def plain_reserved_bytes(record: StepRecord) -> int:
    """What the plain run reserves: measured, else as the allocator's model has it under the user's own settings."""
    assert record.memory is not None
    if record.memory.plain_reserved_bytes:
        return record.memory.plain_reserved_bytes
    plain = [plain_schedule(g) for g in record.graphs]
    return reserved_under(record, plain, record.memory.plain_settings).peak_bytes


def found_within(
    record: StepRecord,
    budget_bytes: int,
    options: Options,
    within: Within,
    starts: Sequence[Sequence[Schedule]] = (),
) -> tuple[Found, Reserved]:
    """The fastest schedules found that reserve at most ``budget_bytes``, and what they reserve.

    Args:
        record: of the step.
        budget_bytes: of reserved memory.
        options: for the solver; all targets together get its ``seconds``.
        within: solves for so many *allocated* bytes.
        starts: schedules to begin with.

    Raises:
        OverBudget: nothing found reserves so little.
        NoPlanInTime: the solver found nothing for any target.
    """
    plain = [plain_schedule(g) for g in record.graphs]
    waste = max(0, reserved(record, plain).peak_bytes - replay(record, plain).peak_bytes)
    target, too_much = budget_bytes - min(waste, budget_bytes // 10), budget_bytes
    best: tuple[float, Found, Reserved] | None = None
    kept = 0  # the most allocated by schedules that reserve no more than the budget
    failure: NoPlanInTime | None = None
    tried: list[Sequence[Schedule]] = list(starts)
    seconds = options.seconds / 2
    for _ in range(_TARGETS):
        try:
            found = within(target, replace(options, seconds=seconds), tried)
        except InfeasibleBudget:
            break
        except NoPlanInTime as error:
            failure = error
            break
        seconds = options.seconds / 2 / (_TARGETS - 1)
        tried.append(found.schedules)
        timeline, taken = replay(record, found.schedules), reserved(record, found.schedules)
        excess = taken.peak_bytes - budget_bytes
        if excess > 0:
            too_much = min(too_much, target, timeline.peak_bytes)
            target = too_much - excess
        else:
            if best is None or timeline.seconds < best[0]:
                best = (timeline.seconds, found, taken)
            kept = max(kept, timeline.peak_bytes)
            target = timeline.peak_bytes - excess
        if kept and (target >= too_much or target <= kept):
            target = (kept + too_much) // 2
        if kept and too_much - kept <= _UNUSED * budget_bytes:
            break
    if best is not None:
        return best[1], best[2]
    if failure is not None:
        raise failure
    raise OverBudget
