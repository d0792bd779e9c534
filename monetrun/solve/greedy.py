"""Greedy eviction, then annealing: a schedule at once, a good one in seconds.

The search state *is* a sequence of steps (``cuda_ops/search_state.hpp``): a forward operator may be inserted into the
backward part anywhere, any number of times, and removed again; lifetimes, and with them the bytes at every step,
follow. Every such sequence is valid, so every schedule can be reached, and a change costs microseconds because it
moves the ends of a few intervals.

*Greedy*: insert, one after another, the recomputation (of a tensor before one of its reads, with or without what it is
computed from) that removes most of the bytes-above-budget area per second. *Annealing* on seconds + price x area, the
price following the budget: insert a chain of recomputations, remove one or all of an operator, move one, let one serve
the readers of the next, remove a run of them, change an implementation. *Ruin and recreate* (Schrimpf et al., J.
Comput. Phys. 159, 2000): remove a few recomputations, insert others greedily where the bytes are above the budget,
remove what has become needless; it exchanges one large recomputation for many small ones, which annealing does not.
In-place variants are no choice: they are used wherever they are legal.

The number of iterations follows from ``options.seconds`` and the graph's size alone, so the same inputs give the same
schedule, unless the machine is so busy that the time limit itself ends the search (about half of what the limit
allows is used on an idle core). Where greedy takes too long (a dense network at a fifth of its activations: 5 s), or
ends above the budget, annealing starts from the nearest minimum cut (``monetrun.solve.cut``); without a compiler,
minimum cuts are all there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, each_once
from monetrun.core.simulate import Timeline, simulate
from monetrun.solve import native_search, timing
from monetrun.solve.native_search import Allowed, NativeSearch
from monetrun.solve.slot import floor_seconds

# annealing iterations per second = this / (steps + 100): about half of what an idle 2.6 GHz Zen 4 core does (2026-11)
_ITERATIONS_TIMES_STEPS_PER_SECOND = 2.0e8
_RUIN = 200  # iterations of annealing in the time of one ruin and recreation
# what is run, its share of the iterations, and its first and last temperature in mean seconds of a recomputation
_RUNS = (
    ("ruin", 0.25, 2.0, 0.1),
    ("anneal", 0.15, 0.1, 0.003),
    ("ruin", 0.25, 0.5, 0.02),
    ("anneal", 0.15, 0.5, 0.003),
    ("ruin", 0.2, 0.2, 0.01),
)
_REACH_RUNS = ((10.0, 0.1), (30.0, 0.3), (3.0, 0.1))  # temperatures to reach a budget that greedy did not


def solve(graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()) -> Solution:
    """A cheap schedule within the budget.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: what the schedule may have allocated at most.
        options: ``seconds``, ``recompute``, ``implementations`` and ``seed`` are heeded.
        starts: valid schedules, within the budget or not. The result is no dearer than those that fit; the search
            starts from the nearest above the budget, of these and the plain one.

    Returns:
        ``"feasible"`` with a schedule; ``"optimal"`` when the cheapest step fits as it is; ``"infeasible"`` when a
        single step needs more than the budget; else ``"unknown"``. ``bound_seconds`` is that of every necessary
        operator run once, each with its fastest implementation.
    """
    allowance = timing.current().greedy_patience * options.seconds
    plain = each_once(graph)
    start: Schedule | None = None
    if starts and simulate(graph, costs, plain).peak_bytes > budget_bytes:
        found = nearest(graph, costs, budget_bytes, [plain, *starts])
        start = None if found is plain else found
    return improve(graph, costs, budget_bytes, options, start, allowance, starts)


def improve(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    options: Options,
    start: Schedule | None,
    allowance: float,
    known: Sequence[Schedule] = (),
) -> Solution:
    """``solve``, with the start chosen by the caller.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: what the schedule may have allocated at most.
        options: as for ``solve``.
        start: the search starts from it, within the budget or not; None: from the plain schedule, or from a minimum
            cut where greedy does not reach the budget.
        allowance: seconds after which the clock ends the search.
        known: more schedules that may be returned.

    Raises:
        ScheduleError: a schedule is not valid.
    """
    began = timing.now()
    bound_seconds = floor_seconds(graph, costs, options)
    best: Schedule | None = None
    best_seconds = math.inf

    def offer(schedule: Schedule) -> None:
        nonlocal best, best_seconds
        timeline = simulate(graph, costs, schedule)
        if timeline.peak_bytes <= budget_bytes and timeline.seconds < best_seconds:
            best, best_seconds = schedule, timeline.seconds

    def solution(status: str) -> Solution:
        return Solution(best, bound_seconds, status, "greedy", timing.now() - began)

    for schedule in (*(() if start is None else (start,)), each_once(graph), *known):
        offer(schedule)
    if best_seconds <= bound_seconds:
        return solution("optimal")
    if least_step_bytes(graph, costs) > budget_bytes:
        return solution("infeasible")
    for schedule in _Search(graph, costs, options, began + allowance).towards(budget_bytes, start, best):
        offer(schedule)
    if best is None:
        return solution("unknown")
    return solution("optimal" if best_seconds <= bound_seconds else "feasible")


def most_frugal(
    graph: Graph,
    costs: Costs,
    options: Options | None = None,
    enough_bytes: int = 0,
    allowance: float | None = None,
) -> Schedule:
    """A schedule with the least peak that the search finds, or one of at most ``enough_bytes``; seconds count second.

    Args:
        graph: of any size.
        costs: of the graph.
        options: as for ``solve``; ``seconds`` is ``timing.Timing.frugal_seconds`` by default.
        enough_bytes: a schedule within these ends the search.
        allowance: seconds after which the clock ends the search; by default as for ``solve``.
    """
    options = options or Options(seconds=timing.current().frugal_seconds)
    if allowance is None:
        allowance = timing.current().greedy_patience * options.seconds
    deadline = timing.now() + allowance
    search = _Search(graph, costs, options, deadline)
    best = plain = each_once(graph)
    peak_bytes = simulate(graph, costs, plain).peak_bytes
    floor_bytes = max(least_step_bytes(graph, costs), enough_bytes)
    if peak_bytes > floor_bytes:
        best = min([plain, *search.cuts(floor_bytes)], key=lambda s: simulate(graph, costs, s).peak_bytes)
        peak_bytes = simulate(graph, costs, best).peak_bytes
    share, attempts = 0.5, 0
    while peak_bytes > floor_bytes and share > 0.002 and attempts < 24 and timing.now() < deadline:
        target_bytes = peak_bytes - max(1, int(share * (peak_bytes - floor_bytes)))
        attempts += 1
        timeline = _replayed(graph, costs, found := search.fit(target_bytes, best, options.seconds / 40))
        if share > 0.1 and (timeline is None or timeline.peak_bytes >= peak_bytes):
            timeline = _replayed(graph, costs, found := search.fit(target_bytes, plain, options.seconds / 40))
        if found is not None and timeline is not None and timeline.peak_bytes < peak_bytes:
            best, peak_bytes = found, timeline.peak_bytes
        else:
            share /= 2
    return best


def fit(
    graph: Graph, costs: Costs, budget_bytes: int, options: Options, start: Schedule, allowance: float
) -> Schedule | None:
    """Any schedule within the budget that ``options.seconds`` of search from ``start`` find, or None."""
    return _Search(graph, costs, options, timing.now() + allowance).fit(budget_bytes, start, options.seconds)


def least_step_bytes(graph: Graph, costs: Costs) -> int:
    """The bytes that the largest single step needs whatever else is recomputed: no schedule has a lower peak.

    What a step needs: the kept tensors written before it, what it reads and writes, and its workspace.
    """
    tensors = graph.tensors
    kept: set[int] = set()
    kept_bytes = largest = 0
    for op in graph.operators:
        if op.optional:
            continue
        needs = []
        for impl, workspace in zip(op.implementations, costs.workspace_bytes[op.id], strict=True):
            held = {t for t in impl.inputs if not tensors[t].external and t not in kept}
            held.update(op.outputs)
            need = sum(tensors[t].nbytes for t in held) + workspace
            if impl.in_place_of is not None:
                need -= tensors[op.outputs[0]].nbytes
            needs.append(need)
        largest = max(largest, kept_bytes + min(needs))
        for t in op.outputs:
            if tensors[t].kept:
                kept.add(t)
                kept_bytes += tensors[t].nbytes
    return largest


def nearest(graph: Graph, costs: Costs, budget_bytes: int, candidates: Sequence[Schedule]) -> Schedule:
    """Of ``candidates`` the one with the least peak above the budget, or, where all fit, the cheapest."""
    replayed = [(simulate(graph, costs, s), i) for i, s in enumerate(candidates)]
    over = [(t.peak_bytes, t.seconds, i) for t, i in replayed if t.peak_bytes > budget_bytes]
    fitting = [(t.seconds, t.peak_bytes, i) for t, i in replayed]
    return candidates[min(over or fitting)[2]]


def _replayed(graph: Graph, costs: Costs, schedule: Schedule | None) -> Timeline | None:
    return None if schedule is None else simulate(graph, costs, schedule)


class _Search:
    """Searches of one graph until a deadline of the clock."""

    def __init__(self, graph: Graph, costs: Costs, options: Options, deadline: float) -> None:
        self.graph, self.costs, self.options, self.deadline = graph, costs, options, deadline
        self.allowed = Allowed.of(graph, costs, options)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - timing.now()

    def iterations(self, seconds: float) -> int:
        """Of annealing, in ``seconds`` of work."""
        steps = len(self.graph.operators) + 100
        return max(1000, int(seconds * _ITERATIONS_TIMES_STEPS_PER_SECOND / steps))

    def towards(self, budget_bytes: int, start: Schedule | None, known: Schedule | None = None) -> list[Schedule]:
        """What greedy and every annealing run found; all within the budget, if the native core is right.

        Where they do not reach it from ``start``, they go on from ``known``, which fits, or from a cut that does.
        """
        if not native_search.available():
            return self.cuts_within(budget_bytes)
        total = self.iterations(self.options.seconds)
        cuts: list[Schedule] = []
        with self._native(budget_bytes, start or each_once(self.graph)) as search:
            fits = search.greedy()
            if not fits and start is None and (cuts := self.cuts(budget_bytes)):
                search.load(nearest(self.graph, self.costs, budget_bytes, cuts))
                fits = search.greedy()
            fitting = self.fitting(budget_bytes, [*cuts, *([known] if known else [])])
            spared = self.left() / 2 if fitting else 0.0  # for going on from what fits
            for hot, cold in _REACH_RUNS:
                left = self.left() - spared
                if fits or left <= 0:
                    break
                fits = search.anneal(total // 4, hot, cold, left, until_it_fits=True)
            if not fits and fitting:
                search.load(nearest(self.graph, self.costs, budget_bytes, fitting))
                fits = search.greedy()
            for kind, share, hot, cold in _RUNS:
                left = self.left()
                if not fits or left <= 0:
                    break
                if kind == "ruin":
                    search.ruin(int(share * total / _RUIN), hot, cold, left)
                else:
                    search.anneal(int(share * total), hot, cold, left, until_it_fits=False)
                search.return_to_best()
            best = search.best()
        return cuts if best is None else [*cuts, best]

    def fit(self, budget_bytes: int, start: Schedule, seconds: float) -> Schedule | None:
        """Any schedule within the budget."""
        if not native_search.available():
            return next(iter(self.cuts_within(budget_bytes)), None)
        with self._native(budget_bytes, start) as search:
            if not search.greedy():
                search.anneal(self.iterations(seconds), 10.0, 0.1, max(self.left(), 1e-3), until_it_fits=True)
            return search.best()

    def cuts(self, budget_bytes: int) -> list[Schedule]:
        """Schedules from minimum cuts, around the budget."""
        from monetrun.solve import cut  # scipy takes long to import

        return cut.schedules(self.graph, self.costs, budget_bytes, self.options)

    def cuts_within(self, budget_bytes: int) -> list[Schedule]:
        """The minimum cuts within the budget, aimed at less where none is."""
        for share in (1.0, 0.9, 0.8, 0.6, 0.4):
            cuts = self.cuts(int(share * budget_bytes))
            if found := self.fitting(budget_bytes, cuts):
                return found
        return []

    def fitting(self, budget_bytes: int, schedules: Sequence[Schedule]) -> list[Schedule]:
        """Those within the budget."""
        return [s for s in schedules if simulate(self.graph, self.costs, s).peak_bytes <= budget_bytes]

    def _native(self, budget_bytes: int, start: Schedule) -> NativeSearch:
        return NativeSearch(self.allowed, budget_bytes, start, self.options.seed)
