"""The least memory in which a graph can run: a schedule with a small peak, and a bound on every peak.

From above: greedy eviction towards lower and lower budgets, then elastic windows (``monetrun.solve.windows.repair``)
that bring the schedule below its own peak. From below: the largest single step, and the relaxed program over blocks
with the budget as its objective (``monetrun.solve.relaxation``), memory checked where its own schedules have their
peaks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, each_once
from monetrun.core.simulate import simulate
from monetrun.solve import greedy, windows
from monetrun.solve.bound import refine
from monetrun.solve.incumbent import Incumbent
from monetrun.solve.places import Places, all_places, first_places
from monetrun.solve.relaxation import relax
from monetrun.solve.relaxed_schedule import relaxed_schedule

_PROGRAMS = 6  # relaxed programs, each with more places
_DRAWS = 5  # of the native search: how far down it gets is a matter of luck
_BOUND_SHARE = 0.3  # of the work, for the bound


@dataclass(frozen=True, slots=True)
class LeastBudget:
    """The least budget of a graph.

    Attributes:
        peak_bytes: the least peak of which a schedule is known.
        bound_bytes: no schedule has a lower peak.
        schedule: the one with that peak.
    """

    peak_bytes: int
    bound_bytes: int
    schedule: Schedule

    @property
    def gap(self) -> float:
        """How far the peak may be from the least, relative to the bound; 0 when it is the least."""
        return (self.peak_bytes - self.bound_bytes) / max(self.bound_bytes, 1)


def least_budget(graph: Graph, costs: Costs, options: Options | None = None) -> LeastBudget:
    """The least budget within which ``graph`` can be run, and a bound on it.

    Args:
        graph: of any size.
        costs: of the graph; seconds count only between schedules of one peak.
        options: ``seconds`` is for everything; ``gap`` is of the bytes.
    """
    options = options or Options()
    search = Incumbent(graph, costs, 0, dataclasses.replace(options, on_progress=None))
    others = _all_alike(costs)
    found = search.most_frugal(0.1 * options.seconds), search.most_frugal(0.1 * options.seconds, costs=others)
    frugal = min(found, key=lambda s: _peak_bytes(search, s))
    bound_bytes, schedules = _bound_bytes(search, frugal, _peak_bytes(search, frugal))
    schedule = min((frugal, *schedules), key=lambda s: _peak_bytes(search, s))

    draws = itertools.cycle((others, costs))

    def draw(schedule: Schedule, target_bytes: int) -> Schedule | None:
        return search.within(target_bytes, 0.1 * options.seconds, each_once(graph), next(draws))

    def window(schedule: Schedule, target_bytes: int) -> Schedule | None:
        # what is left is shared with the targets that may follow
        return _within(search, schedule, target_bytes, 0.4 * search.left())

    schedule = _lowered(search, schedule, bound_bytes, draw, most=_DRAWS)
    schedule = _lowered(search, schedule, bound_bytes, window)
    peak_bytes = _peak_bytes(search, schedule)
    return LeastBudget(peak_bytes, min(bound_bytes, peak_bytes), schedule)


def _all_alike(costs: Costs) -> Costs:
    """``costs`` by which every run takes as long.

    A search weighs bytes against seconds, and does not run again what is slow, though the least peak may need that.
    With these it is another search, which often ends lower, or higher.
    """
    return dataclasses.replace(costs, seconds=tuple((1e-3,) * len(row) for row in costs.seconds))


def _lowered(
    search: Incumbent,
    schedule: Schedule,
    bound_bytes: int,
    find: Callable[[Schedule, int], Schedule | None],
    most: float = math.inf,
) -> Schedule:
    """The schedule, or one with a lower peak: ``find`` looks for one within targets between its peak and the bound.

    After each target that it does not reach the next one is closer to the peak; at ``most`` so many are tried.
    """
    peak_bytes, share, tries = _peak_bytes(search, schedule), 0.5, 0
    enough_bytes = bound_bytes * (1 + search.options.gap)
    while peak_bytes > enough_bytes and share > 0.01 and tries < most and not search.out_of_time():
        tries += 1
        found = find(schedule, peak_bytes - max(1, int(share * (peak_bytes - bound_bytes))))
        if found is None:
            share /= 2
        else:
            schedule, peak_bytes = found, _peak_bytes(search, found)
    return schedule


def _peak_bytes(search: Incumbent, schedule: Schedule) -> int:
    return simulate(search.graph, search.costs, schedule).peak_bytes


def _bound_bytes(search: Incumbent, frugal: Schedule, peak_bytes: int) -> tuple[int, list[Schedule]]:
    """A bound on every peak, and the schedules that the relaxed programs gave."""
    graph, costs, options = search.graph, search.costs, search.options
    bound_bytes = greedy.least_step_bytes(graph, costs)
    schedules: list[Schedule] = []
    places, work_seconds = first_places(graph, costs, frugal), options.seconds / 2 / _PROGRAMS
    if everywhere := all_places(graph, options.seconds / 3):
        places, work_seconds = everywhere, options.seconds / 3
    until = search.left() - _BOUND_SHARE * options.seconds

    def attempt(places: Places) -> tuple[Schedule, int] | None:
        nonlocal bound_bytes
        near = bound_bytes * (1 + options.gap) >= peak_bytes
        if near or len(schedules) == _PROGRAMS or search.left() <= until or search.out_of_time():
            return None
        program = relax(graph, costs, peak_bytes, places, options, least_bytes=True)
        result = search.minimize(program.problem, min(work_seconds, search.left() - until), 0.5 * options.gap, None)
        if math.isfinite(result.bound):  # HiGHS may end before it has one
            bound_bytes = max(bound_bytes, math.ceil(result.bound * program.unit_bytes * (1 - 1e-6)))
        schedule = None if result.value is None else relaxed_schedule(graph, program, result.value)
        if schedule is None:
            return None
        schedules.append(schedule)
        return schedule, bound_bytes

    refine(graph, costs, places, attempt)
    return bound_bytes, schedules


def _within(search: Incumbent, schedule: Schedule, budget_bytes: int, seconds: float) -> Schedule | None:
    """A schedule within ``budget_bytes``, made from ``schedule``, or None."""
    seconds = max(seconds, 0.01)
    inner = Incumbent(search.graph, search.costs, budget_bytes, dataclasses.replace(search.options, seconds=seconds))
    windows.repair(inner, schedule, seconds)
    search.work_seconds += inner.work_seconds
    search.interrupted |= inner.interrupted
    return inner.best
