"""The best schedule and the best bound so far, and what of the time is left, by the work that was done."""

from __future__ import annotations

import dataclasses
import math
import time

import cvxpy as cp

from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule
from monetrun.core.simulate import Timeline, simulate
from monetrun.solve import cut, greedy, mip, relaxation, tidy

PATIENCE = 4.0  # so many times as long as its work should take may a part of the search take on the clock
_TOLERANCE = 2e-6  # of a bound (``relaxation.bound_of``)


class Incumbent:
    """What a search knows.

    Every choice follows the *work* that was done, in seconds of an idle core (``mip.Result.work_seconds``, iterations
    of the native search), which is the same in every run; the clock only ends the search when the time is up.

    Attributes:
        best: the cheapest schedule within the budget so far.
        seconds: what it costs, or infinity.
        bound_seconds: no schedule within the budget costs less.
        work_seconds: done so far.
        interrupted: Ctrl-C was pressed.
    """

    def __init__(self, graph: Graph, costs: Costs, budget_bytes: int, options: Options, progress: mip.Progress | None):
        self.graph, self.costs, self.budget_bytes, self.options = graph, costs, budget_bytes, options
        self.progress = progress
        self.began = time.monotonic()
        self.best: Schedule | None = None
        self.seconds = math.inf
        self.floor_seconds = relaxation.floor_seconds(graph, costs, options)
        self.bound_seconds = self.floor_seconds
        self.work_seconds = 0.0
        self.interrupted = False
        self._draws = 0  # native searches so far

    def elapsed(self) -> float:
        """Seconds since the beginning, by the clock."""
        return time.monotonic() - self.began

    def left(self) -> float:
        """Seconds of work until the time limit."""
        return self.options.seconds - self.work_seconds

    def offer(self, schedule: Schedule) -> Timeline:
        """Replay ``schedule``, after tidying, and keep it if it is the cheapest within the budget."""
        schedule = tidy.without_dead_runs(self.graph, schedule)
        schedule = tidy.in_place_where_legal(self.graph, self.costs, schedule, self.options)
        timeline = simulate(self.graph, self.costs, schedule)
        if timeline.peak_bytes <= self.budget_bytes and timeline.seconds < self.seconds:
            self.best, self.seconds = schedule, timeline.seconds
            self.tell()
        return timeline

    def raise_bound(self, seconds: float) -> None:
        """No schedule is cheaper than ``seconds``."""
        if seconds > self.bound_seconds:
            self.bound_seconds = seconds
            self.tell()

    def tell(self) -> None:
        """Call who wants to know."""
        if self.progress is not None:
            self.progress(self.seconds, self.bound_seconds)
        if self.options.on_progress is not None:
            self.options.on_progress(self.elapsed(), self.seconds, self.bound_seconds)

    def close(self) -> bool:
        """Whether the best is within the gap of the bound."""
        return self.seconds <= self.bound_seconds * (1 + max(self.options.gap, _TOLERANCE))

    def done(self) -> bool:
        """Whether to stop: good enough, no time left, interrupted, or proven to be infeasible."""
        over = self.left() <= 0 or self.elapsed() >= self.options.seconds
        return self.close() or over or self.interrupted or math.isinf(self.bound_seconds)

    def native(self, seconds: float) -> tuple[Options, float]:
        """Options and patience for a native search that may take so long; its work is booked. Each has its own seed."""
        self.work_seconds += 0.6 * seconds  # what its iterations take on an idle core
        patience = min(PATIENCE, max(0.0, self.options.seconds - self.elapsed()) / seconds)
        self._draws += 1
        return dataclasses.replace(self.options, seconds=seconds, seed=self.options.seed + self._draws - 1), patience

    def cut(self) -> Schedule | None:
        """Offer minimum cuts, with the implementations of the best schedule; of them the nearest to the budget."""
        found = cut.schedules(self.graph, self.costs, self.budget_bytes, self.options, self.best)
        self.work_seconds += cut.work_seconds(self.graph) if found else 0.0
        for schedule in found:
            self.offer(schedule)
        return greedy.nearest(self.graph, self.costs, self.budget_bytes, found) if found else None

    def mip_gap(self) -> float:
        """The gap, relative to a program's own objective, that is a quarter of the gap asked for."""
        known = self.bound_seconds if math.isinf(self.seconds) else self.seconds
        floor = self.floor_seconds
        return min(0.5, 0.25 * self.options.gap * floor / max(known - floor, 0.01 * floor, 1e-30))

    def minimize(
        self, problem: cp.Problem, work_seconds: float, gap: float, start: dict[str, mip.Vector] | None
    ) -> mip.Result:
        """Solve a program with so much work, and book the work."""
        work_seconds = max(0.01, min(work_seconds, self.left()))
        patience = max(0.01, min(PATIENCE * work_seconds, self.options.seconds - self.elapsed()))
        limits = mip.Limits(patience, gap, work_seconds, seed=self.options.seed)
        result = mip.minimize(problem, self.options.mip_solver, limits, start)
        self.interrupted |= result.interrupted
        self.work_seconds += result.work_seconds
        return result
