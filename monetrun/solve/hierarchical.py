"""The default solver: whole-network programs over blocks, then exact windows, from a greedy schedule on.

1. *Greedy* (``monetrun.solve.greedy``) gives a schedule at once.
2. *Blocks.* The backward pass is cut at points into blocks. Within a block runs have no order and memory is looked at
   only at its ends (``monetrun.solve.bound``): an integer program of a whole network is then solved in seconds. Its
   optimum bounds every schedule. Written down as a schedule and replayed, it tells where memory was looked at too
   seldom; there the next program has a point more, or, where recomputation itself needs room, a *margin*. Whenever
   such a schedule fits the budget it is a candidate, and it is a cheapest one when no margin was needed.
3. *Windows.* The paper's program (``monetrun.solve.ilp``) with a few neighbouring operators free and all else as in the
   best schedule, on a fixed profile of memory, started from that schedule; windows lie anywhere, across blocks.

Blocks need no narrow points: what passes by a block is one tensor more that is alive at its ends.

Anytime: after the first step the best schedule so far is always there, and Ctrl-C returns it. All choices follow from
the inputs and ``options.seed``; what the time limits cut off may differ from run to run, so that the same plan is
certain only where the gap, not the time, ends the search.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time

from monetrun.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.plan import Options, Schedule, Solution, plain_schedule
from monetrun.simulate import Timeline, simulate
from monetrun.solve import bound, greedy, ilp, mip, tidy
from monetrun.solve.ilp import Slot


class _Search:
    """The best schedule and the best bound so far, and the time left."""

    def __init__(self, graph: Graph, costs: Costs, budget_bytes: int, options: Options, progress: mip.Progress | None):
        self.graph, self.costs, self.budget_bytes, self.options = graph, costs, budget_bytes, options
        self.progress = progress
        self.began = time.monotonic()
        self.best: Schedule | None = None
        self.seconds = math.inf
        self.bound_seconds = bound.floor_seconds(graph, costs, options)
        self.interrupted = False
        self.relaxed: Schedule | None = None  # the last program over blocks said this; it may be over the budget

    def left(self) -> float:
        """Seconds until the time limit."""
        return self.options.seconds - (time.monotonic() - self.began)

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
        """Call ``progress``."""
        if self.progress is not None:
            self.progress(self.seconds, self.bound_seconds)

    def done(self) -> bool:
        """Whether to stop: good enough, no time left, interrupted, or proven to be infeasible."""
        close = self.seconds <= self.bound_seconds * (1 + self.options.gap)
        return close or self.left() <= 0 or self.interrupted or math.isinf(self.bound_seconds)

    def mip_gap(self) -> float:
        """The gap, relative to a program's own objective, that is a quarter of the gap asked for."""
        known = self.bound_seconds if math.isinf(self.seconds) else self.seconds
        floor = bound.floor_seconds(self.graph, self.costs, self.options)
        return min(0.5, 0.25 * self.options.gap * floor / max(known - floor, 0.01 * floor))


def solve(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    options: Options,
    progress: mip.Progress | None = None,
) -> Solution:
    """A cheap schedule within the budget and a bound on all of them, for graphs of thousands of operators.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: what the schedule may have allocated at most.
        options: all are heeded.
        progress: called with (seconds of the best schedule or infinity, bound in seconds) when either improves.

    Returns:
        ``"optimal"``: within ``options.gap`` of the bound. ``"feasible"``: the time was up, or Ctrl-C was pressed.
        ``"infeasible"``: no schedule fits, by the bound. ``"unknown"``: none was found.
    """
    search = _Search(graph, costs, budget_bytes, options, progress)
    try:
        search.offer(plain_schedule(graph))
        _search_greedily(search, min(0.5, 0.05 * options.seconds))
        _search_blocks(search)
        _search_greedily(search, min(15.0, 0.2 * options.seconds))
        if search.best is None and search.relaxed is not None:
            _repair(search, search.relaxed, 0.2 * search.left())
        _search_windows(search)
    except KeyboardInterrupt:
        search.interrupted = True
    if search.best is None:
        status = "infeasible" if math.isinf(search.bound_seconds) else "unknown"
    else:
        status = "optimal" if search.seconds <= search.bound_seconds * (1 + options.gap) else "feasible"
    return Solution(search.best, search.bound_seconds, status, "hierarchical", time.monotonic() - search.began)


def _search_greedily(search: _Search, seconds: float) -> None:
    """Offer what the greedy solver finds."""
    if search.done() or not search.options.recompute:
        return
    options = dataclasses.replace(search.options, seconds=min(seconds, search.left()))
    schedule = greedy.solve(search.graph, search.costs, search.budget_bytes, options).schedule
    if schedule is not None:
        search.offer(schedule)


def _search_blocks(search: _Search) -> None:
    """Solve programs over blocks, first for the bound, then, with room for what they do not see, for schedules."""
    graph, costs, options, budget_bytes = search.graph, search.costs, search.options, search.budget_bytes
    points = bound.first_points(graph, 8)
    local: set[int] = set()
    margins: dict[int, int] | None = None
    slice_seconds = max(1.0, 0.15 * options.seconds)
    fruitless = 0
    while not search.done() and fruitless < 4 and search.left() > 0.5 * options.seconds:
        relaxation = bound.relax(graph, costs, budget_bytes, points, options, local, margins)
        result = _minimize(search, relaxation, slice_seconds)
        if margins is None:
            if result is None:
                search.raise_bound(math.inf)
                return
            search.raise_bound(bound.bound_of(relaxation, result))
        before = search.seconds
        over = [] if result is None else _offer_relaxed(search, relaxation, result)
        if not over and margins is None and result is not None and result.status == "optimal":
            return
        seen = {e.run for e in over if e.run >= 0} <= local and {e.point for e in over} <= set(points)
        points = tuple(sorted({*points, *(e.point for e in over)}))
        local |= {e.run for e in over if e.run >= 0}
        if margins is None:
            if result is None or result.status != "optimal" or seen:
                margins = {}
        elif result is None or result.value is None:
            margins = {point: margin // 2 for point, margin in margins.items()}
            fruitless += 1
        else:
            fruitless += search.seconds >= before and seen
            for e in over:
                if seen:
                    margins[e.point] = margins.get(e.point, 0) + e.nbytes
            if not over:
                return
        if over and search.relaxed is not None and margins is not None:
            _repair(search, search.relaxed, slice_seconds / 2)


def _minimize(search: _Search, relaxation: bound.Relaxation, seconds: float) -> mip.Result | None:
    """Solve a program over blocks; None where it is infeasible."""
    if relaxation.infeasible:
        return None
    limits = mip.Limits(min(seconds, max(search.left(), 0.01)), search.mip_gap(), seed=search.options.seed)
    start = None if search.best is None else bound.start_from(search.graph, relaxation, search.best)
    result = mip.minimize(relaxation.problem, search.options.mip_solver, limits, start)
    search.interrupted |= result.interrupted
    return None if result.status == "infeasible" else result


def _offer_relaxed(search: _Search, relaxation: bound.Relaxation, result: mip.Result) -> list[bound.Excess]:
    """Offer a solution as a schedule, and say where that is over the budget."""
    if result.value is None:
        return []
    schedule = bound.relaxed_schedule(search.graph, relaxation, result.value)
    if schedule is None:
        return []
    search.offer(schedule)
    search.relaxed = tidy.in_place_where_legal(search.graph, search.costs, schedule, search.options)
    return bound.find_excess(search.graph, search.costs, search.budget_bytes, search.relaxed, relaxation.points)


def _repair(search: _Search, schedule: Schedule, seconds: float) -> None:
    """Bring a schedule within the budget by elastic windows around the steps that are most over it, and offer it."""
    graph, costs, options, budget_bytes = search.graph, search.costs, search.options, search.budget_bytes
    until = time.monotonic() + min(seconds, search.left())
    rng = random.Random(options.seed)
    movable = _movable(graph, budget_bytes)
    length, failures = 12, 0
    schedule = tidy.without_dead_runs(graph, schedule)
    while failures < 8 and not search.interrupted and (left := until - time.monotonic()) > 0:
        timeline = simulate(graph, costs, schedule)
        over = [max(0, b - budget_bytes) for b in timeline.during_bytes]
        if not any(over) or timeline.seconds >= search.seconds:
            break
        worst = rng.choice([i for i, b in enumerate(over) if b >= 0.5 * max(over)])
        whole = failures % 3 == 2
        free = set(movable) if whole else _around(graph, schedule, worst, movable, length, rng)
        slots = window_slots(graph, schedule, free, options, 2 + failures if whole else None)
        program = ilp.build(graph, costs, budget_bytes, slots, elastic=True)
        start = ilp.start_from(graph, program, schedule)
        limits = mip.Limits(min(left, max(2.0, 0.3 * left) if whole else 2.0), 0.01, seed=options.seed)
        result = mip.minimize(program.problem, options.mip_solver, limits, start)
        search.interrupted |= result.interrupted
        length = min(length + 1, 20) if result.status == "optimal" else max(length - 2, 6)
        failures += 1
        if result.value is None:
            continue
        candidate = tidy.without_dead_runs(graph, ilp.read_schedule(program, result.value))
        candidate = tidy.in_place_where_legal(graph, costs, candidate, options)
        during_bytes = simulate(graph, costs, candidate).during_bytes
        if sum(max(0, b - budget_bytes) for b in during_bytes) < sum(over):
            schedule, failures = candidate, 0
    search.offer(schedule)


def _around(
    graph: Graph, schedule: Schedule, step: int, movable: list[int], length: int, rng: random.Random
) -> set[int]:
    """Movable operators that matter at a step: run again beside it, or holding memory there, near and anywhere."""
    steps = schedule.forward + schedule.backward
    begin = end = step
    while begin > 0 and graph.operators[steps[begin - 1].operator].phase == FORWARD and begin > len(schedule.forward):
        begin -= 1
    while end + 1 < len(steps) and graph.operators[steps[end].operator].phase == FORWARD:
        end += 1
    beside = [s.operator for s in steps[begin : end + 1] if s.operator < graph.forward_count]
    read = [t for s in steps[begin : end + 1] for t in graph.operators[s.operator].inputs]
    beside += [graph.writer[t] for t in read if 0 <= graph.writer[t] < graph.forward_count]
    center = sum(beside) / len(beside) if beside else steps[step].operator
    written = {t for s in steps[: step + 1] for t in graph.operators[s.operator].outputs}
    alive: set[int] = set()
    for s in reversed(steps[step:]):
        op = graph.operators[s.operator]
        alive.difference_update(op.outputs)
        alive.update(op.implementations[s.implementation].inputs)
    holding = {graph.writer[t] for t in alive & written}
    ranked = sorted((i for i in movable if i in holding or i in beside), key=lambda i: (abs(i - center), i))
    near, far = ranked[: length // 2], ranked[length // 2 :]
    between = sorted((i for i in movable if i not in ranked), key=lambda i: (abs(i - center), i))[: length // 3]
    return {*near, *rng.sample(far, min(len(far), length // 2)), *between}


def _search_windows(search: _Search) -> None:
    """Free some operators at a time, or all within a reach, until the gap is reached or the time is up."""
    graph, options = search.graph, search.options
    movable = _movable(graph, search.budget_bytes)
    if not movable or not options.recompute:
        return
    rng = random.Random(options.seed)
    length, reach = 20, 2 if search.best is not None else 16
    for turn in itertools.count():
        if search.done() or (search.best is None and reach > 2 * len(movable)):
            return
        if search.best is None or (turn % 8 == 0 and reach <= 2 * len(movable)):
            before = search.seconds
            status = _improve_window(search, set(movable), max(1.0, 0.4 * search.left()), reach)
            if status == "optimal" and reach > len(movable):
                return  # nothing better exists with runs where what they serve is read
            if status == "optimal":
                reach *= 2
            elif search.best is None:
                reach = 2 * reach  # more freedom, since this was not enough
            elif search.seconds >= before:
                reach = max(2, reach // 2) if reach > 2 else 2 * len(movable) + 1  # too large: leave it
            continue
        began = time.monotonic()
        free = _choose(rng, movable, min(length, len(movable)))
        status = _improve_window(search, free, min(3.0, search.left()), None if turn % 2 else 6)
        # windows grow as long as they are solved quickly
        if status == "optimal" and time.monotonic() - began < 0.7:
            length = min(length + 2, len(movable))
        elif status != "optimal":
            length = max(length - 4, 6)


def _movable(graph: Graph, budget_bytes: int) -> list[int]:
    """The forward operators that may run again, and whose outputs take bytes that matter."""
    return [
        op.id
        for op in graph.operators[: graph.forward_count]
        if op.replayable and any(graph.tensors[t].nbytes > 1e-5 * budget_bytes for t in op.outputs)
    ]


def _choose(rng: random.Random, movable: list[int], length: int) -> set[int]:
    """Neighbours, or two groups of neighbours: bytes that one place gives up may be worth more at another."""
    groups = rng.choice((1, 1, 2, 3))
    free: set[int] = set()
    for _ in range(groups):
        size = max(1, length // groups)
        begin = rng.randrange(-(size // 2), len(movable))
        free.update(movable[max(begin, 0) : max(begin, 0) + size])
    return free


def _improve_window(search: _Search, free: set[int], seconds: float, reach: int | None) -> str:
    """Solve the window of the best schedule in which the operators ``free`` may run again; the solver's status.

    Without a schedule within the budget the window is one of the most frugal schedule that is known.
    """
    base = search.best or greedy.most_frugal(search.graph, search.costs)
    slots = window_slots(search.graph, base, free, search.options, reach)
    program = ilp.build(search.graph, search.costs, search.budget_bytes, slots)
    if program.infeasible:
        return "infeasible"
    start = ilp.start_from(search.graph, program, base)
    limits = mip.Limits(seconds, search.mip_gap() / 4, seed=search.options.seed)
    result = mip.minimize(program.problem, search.options.mip_solver, limits, start)
    search.interrupted |= result.interrupted
    if result.value is not None:
        search.offer(ilp.read_schedule(program, result.value))
    return result.status


def window_slots(
    graph: Graph, schedule: Schedule, free: set[int], options: Options, reach: int | None = None
) -> list[Slot]:
    """The slots of a window: ``schedule``'s own steps, and beside them runs of the operators ``free``.

    A free operator may run before each step that reads what it, or another free one, reads or writes: elsewhere
    nothing changes for it. With ``reach`` it may only do so where it runs now, and where the output of one of the next
    ``reach`` free operators is read: enough for a window over the whole network. Steps that only served runs of free
    operators are freed as well.
    """
    operators = graph.operators
    free = set(free)
    while True:
        rest = tuple(s for s in schedule.backward if s.operator not in free)
        alive = set(tidy.without_dead_runs(graph, Schedule(schedule.forward, rest)).backward)
        dead = {s.operator for s in rest if s not in alive}
        if not dead - free:
            break
        free |= dead
    touched = {t for i in free for t in operators[i].outputs}
    touched |= {t for i in free for impl in operators[i].implementations for t in impl.inputs}
    touched = {t for t in touched if not graph.tensors[t].external}
    again = sorted(i for i in free if operators[i].replayable)

    def choices(operator: int, implementation: int) -> tuple[int, ...]:
        allowed = ilp.allowed_choices(graph, operator, options)
        reads = {t for k in allowed for t in operators[operator].implementations[k].inputs}
        if operator in free or not touched.isdisjoint(reads):
            return allowed
        return (implementation,)

    slots: list[Slot] = []
    ran = {s.operator: s.implementation for s in schedule.forward}
    for op in operators[: graph.forward_count]:
        if op.id in ran:
            compulsory = not (op.optional and op.id in free)
            slots.append(Slot(op.id, choices(op.id, ran[op.id]), compulsory, FORWARD))
        elif op.optional and op.id in free:
            slots.append(Slot(op.id, ilp.allowed_choices(graph, op.id, options), False, FORWARD))
    place = {i: n for n, i in enumerate(again)}
    running: list[int] = []
    for step in schedule.backward:
        if step.operator in free:
            running.append(step.operator)
            continue
        options_here = choices(step.operator, step.implementation)
        reads = {t for k in options_here for t in operators[step.operator].implementations[k].inputs}
        here: set[int] = set()
        if reach is not None:
            near = [place[graph.writer[t]] for t in reads if graph.writer[t] in place]
            here = here.union(*(again[max(0, n - reach) : n + 1] for n in near))
        elif running or not touched.isdisjoint(reads):
            here = set(again)
        # what runs here now gets slots in its own order: where that is not the graph's, some operators get several
        cuts = [n for n in range(1, len(running)) if running[n] <= running[n - 1]]
        for begin, end in itertools.pairwise([0, *cuts, len(running)]):
            group = sorted({*running[begin:end], *(here if begin == 0 else ())})
            slots += [Slot(i, ilp.allowed_choices(graph, i, options), False, BACKWARD) for i in group]
        slots.append(Slot(step.operator, options_here, True, BACKWARD))
        running = []
    return slots
