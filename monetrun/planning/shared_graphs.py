"""Schedules for a step whose rounds share graphs: those that fit one round need not fit another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution
from monetrun.core.step import StepRecord, replay
from monetrun.planning.baseline import Baseline, whole_step


def within(
    record: StepRecord,
    budget_bytes: int,
    base: Baseline,
    found: Sequence[Sequence[Schedule]],
    solver: Callable[..., Solution],
    options: Options,
) -> tuple[Schedule, ...]:
    """Schedules of all graphs within the budget.

    Of each graph they are the fastest of what was ``found`` that fits beside the others, the most frugal ones at
    first; or all graphs are solved for the whole step as for one round that cannot be joined.

    Args:
        record: of the step.
        budget_bytes: of the whole step; the most frugal schedules fit.
        base: of the record.
        found: schedules of all graphs.
        solver: for one graph.
        options: for it; takes about their seconds.
    """
    best = base.frugal_schedules

    def with_one(k: int, schedule: Schedule) -> tuple[Schedule, ...]:
        return (*best[:k], schedule, *best[k + 1 :])

    each = dict.fromkeys((k, schedule) for schedules in found for k, schedule in enumerate(schedules))
    for k, schedule in sorted(each, key=lambda one: replay(record, with_one(*one)).seconds):
        timeline = replay(record, with_one(k, schedule))
        if timeline.peak_bytes <= budget_bytes and timeline.seconds < replay(record, best).seconds:
            best = with_one(k, schedule)
    own = whole_step(record, base.fast_schedules).solve(best, budget_bytes, solver, replace(options, on_progress=None))
    return tuple(own.get(k, schedule) for k, schedule in enumerate(best))
