"""Greedy eviction, then annealing: a schedule at once, a good one in seconds.

A schedule under search *is* its sequence of steps (``cuda_ops/search_state.hpp``): a forward operator may be put into
the backward part anywhere, any number of times, and taken out again; lifetimes, and with them the bytes at every step,
follow. Every such sequence is valid, so every schedule can be reached, and a change costs microseconds because it
moves the ends of a few intervals.

*Greedy*: put in, one after another, the recomputation (of a tensor before one of its reads, with or without what it
is computed from) that takes off most of the bytes-above-budget area per second. *Annealing* on seconds + price x area,
the price following the budget: put in a chain of recomputations, take one or all of an operator out, move one, let
one serve the readers of the next, take out a run of them, change an implementation. *Ruin and recreate* (Schrimpf et
al., J. Comput. Phys. 159, 2000): take out a few recomputations, put in others greedily where the bytes are above the
budget, take out what has become needless; it exchanges one large recomputation for many small ones, which
annealing does not. In-place variants are no choice: they are used wherever they are legal.

The number of iterations follows from ``options.seconds`` and the graph's size alone, so the same inputs give the same
schedule, unless the machine is so busy that the time limit itself ends the search (about half of what the limit
allows is used on an idle core). Where greedy takes too long (a dense network at a fifth of its activations: 5 s), or
ends above the budget, annealing starts from the nearest minimum cut (``solve.cut``); without a compiler, minimum cuts
are all there is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from array import array
from collections.abc import Sequence

from monetrun.core.graph import Costs, Graph, Implementation
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, Step, plain_schedule
from monetrun.core.simulate import Timeline, core, flatten, simulate
from monetrun.solve import tidy
from monetrun.solve.slot import necessary

# annealing iterations per second = this / (steps + 100): about half of what an idle 2.6 GHz Zen 4 core does (2026-11)
_ITERATIONS_TIMES_STEPS_PER_SECOND = 2.0e8
_TRIES = 2**16  # of greedy, a second or two for thousands of operators, of which half of them should do
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


def solve(graph: Graph, costs: Costs, budget_bytes: int, options: Options = Options()) -> Solution:  # noqa: B008
    """A cheap schedule within the budget.

    Returns:
        ``"feasible"`` with a schedule; ``"optimal"`` when the cheapest step fits as it is; ``"infeasible"`` when a
        single step needs more than the budget; else ``"unknown"``. ``bound_seconds`` is that of every operator run
        once, each with its fastest implementation.
    """
    return improve(graph, costs, budget_bytes, None, options)


def improve(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    schedule: Schedule | None,
    options: Options = Options(),  # noqa: B008
    patience: float = 1.0,
) -> Solution:
    """``solve``, started from ``schedule`` (valid, but not necessarily within the budget) where one is given.

    The clock ends it only after ``patience`` times ``options.seconds``.

    Raises:
        ScheduleError: ``schedule`` is not valid.
    """
    start = time.perf_counter()
    bound_seconds = sum(min(costs.seconds[i]) for i in necessary(graph, options))
    view = _View(graph, costs, options)
    candidates = [plain_schedule(graph)]
    if schedule is not None:
        candidates.insert(0, schedule)
    best: tuple[float, Schedule] | None = None
    for candidate in candidates:
        timeline = simulate(graph, costs, candidate)
        if timeline.peak_bytes <= budget_bytes and (best is None or timeline.seconds < best[0]):
            best = timeline.seconds, candidate
    if best is not None and best[0] <= bound_seconds:
        return _solution(best[1], bound_seconds, "optimal", start)
    if least_step_bytes(graph, costs) > budget_bytes:
        return _solution(None, bound_seconds, "infeasible", start)
    for found in view.search(budget_bytes, schedule, start + patience * options.seconds):
        timeline = simulate(graph, costs, found)
        if timeline.peak_bytes <= budget_bytes and (best is None or timeline.seconds < best[0]):
            best = timeline.seconds, found
    if best is None:
        return _solution(None, bound_seconds, "unknown", start)
    return _solution(best[1], bound_seconds, "optimal" if best[0] <= bound_seconds else "feasible", start)


def most_frugal(
    graph: Graph,
    costs: Costs,
    options: Options = Options(seconds=6.0),  # noqa: B008
    enough_bytes: int = 0,
    patience: float = 1.0,
) -> Schedule:
    """A schedule with the least peak that the search finds, or one of at most ``enough_bytes``; seconds count second.

    The clock ends it after ``patience`` times ``options.seconds``.
    """
    view = _View(graph, costs, options)
    deadline = time.perf_counter() + patience * options.seconds
    best = plain = plain_schedule(graph)
    peak_bytes = simulate(graph, costs, plain).peak_bytes
    floor_bytes = max(least_step_bytes(graph, costs), enough_bytes)
    if peak_bytes > floor_bytes:
        best = min([plain, *view.cuts(floor_bytes)], key=lambda s: simulate(graph, costs, s).peak_bytes)
        peak_bytes = simulate(graph, costs, best).peak_bytes
    share, attempts = 0.5, 0
    while peak_bytes > floor_bytes and share > 0.002 and attempts < 24 and time.perf_counter() < deadline:
        target_bytes = peak_bytes - max(1, int(share * (peak_bytes - floor_bytes)))
        attempts += 1
        timeline = _replayed(graph, costs, found := view.fit(target_bytes, best, options.seconds / 40, deadline))
        if share > 0.1 and (timeline is None or timeline.peak_bytes >= peak_bytes):
            timeline = _replayed(graph, costs, found := view.fit(target_bytes, plain, options.seconds / 40, deadline))
        if found is not None and timeline is not None and timeline.peak_bytes < peak_bytes:
            best, peak_bytes = found, timeline.peak_bytes
        else:
            share /= 2
    return best


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


def _solution(schedule: Schedule | None, bound_seconds: float, status: str, start: float) -> Solution:
    return Solution(schedule, bound_seconds, status, "greedy", time.perf_counter() - start)


def _replayed(graph: Graph, costs: Costs, schedule: Schedule | None) -> Timeline | None:
    return None if schedule is None else simulate(graph, costs, schedule)


class _View:
    """The graph as the options allow it to be scheduled, and the native search on it."""

    def __init__(self, graph: Graph, costs: Costs, options: Options) -> None:
        self.graph, self.costs, self.options = graph, costs, options
        self.allowed, self.allowed_costs, self.index = _restricted(graph, costs, options)
        self.library, _ = core()

    def iterations(self, seconds: float) -> int:
        steps = len(self.graph.operators) + 100
        return max(1000, int(seconds * _ITERATIONS_TIMES_STEPS_PER_SECOND / steps))

    def search(self, budget_bytes: int, schedule: Schedule | None, deadline: float) -> list[Schedule]:
        """What greedy and every annealing run found; all within the budget, if the native core is right."""
        if self.library is None:
            return self.cuts_within(budget_bytes)
        total = self.iterations(self.options.seconds)
        cuts: list[Schedule] = []
        with _Search(self, budget_bytes, schedule or plain_schedule(self.graph)) as search:
            fits = search.greedy()
            if not fits and schedule is None and (cuts := self.cuts(budget_bytes)):
                search.load(nearest(self.graph, self.costs, budget_bytes, cuts))
                fits = search.greedy()
            for hot, cold in _REACH_RUNS:
                left = deadline - time.perf_counter()
                if fits or left <= 0:
                    break
                fits = search.anneal(total // 4, hot, cold, left, until_it_fits=True)
            for kind, share, hot, cold in _RUNS:
                left = deadline - time.perf_counter()
                if not fits or left <= 0:
                    break
                if kind == "ruin":
                    search.ruin(int(share * total / _RUIN), hot, cold, left)
                else:
                    search.anneal(int(share * total), hot, cold, left, until_it_fits=False)
                search.return_to_best()
            best = search.best()
        return cuts if best is None else [*cuts, self._outer(best)]

    def fit(self, budget_bytes: int, schedule: Schedule, seconds: float, deadline: float) -> Schedule | None:
        """Any schedule within the budget."""
        if self.library is None:
            return next(iter(self.cuts_within(budget_bytes)), None)
        with _Search(self, budget_bytes, schedule) as search:
            if not search.greedy():
                left = deadline - time.perf_counter()
                search.anneal(self.iterations(seconds), 10.0, 0.1, max(left, 1e-3), until_it_fits=True)
            best = search.best()
        return None if best is None else self._outer(best)

    def cuts(self, budget_bytes: int) -> list[Schedule]:
        """Schedules from minimum cuts, around the budget."""
        from monetrun.solve import cut  # scipy takes long to import

        return cut.schedules(self.graph, self.costs, budget_bytes, self.options)

    def cuts_within(self, budget_bytes: int) -> list[Schedule]:
        """Of minimum cuts those within the budget, aimed at less where none is."""
        for share in (1.0, 0.9, 0.8, 0.6, 0.4):
            cuts = self.cuts(int(share * budget_bytes))
            if found := [s for s in cuts if simulate(self.graph, self.costs, s).peak_bytes <= budget_bytes]:
                return found
        return []

    def _outer(self, schedule: Schedule) -> Schedule:
        schedule = tidy.without_dead_runs(self.allowed, schedule)
        if self.allowed is self.graph:
            return schedule

        def outer(steps: tuple[Step, ...]) -> tuple[Step, ...]:
            return tuple(Step(s.operator, self.index[s.operator][s.implementation]) for s in steps)

        return Schedule(outer(schedule.forward), outer(schedule.backward))

    def inner(self, schedule: Schedule) -> list[tuple[int, int]]:
        """Operators and implementations of ``schedule`` as allowed, in-place variants as what they are variants of."""
        schedule = tidy.out_of_place(self.graph, schedule)
        steps = []
        for step in schedule.forward + schedule.backward:
            index = self.index[step.operator]
            steps.append((step.operator, index.index(step.implementation) if step.implementation in index else 0))
        return steps


def _restricted(graph: Graph, costs: Costs, options: Options) -> tuple[Graph, Costs, tuple[tuple[int, ...], ...]]:
    """The graph with what ``options`` forbids left out, and the original index of every implementation left."""

    def allowed(k: int, impl: Implementation) -> bool:
        return k == 0 or impl.allowed_by(options.implementations)

    index = tuple(tuple(k for k, impl in enumerate(op.implementations) if allowed(k, impl)) for op in graph.operators)
    whole = all(len(kept) == len(op.implementations) for kept, op in zip(index, graph.operators, strict=True))
    if options.recompute and whole:
        return graph, costs, index
    operators = tuple(
        dataclasses.replace(
            op,
            implementations=tuple(op.implementations[k] for k in kept),
            replayable=op.replayable and options.recompute,
        )
        for op, kept in zip(graph.operators, index, strict=True)
    )

    def pick(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(row[k] for k in kept) for row, kept in zip(table, index, strict=True))

    workspace = tuple(tuple(row[k] for k in kept) for row, kept in zip(costs.workspace_bytes, index, strict=True))
    return Graph(graph.name, graph.tensors, operators), Costs(costs.device, pick(costs.seconds), workspace), index


class _Search:
    """The native search of one budget; a context manager, since its memory is the native core's."""

    def __init__(self, view: _View, budget_bytes: int, schedule: Schedule) -> None:
        assert view.library is not None
        self._library = view.library
        self._flat = flatten(view.allowed, view.allowed_costs)
        self._graph = ctypes.byref(self._flat.struct)
        self._handle: int | None = self._library.monet_search_new(self._graph, view.options.seed)
        self._view = view
        self.load(schedule)
        self._library.monet_search_budget(self._handle, max(0, budget_bytes))

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.monet_search_free(self._handle)
        self._handle = None

    def load(self, schedule: Schedule) -> None:
        """Go on from ``schedule``."""
        schedule = tidy.with_first_runs(self._view.graph, schedule)
        steps = self._view.inner(schedule)
        operators, implementations = array("i", [o for o, _ in steps]), array("i", [k for _, k in steps])
        self._library.monet_search_load(
            self._handle,
            self._graph,
            len(schedule.forward),
            len(steps),
            operators.buffer_info()[0],
            implementations.buffer_info()[0],
        )

    def greedy(self, tries: int = _TRIES) -> bool:
        """Whether it fits, after at most so many evictions tried."""
        return bool(self._library.monet_search_greedy(self._handle, tries))

    def anneal(self, iterations: int, hot: float, cold: float, time_limit: float, *, until_it_fits: bool) -> bool:
        """Whether there is a schedule that fits."""
        self._library.monet_search_anneal(self._handle, iterations, hot, cold, time_limit, until_it_fits)
        return float(self._library.monet_search_best_seconds(self._handle)) < float("inf")

    def ruin(self, iterations: int, hot: float, cold: float, time_limit: float) -> None:
        self._library.monet_search_ruin(self._handle, iterations, hot, cold, time_limit)

    def return_to_best(self) -> None:
        self._library.monet_search_return_to_best(self._handle)

    def peak_bytes(self) -> int:
        return int(self._library.monet_search_peak(self._handle))

    def seconds(self) -> float:
        return float(self._library.monet_search_seconds(self._handle))

    def best(self) -> Schedule | None:
        return self.read(0)

    def read(self, which: int) -> Schedule | None:
        """The best that fits (0) or the current state (1)."""
        forward_steps = ctypes.c_int64()
        count = self._library.monet_search_read(
            self._handle, self._graph, which, 0, None, None, ctypes.byref(forward_steps)
        )
        if forward_steps.value < 0:
            return None
        operators, implementations = array("i", bytes(4 * count)), array("i", bytes(4 * count))
        self._library.monet_search_read(
            self._handle,
            self._graph,
            which,
            count,
            operators.buffer_info()[0],
            implementations.buffer_info()[0],
            ctypes.byref(forward_steps),
        )
        steps = tuple(Step(o, k) for o, k in zip(operators, implementations, strict=True))
        return Schedule(steps[: forward_steps.value], steps[forward_steps.value :])
