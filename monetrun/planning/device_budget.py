"""Schedules within a budget of *reserved* bytes, which solvers do not know: they count allocated ones.

The solver gets less than the budget: what rounding and fragmentation took of it before. What its schedules reserve is
replayed, with holds (``placement``) where there are large gaps; where it is too much, or much less than the budget, the
solver gets another target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from monetrun.core.errors import NoPlanInTime
from monetrun.core.options import Options
from monetrun.core.plain_heap import PlainHeap
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Schedule
from monetrun.core.reserved import Reserved, reserved
from monetrun.core.step import StepRecord, replay
from monetrun.planning import placement
from monetrun.solve import timing

# The first target gets half of the parts of the solver's time, the others one each, or all that is left.
_PARTS = 10
# Where schedules that fit and schedules that do not are this close, as a share of the budget, no other target is tried.
_UNUSED = 0.02
# Beside what other streams reserve, the first target leaves out at most this share of the budget: what is wasted
# without holds is no measure for more.
_MOST_WASTE = 0.02
# Of the solver's time, what the search for holds may take for each target, and at last.
_PLACING, _PLACING_LONGER = 0.1, 0.4
# Where the most frugal schedules reserve too much, schedules that allocate up to so many times as much are tried.
_FREEDOM = 1.02


@dataclass(frozen=True)
class Found:
    """The schedules of all graphs, a lower bound on the step's seconds, and the solver's status."""

    schedules: tuple[Schedule, ...]
    bound_seconds: float
    status: str


class OverBudget(Exception):
    """No target gave schedules that reserve no more than the budget.

    Attributes:
        least: of the schedules found, those that reserve least; None if there are none.
    """

    def __init__(self, least: Sequence[Schedule] | None) -> None:
        super().__init__()
        self.least = least


Within = Callable[[int, Options, Sequence[Sequence[Schedule]]], Found]


def plain_reserved_bytes(record: StepRecord) -> int:
    """What the plain run reserves: measured, else as the allocator's model has it under the user's own settings."""
    assert record.memory is not None
    return record.memory.plain_reserved_bytes or _modelled_plain(record).peak_bytes


def plain_allocated_bytes(record: StepRecord) -> int:
    """The same of allocated bytes: with the rest of blocks that the allocator does not split, up to 1 MiB each."""
    assert record.memory is not None
    return record.memory.plain_allocated_bytes or _modelled_plain(record).allocated_peak_bytes


def _modelled_plain(record: StepRecord) -> Reserved:
    return PlainHeap(record).recorded


def found_within(
    record: StepRecord,
    budget_bytes: int,
    options: Options,
    within: Within,
    lowest_bytes: int,
    starts: Sequence[Sequence[Schedule]] = (),
) -> tuple[Found, Reserved]:
    """The fastest schedules found that reserve at most ``budget_bytes``, and what they reserve.

    Args:
        record: of the step.
        budget_bytes: of reserved memory.
        options: for the solver; all targets together get its ``seconds``.
        within: solves for so many *allocated* bytes.
        lowest_bytes: the lowest target: the most frugal schedules known allocate as much.
        starts: schedules to begin with.

    Raises:
        OverBudget: nothing found reserves so little.
        NoPlanInTime: the solver found nothing for any target.
    """
    if lowest_bytes > budget_bytes:
        raise OverBudget(None)
    target = max(_first_target(record, budget_bytes), lowest_bytes)
    too_much: int | None = None  # the lowest known that reserves more than the budget
    best: tuple[float, Found, Reserved] | None = None
    least: tuple[int, Sequence[Schedule]] | None = None
    kept = 0  # the highest target whose schedules reserve no more than the budget
    failures = 0  # targets whose schedules reserve more
    failure: NoPlanInTime | None = None
    tried: list[Sequence[Schedule]] = list(starts)
    left, parts = _PARTS, _PARTS // 2
    while left > 0:
        left -= parts
        try:
            found = within(target, replace(options, seconds=options.seconds * parts / _PARTS), tried)
        except NoPlanInTime as error:
            failure = error
            break
        parts = 1
        tried.append(found.schedules)
        found = _placed(record, found, options.seconds * _PLACING)
        timeline, taken = replay(record, found.schedules), reserved(record, found.schedules)
        if least is None or taken.peak_bytes < least[0]:
            least = (taken.peak_bytes, found.schedules)
        excess = taken.peak_bytes - budget_bytes
        if excess > 0:
            if target <= lowest_bytes and not kept and lowest_bytes * _FREEDOM <= budget_bytes:
                target = int(lowest_bytes * _FREEDOM)  # what a little more freedom gives may lie closer together
                lowest_bytes = target
                continue
            too_much = min(too_much or target, target, timeline.peak_bytes)
            # whole pages are reserved: a little less allocated takes as many of them
            solved_for, target = target, max(too_much - (excess << failures), lowest_bytes)
            failures += 1
            if target == solved_for:
                break  # nothing known allocates less
        else:
            if best is None or timeline.seconds < best[0]:
                best = (timeline.seconds, found, taken)
            kept = max(kept, target)
            target = timeline.peak_bytes - excess
        if best is None:
            continue
        if timing.interrupted():
            return best[1], best[2]
        if too_much is None:  # what is unused, and the time that is left, go to one more target
            target, parts = min(target, budget_bytes), left
            if target <= kept:
                break
        elif too_much - kept <= _UNUSED * budget_bytes:
            break
        elif not kept < target < too_much:
            target = (kept + too_much) // 2
    if best is not None:
        return _with_fewer_gaps(record, best[1], best[2], options.seconds)
    if failure is not None:
        raise failure
    raise OverBudget(None if least is None else least[1])


def _first_target(record: StepRecord, budget_bytes: int) -> int:
    """The budget less what the plain step reserves beside what it allocates, as far as that tells of other steps."""
    assert record.memory is not None
    plain = plain_step(record)
    waste = max(0, reserved(*plain).peak_bytes - replay(*plain).peak_bytes)
    return budget_bytes - min(waste, record.memory.other_streams_bytes + int(budget_bytes * _MOST_WASTE))


def _with_fewer_gaps(record: StepRecord, found: Found, taken: Reserved, seconds: float) -> tuple[Found, Reserved]:
    """What was found, and what it reserves, after a longer search for holds where much is wasted."""
    if taken.peak_bytes <= taken.allocated_peak_bytes * (1 + _MOST_WASTE):
        return found, taken
    placed = _placed(record, found, seconds * _PLACING_LONGER)
    again = reserved(record, placed.schedules)
    return (placed, again) if again.peak_bytes < taken.peak_bytes else (found, taken)


def _placed(record: StepRecord, found: Found, seconds: float) -> Found:
    """``found`` with holds; as it is where Ctrl-C was pressed."""
    try:
        if not timing.interrupted():
            return replace(found, schedules=placement.placed(record, found.schedules, seconds))
    except KeyboardInterrupt:
        timing.interrupt()
    return found
