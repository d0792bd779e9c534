"""Rounds whose graphs cannot be joined into one: every graph is solved separately, within limits of its own.

In such a round a graph is called several times before its backward (a discriminator that sees real and generated
samples, a block that the script calls in a loop), or a forward follows a backward. All calls of a graph run under one
schedule, and what one call saves adds to the peaks of the others. So each graph gets a limit on the bytes it saves,
between the least that it can save and what the plain step saves. These limits determine the bytes at every call's
start, and so how much its forward and its backward may allocate. All graphs' limits move together, by one share, and
each graph is solved within its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from monetrun.core.call_footprint import call_footprint
from monetrun.core.event import calls_of_graphs
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, Event, StepRecord, events_under, replay
from monetrun.planning.limited_graph import GraphLimits, LimitedGraph
from monetrun.solve import Solver, greedy, timing

_SHARES = 16  # shares tried between the least and the most that can be saved
_HALVINGS = 5  # of the distance between shares around the cheapest; of budgets in the search for the lowest peak
_QUICK_SECONDS = 0.1  # for one graph under one share
# Of the seconds, for the choice of the limits and for the solver; the rest is for graphs that may save more.
_CHOICE, _SOLVING = 0.4, 0.5


class SeparateRound:
    """The round ``record.events[bounds[0]:bounds[1]]``, whose graphs are solved separately.

    Args:
        record: of the step.
        bounds: of the round.
        plain: schedules of all graphs, which save as much as is of any use.
    """

    def __init__(self, record: StepRecord, bounds: tuple[int, int], plain: Sequence[Schedule]) -> None:
        events = record.events[slice(*bounds)]
        self._record, self._bounds = record, bounds
        self._start_bytes = replay(record, plain).start_bytes[bounds[0]]
        self._calls = calls_of_graphs(events)
        self._released = {
            k: [t for t in calls[0].released if all(t in e.released for e in calls)]
            for k in self._calls
            if (calls := [e for e in events if e.kind == BACKWARD and e.graph == k])
        }
        self._kept_bytes = {k: sum(t.nbytes for t in record.graphs[k].tensors if t.kept) for k in self._calls}
        self._most_saved_bytes = {k: self._saved_bytes(k, plain[k]) for k in self._calls}
        # by what is allowed: the seconds of the search for it, and what that found
        self._least_saving: dict[tuple[bool, tuple[str, ...] | None], tuple[float, dict[int, Schedule]]] = {}

    def least_saving(self, options: Options | None = None) -> dict[int, Schedule]:
        """For each graph the schedule found that saves least between forward and backward.

        Searched for once, and again where there is more than twice the time that it had.

        ``options``: what it may use; where that is less than all, the search takes a quarter of their seconds at most.
        """
        seconds, all_allowed = timing.current().frugal_seconds, Options()
        options = options or all_allowed
        key = options.recompute, options.implementations
        if key != (all_allowed.recompute, all_allowed.implementations):
            seconds = min(seconds, options.seconds / 4 / len(self._calls))
        searched_seconds, found = self._least_saving.get(key, (0.0, {}))
        if seconds > 2 * searched_seconds:
            own = replace(options, seconds=seconds, on_progress=None)
            graphs, costs = self._record.graphs, self._record.costs
            found = {k: _least_saving(graphs[k], costs[k], own) for k in self._calls}
            self._least_saving[key] = seconds, found
        return found

    def lowest_peak(self, schedules: Sequence[Schedule], options: Options) -> dict[int, Schedule]:
        """Schedules of this round's graphs under which the step's peak is the lowest found.

        Args:
            schedules: of all graphs; those of other rounds' graphs stay.
            options: the search may use what they allow, and takes about their seconds.
        """
        best: dict[int, Schedule] = {}
        high = self._peak_bytes(schedules, {})
        least = tried = self.least_saving(options)
        if (peak_bytes := self._peak_bytes(schedules, least)) < high:
            best, high = least, peak_bytes
        low = _bound_bytes(self, high)
        saved = {k: self._saved_bytes(k, schedule) for k, schedule in least.items()}
        for _ in range(_HALVINGS):
            target_bytes = (low + high) // 2
            limits = self._limits(target_bytes, saved, self._events(schedules, tried))
            found = self._solve_greedily(limits, replace(options, seconds=options.seconds / _HALVINGS))
            tried = tried if found is None else found
            if found is not None and (peak_bytes := self._peak_bytes(schedules, found)) < high:
                best, high = found, peak_bytes
            else:
                low = target_bytes
        return best

    def solve(
        self,
        schedules: Sequence[Schedule],
        budget_bytes: int,
        solver: Solver,
        options: Options,
        known: Sequence[Sequence[Schedule]] = (),
    ) -> dict[int, Schedule]:
        """Cheap schedules of this round's graphs within the budget; empty where none were found.

        Args:
            schedules: of all graphs; those of other rounds' graphs stay.
            budget_bytes: of the whole step.
            solver: for one graph.
            options: of the seconds, two fifths are for the choice of the limits, and a tenth for what it has left.
            known: schedules of all graphs to begin with; what is found is no dearer than those that fit.
        """
        least = self.least_saving(options)
        deadline = timing.now() + options.seconds
        found = self._cheapest_share(schedules, budget_bytes, least, options)
        starts = [{k: of_all[k] for k in self._calls} for of_all in dict.fromkeys(map(tuple, (schedules, *known)))]
        fitting = [own for own in starts if self._peak_bytes(schedules, own) <= budget_bytes]
        if not found and not fitting:
            return {}
        found = min([found] * bool(found) + fitting, key=self._seconds)
        found = _with_more_saved(self, schedules, budget_bytes, found, options, deadline - _SOLVING * options.seconds)
        # a graph that saves less than its share leaves the rest to all peaks
        saved = {k: self._saved_bytes(k, schedule) for k, schedule in found.items()}
        limits = self._limits(budget_bytes, saved, self._events(schedules, found))
        own = replace(options, seconds=_SOLVING * options.seconds / len(self._calls))
        for k in self._calls:
            found = _improved(self, schedules, budget_bytes, found, k, limits, solver, own, starts)
        return _with_more_saved(self, schedules, budget_bytes, found, options, deadline)

    def _cheapest_share(
        self, schedules: Sequence[Schedule], budget_bytes: int, tried: dict[int, Schedule], options: Options
    ) -> dict[int, Schedule]:
        """The greedy solver's cheapest schedules within the budget, over shares of what can be saved.

        ``tried``: those that save least.
        """
        tries = _SHARES + 2 * _HALVINGS
        least = {k: self._saved_bytes(k, schedule) for k, schedule in tried.items()}
        quick = replace(options, seconds=min(_QUICK_SECONDS * len(self._calls), _CHOICE * options.seconds / tries))
        found: dict[int, Schedule] = {}
        best_share = 0.0

        def try_shares(shares: Iterable[float]) -> None:
            nonlocal tried, found, best_share
            for share in shares:
                limits = self._limits(budget_bytes, self._saved_at(share, least), self._events(schedules, tried))
                solved = self._solve_greedily(limits, quick)
                if solved is None:
                    continue
                tried = solved  # also where it does not fit: the next share's schedules read about the same
                if self._peak_bytes(schedules, tried) > budget_bytes:
                    continue
                if not found or self._seconds(tried) < self._seconds(found):
                    found, best_share = tried, share

        spacing = _largest_share(self, budget_bytes, least, self._events(schedules, tried)) / (_SHARES - 1)
        try_shares(i * spacing for i in range(_SHARES))
        for i in range(_HALVINGS):
            distance = 0.5 ** (i + 1) * spacing
            try_shares([best_share + distance, best_share - distance])
        return found

    def _saved_bytes(self, k: int, schedule: Schedule) -> int:
        return call_footprint(self._record.graphs[k], self._record.costs[k], schedule).saved_bytes

    def _seconds(self, own: Mapping[int, Schedule]) -> float:
        """Of this round's calls under ``own`` schedules."""
        graphs, costs = self._record.graphs, self._record.costs
        return sum(n * simulate(graphs[k], costs[k], own[k]).seconds for k, n in self._calls.items())

    def _peak_bytes(self, schedules: Sequence[Schedule], own: Mapping[int, Schedule]) -> int:
        """The step's peak under ``schedules``, with ``own`` in place of some of them."""
        return replay(self._record, _with_own(schedules, own)).peak_bytes

    def _limited(self, k: int, limits: GraphLimits) -> LimitedGraph:
        return LimitedGraph.of(self._record.graphs[k], self._record.costs[k], limits, self._released.get(k, ()))

    def _saved_at(self, share: float, least: Mapping[int, int]) -> dict[int, int]:
        """The bytes each graph may save: ``share`` of the way from the least to the most."""
        most = self._most_saved_bytes
        return {k: least[k] + int(share * (most[k] - least[k])) for k in self._calls}

    def _events(self, schedules: Sequence[Schedule], own: Mapping[int, Schedule]) -> Sequence[Event]:
        """The round's events under ``schedules``, with ``own`` in place of some of them."""
        return events_under(self._record, _with_own(schedules, own))[slice(*self._bounds)]

    def _limits(self, budget_bytes: int, saved: Mapping[int, int], events: Sequence[Event]) -> dict[int, GraphLimits]:
        """The limits that keep the step within the budget when every graph saves its part of ``saved``.

        ``events``: of the round, under schedules that read about what those within the limits will.
        """
        graphs = self._record.graphs
        highest = {(phase, k): 0 for phase in (FORWARD, BACKWARD) for k in self._calls}  # bytes beside the call's own
        now = self._start_bytes
        for event in events:
            if event.kind == OUTSIDE:
                now += event.delta_bytes - sum(graphs[k].tensors[t].nbytes for k, t in event.dropped)
                continue
            k, key = event.graph, (event.kind, event.graph)
            highest[key] = max(highest[key], now - (saved[k] if event.kind == BACKWARD else 0))
            if event.kind == FORWARD:
                now += saved[k]
            else:
                freed_bytes = sum(graphs[k].tensors[t].nbytes for t in event.released)
                now += self._kept_bytes[k] - saved[k] - freed_bytes
        return {
            k: GraphLimits(saved[k], budget_bytes - highest[FORWARD, k], budget_bytes - highest[BACKWARD, k])
            for k in self._calls
        }

    def _solve_greedily(self, limits: Mapping[int, GraphLimits], options: Options) -> dict[int, Schedule] | None:
        """Schedules within the limits; None where the greedy solver finds none for some graph."""
        own = replace(options, seconds=options.seconds / len(self._calls), on_progress=None)
        found = {}
        for k in self._calls:
            limited = self._limited(k, limits[k])
            schedule = greedy.solve(limited.graph, limited.costs, limited.budget_bytes, own).schedule
            if schedule is None:
                return None
            found[k] = limited.to_original(schedule)
        return found


def _with_own(schedules: Sequence[Schedule], own: Mapping[int, Schedule]) -> list[Schedule]:
    return [own.get(k, schedule) for k, schedule in enumerate(schedules)]


def _bound_bytes(joint: SeparateRound, enough_bytes: int) -> int:
    """A bound on the peak under any schedules, of which ``enough_bytes`` are enough for some.

    No call saves less than nothing, nor needs less than its largest step.
    """
    limits = joint._limits(enough_bytes, dict.fromkeys(joint._calls, 0), joint._record.events[slice(*joint._bounds)])
    spare_bytes = []
    for k, of in limits.items():
        limited = joint._limited(k, replace(of, saved_bytes=enough_bytes))
        spare_bytes.append(limited.budget_bytes - greedy.least_step_bytes(limited.graph, limited.costs))
    return max(0, enough_bytes - min(spare_bytes))


def _largest_share(joint: SeparateRound, budget_bytes: int, least: Mapping[int, int], events: Sequence[Event]) -> float:
    """The share at which the saved bytes are about all that may be allocated."""
    low, high = 0.0, 1.0
    for _ in range(20):
        share = (low + high) / 2
        limits = joint._limits(budget_bytes, joint._saved_at(share, least), events).values()
        if all(of.saved_bytes <= min(of.forward_bytes, of.backward_bytes) for of in limits):
            low = share
        else:
            high = share
    return low


def _improved(
    joint: SeparateRound,
    schedules: Sequence[Schedule],
    budget_bytes: int,
    found: dict[int, Schedule],
    k: int,
    limits: Mapping[int, GraphLimits],
    solver: Solver,
    options: Options,
    starts: Sequence[Mapping[int, Schedule]] = (),
) -> dict[int, Schedule]:
    """``found`` with graph ``k`` solved within its limits, where that is faster and the step still fits."""
    limited = joint._limited(k, limits[k])
    known = [limited.from_original(own[k]) for own in (found, *starts)]
    schedule = solver(limited.graph, limited.costs, limited.budget_bytes, options, known).schedule
    if schedule is None:
        return found
    improved = {**found, k: limited.to_original(schedule)}
    faster = joint._seconds(improved) < joint._seconds(found)
    return improved if faster and joint._peak_bytes(schedules, improved) <= budget_bytes else found


def _with_more_saved(
    joint: SeparateRound,
    schedules: Sequence[Schedule],
    budget_bytes: int,
    found: dict[int, Schedule],
    options: Options,
    deadline: float,
) -> dict[int, Schedule]:
    """``found`` after one graph after the other was solved to save more, as much as fits beside the others."""
    for k in joint._calls:
        saved = {j: joint._saved_bytes(j, schedule) for j, schedule in found.items()}
        more = joint._most_saved_bytes[k] - saved[k]
        for halvings in range(_HALVINGS if more > 0 else 0):
            if (left := deadline - timing.now()) <= 0:
                return found
            quick = replace(options, seconds=min(_QUICK_SECONDS, left))
            more_saved = {**saved, k: saved[k] + (more >> halvings)}
            limits = joint._limits(budget_bytes, more_saved, joint._events(schedules, found))
            improved = _improved(joint, schedules, budget_bytes, found, k, limits, greedy.solve, quick)
            if improved is not found:
                found = improved
                break
    return found


@functools.lru_cache(maxsize=128)
def _least_saving(graph: Graph, costs: Costs, options: Options) -> Schedule:
    """The schedule found that saves least."""
    unlimited = sum(t.nbytes for t in graph.tensors) + max((max(row) for row in costs.workspace_bytes), default=0)
    limited = LimitedGraph.of(graph, costs, GraphLimits(0, unlimited, unlimited))
    allowance = timing.current().patience * options.seconds  # a busy machine finds what an idle one does
    return limited.to_original(greedy.most_frugal(limited.graph, limited.costs, options, allowance=allowance))
