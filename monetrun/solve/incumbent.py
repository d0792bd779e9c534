"""The best schedule and the best bound of a search so far, and how much of its time is left."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import TYPE_CHECKING

from monetrun.core.errors import MonetrunError
from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule
from monetrun.core.simulate import Timeline, simulate
from monetrun.solve import cut, greedy, tidy, timing
from monetrun.solve.mip.canonical import StopRule, Vector
from monetrun.solve.slot import floor_seconds

if TYPE_CHECKING:  # cvxpy takes a second to import, and many searches end without a program
    import cvxpy as cp

    from monetrun.solve.mip.minimize import Result

_log = logging.getLogger("monetrun")

_TOLERANCE = 2e-6  # of a bound (``Relaxation.bound_seconds``)


@functools.cache
def _warn_once(failure: str) -> None:
    _log.warning("%s: the plan is the best found without it", failure)


class Incumbent:
    """The state of a search.

    Every choice follows the *work* done, in seconds of an idle core (``Result.work_seconds``, iterations of the native
    search), which is the same in every run; the clock only ends the search when the time is up.

    Attributes:
        best: the cheapest schedule within the budget so far.
        seconds: what it costs, or infinity.
        floor_seconds: each necessary operator run once, with its cheapest implementation.
        bound_seconds: no schedule within the budget costs less.
        work_seconds: done so far.
        interrupted: Ctrl-C was pressed.
    """

    def __init__(self, graph: Graph, costs: Costs, budget_bytes: int, options: Options) -> None:
        self.graph, self.costs, self.budget_bytes, self.options = graph, costs, budget_bytes, options
        self.began = timing.now()
        self.best: Schedule | None = None
        self.seconds = math.inf
        self.floor_seconds = floor_seconds(graph, costs, options)
        self.bound_seconds = self.floor_seconds
        self.work_seconds = 0.0
        self.interrupted = False
        self._draws = 0  # native searches so far

    def elapsed(self) -> float:
        """Seconds since the beginning, by the clock."""
        return timing.now() - self.began

    def left(self) -> float:
        """Seconds of work until the time limit."""
        return self.options.seconds - self.work_seconds

    def offer(self, schedule: Schedule) -> Timeline:
        """Tidy and replay ``schedule``, and keep it if it is the cheapest within the budget."""
        schedule = tidy.without_dead_runs(self.graph, schedule)
        schedule = tidy.in_place_where_legal(self.graph, self.costs, schedule, self.options)
        timeline = simulate(self.graph, self.costs, schedule)
        if timeline.peak_bytes <= self.budget_bytes and timeline.seconds < self.seconds:
            self.best, self.seconds = schedule, timeline.seconds
            self._report()
        return timeline

    def raise_bound(self, seconds: float) -> None:
        """No schedule is cheaper than ``seconds``."""
        if seconds > self.bound_seconds:
            self.bound_seconds = seconds
            self._report()

    def _report(self) -> None:
        if self.options.on_progress is not None:
            self.options.on_progress(self.elapsed(), self.seconds, self.bound_seconds)

    def close(self) -> bool:
        """Whether the best is within the gap of the bound."""
        return self.seconds <= self.bound_seconds * (1 + max(self.options.gap, _TOLERANCE))

    def proven(self) -> bool:
        """Whether no schedule is cheaper than the best, or none fits."""
        return self.seconds <= self.bound_seconds * (1 + _TOLERANCE) or math.isinf(self.bound_seconds)

    def out_of_time(self) -> bool:
        """Whether no work or no time is left, or Ctrl-C was pressed."""
        return self.interrupted or timing.interrupted() or self.left() <= 0 or self.elapsed() >= self.options.seconds

    def interrupt(self) -> None:
        """Ctrl-C was pressed."""
        self.interrupted = True
        timing.interrupt()

    def done(self) -> bool:
        """Whether to stop: good enough, out of time, or proven to be infeasible."""
        return self.close() or self.out_of_time() or math.isinf(self.bound_seconds)

    def native(self, seconds: float) -> tuple[Options, float]:
        """Options for a native search of ``seconds``, and its wall-clock allowance.

        Books the work. Each search has its own seed.
        """
        self.work_seconds += 0.6 * seconds  # what its iterations take on an idle core
        allowance = min(timing.current().patience * seconds, max(0.0, self.options.seconds - self.elapsed()))
        self._draws += 1
        return dataclasses.replace(self.options, seconds=seconds, seed=self.options.seed + self._draws - 1), allowance

    def improve_greedily(self, seconds: float, start: Schedule | None = None) -> None:
        """Offer what the greedy solver finds from ``start`` in ``seconds``, or from the plain schedule."""
        options, allowance = self.native(seconds)
        found = greedy.improve(self.graph, self.costs, self.budget_bytes, options, start, allowance).schedule
        if found is not None:
            self.offer(found)

    def search_greedily(self, seconds: float, start: Schedule | None = None) -> None:
        """``improve_greedily``, unless the search is done."""
        if not self.done():
            self.improve_greedily(min(seconds, self.left()), start)

    def search_from_cuts(self, seconds: float) -> None:
        """Offer minimum cuts with the best's implementations, and what the greedy solver makes of the nearest."""
        start = None if self.done() else self.cut()
        self.search_greedily(seconds, start)

    def most_frugal(self, seconds: float, enough_bytes: int = 0, costs: Costs | None = None) -> Schedule:
        """A schedule with the least peak that ``seconds`` of native search find; see ``greedy.most_frugal``.

        ``costs``: others of the same bytes.
        """
        options, allowance = self.native(seconds)
        return greedy.most_frugal(self.graph, costs or self.costs, options, enough_bytes, allowance)

    def within(self, budget_bytes: int, seconds: float, start: Schedule, costs: Costs | None = None) -> Schedule | None:
        """Any schedule within a budget that is not this search's, from ``start``; None where none is found.

        ``costs``: others of the same bytes.
        """
        options, allowance = self.native(seconds)
        return greedy.fit(self.graph, costs or self.costs, budget_bytes, options, start, allowance)

    def cut(self) -> Schedule | None:
        """Offer minimum cuts, with the implementations of the best schedule; return the nearest to the budget."""
        found = cut.schedules(self.graph, self.costs, self.budget_bytes, self.options, self.best)
        self.work_seconds += cut.work_seconds(self.graph) if found else 0.0
        for schedule in found:
            self.offer(schedule)
        return greedy.nearest(self.graph, self.costs, self.budget_bytes, found) if found else None

    def mip_gap(self) -> float:
        """The gap, relative to a program's own objective, that is a quarter of ``options.gap``."""
        known = self.bound_seconds if math.isinf(self.seconds) else self.seconds
        floor = self.floor_seconds
        return min(0.5, 0.25 * self.options.gap * floor / max(known - floor, 0.01 * floor, 1e-30))

    def minimize(self, problem: cp.Problem, work_seconds: float, gap: float, start: dict[str, Vector] | None) -> Result:
        """Solve a program with at most ``work_seconds`` of work, and book the work."""
        from monetrun.solve.mip.minimize import Result, minimize

        work_seconds = max(0.01, min(work_seconds, self.left()))
        allowance = min(timing.current().patience * work_seconds, self.options.seconds - self.elapsed())
        stop = StopRule(max(0.01, allowance), gap, work_seconds, seed=self.options.seed)
        try:
            result = minimize(problem, self.options.mip_solver, stop, start)
        except Exception as error:  # of the solver's package: what was found so far is a plan all the same
            if isinstance(error, MonetrunError):
                raise
            _warn_once(f"the solver has failed ({type(error).__name__}: {error})")
            result = Result("unknown", None, math.inf, -math.inf, work_seconds=work_seconds)
        if result.interrupted:
            self.interrupt()
        self.work_seconds += result.work_seconds
        return result
