"""Schedules for a step whose rounds share graphs: those that fit one round need not fit another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from monetrun.core.graph import FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution
from monetrun.core.simulate import simulate
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
    calls = Counter(event.graph for event in record.events if event.kind == FORWARD)

    def seconds(k: int, schedule: Schedule) -> float:
        return calls[k] * simulate(record.graphs[k], record.costs[k], schedule).seconds

    def fits(schedules: Sequence[Schedule]) -> bool:
        return replay(record, schedules).peak_bytes <= budget_bytes

    best = list(base.frugal_schedules)
    now = [seconds(k, schedule) for k, schedule in enumerate(best)]
    each = {(k, schedule): seconds(k, schedule) for schedules in found for k, schedule in enumerate(schedules)}
    for (k, schedule), taken in sorted(each.items(), key=lambda item: item[1] - now[item[0][0]]):
        if taken < now[k] and fits([*best[:k], schedule, *best[k + 1 :]]):
            best[k], now[k] = schedule, taken
    own = whole_step(record, base.fast_schedules).solve(best, budget_bytes, solver, replace(options, on_progress=None))
    other = [own.get(k, schedule) for k, schedule in enumerate(best)]
    if sum(seconds(k, schedule) for k, schedule in enumerate(other)) < sum(now) and fits(other):
        best = other
    return tuple(best)
