"""Windows: the paper's program with a few operators free and everything else as in a given schedule.

The rest of the schedule is a fixed profile of memory, so a window is small wherever it lies in a graph of thousands of
operators. It starts from the schedule that it comes from, and so never makes it worse.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from monetrun.core.graph import BACKWARD, FORWARD, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, each_once
from monetrun.core.simulate import simulate
from monetrun.solve import tidy
from monetrun.solve.ilp_program import build
from monetrun.solve.ilp_schedule import read_schedule, start_from
from monetrun.solve.incumbent import Incumbent
from monetrun.solve.slot import Slot, all_slots, allowed_choices

_SMALL = 25  # up to this many forward operators the paper's whole program is solved instead of windows

# the least work of a kind of search that finds nothing for long, as a share of the work of one that always succeeds
_LEAST_SUCCESS = 0.25
_BUILD_SECONDS = 0.02  # work booked for a window that is not solved


def repair(search: Incumbent, schedule: Schedule, work_seconds: float) -> None:
    """Bring a schedule within the budget by elastic windows around the steps that are most over it, and offer it."""
    graph, costs, options, budget_bytes = search.graph, search.costs, search.options, search.budget_bytes
    until = max(0.0, search.left() - work_seconds)
    rng = random.Random(options.seed)
    movable = _movable(graph, budget_bytes)
    length, failures = 12, 0
    schedule = tidy.without_dead_runs(graph, schedule)
    while failures < 8 and not search.done() and (left := search.left() - until) > 0:
        timeline = simulate(graph, costs, schedule)
        over = [max(0, b - budget_bytes) for b in timeline.during_bytes]
        if not any(over) or timeline.seconds >= search.seconds:
            break
        worst = rng.choice([i for i, b in enumerate(over) if b >= 0.5 * max(over)])
        whole = failures % 3 == 2
        free = set(movable) if whole else _around(graph, schedule, worst, movable, length, rng)
        slots = window_slots(graph, schedule, free, options, 2 + failures if whole else None)
        program = build(graph, costs, budget_bytes, slots, elastic=True)
        start = start_from(graph, program, schedule)
        result = search.minimize(program.problem, min(left, max(2.0, 0.3 * left) if whole else 2.0), 0.01, start)
        length = min(length + 1, 20) if result.status == "optimal" else max(length - 2, 6)
        failures += 1
        if result.value is None:
            continue
        candidate = tidy.without_dead_runs(graph, read_schedule(program, result.value))
        candidate = tidy.in_place_where_legal(graph, costs, candidate, options)
        during_bytes = simulate(graph, costs, candidate).during_bytes
        if sum(max(0, b - budget_bytes) for b in during_bytes) < sum(over):
            schedule, failures = candidate, 0
    search.offer(schedule)


def _around(
    graph: Graph, schedule: Schedule, step: int, movable: list[int], length: int, rng: random.Random
) -> set[int]:
    """Movable operators that matter at a step: they rerun beside it, or hold memory there, near it or anywhere."""
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


def improve(search: Incumbent) -> None:
    """Solve windows of some operators, or of all within a reach, until the gap is reached or the time is up."""
    graph, options = search.graph, search.options
    if not options.recompute:  # few variables, because nothing runs twice
        _improve_whole(search, search.left())
        return
    movable = _movable(graph, search.budget_bytes)
    if not movable or (graph.forward_count <= _SMALL and _improve_whole(search, 0.5 * search.left())):
        return
    rng = random.Random(options.seed)
    if search.best is None:
        base = search.most_frugal(min(2.0, max(0.01, 0.2 * search.left())), search.budget_bytes)
    else:
        base = search.best
    length, reach = 20, 2 if search.best is not None else 16
    native, programs, turn = _Effort(), _Effort(), 0
    while not search.done() and (search.best is not None or reach <= 2 * len(movable)):
        base = search.best or base
        before, work_seconds = search.seconds, search.work_seconds
        if search.best is not None and native.comes_before(programs):
            _improve_natively(search, base, native.turns)
            native.book(search.work_seconds - work_seconds, search.seconds < before)
            continue
        if search.best is None or (turn % 8 == 0 and reach <= 2 * len(movable)):
            share = 0.4 if search.best is None else 0.2
            status, _ = _improve_window(search, base, set(movable), max(1.0, share * search.left()), reach)
            if status == "optimal" and reach > len(movable):
                return  # no better schedule reruns operators right where their outputs are needed
            if status == "optimal" or search.best is None:
                reach *= 2  # it was solved quickly, or did not reach the budget
            elif search.seconds >= before:
                reach = max(2, reach // 2) if reach > 2 else 2 * len(movable) + 1  # too large: no more of these
        else:
            free = _choose(rng, movable, min(length, len(movable)))
            status, seconds = _improve_window(search, base, free, 3.0, None if turn % 2 else 6)
            # windows grow as long as they are solved quickly
            if status == "optimal" and seconds < 0.7:
                length = min(length + 2, len(movable))
            elif status != "optimal":
                length = max(length - 4, 6)
        turn += 1
        programs.book(search.work_seconds - work_seconds, search.seconds < before)


@dataclasses.dataclass
class _Effort:
    """How much of a kind of search was done, and how often it succeeded lately.

    Attributes:
        turns: how often it ran.
        work_seconds: its work.
        success: the share of runs that found a cheaper schedule, recent ones weighted most.
    """

    turns: int = 0
    work_seconds: float = 0.0
    success: float = 1.0

    def book(self, work_seconds: float, found: bool) -> None:
        self.turns += 1
        self.work_seconds += work_seconds
        self.success = max(_LEAST_SUCCESS, 0.7 * self.success + 0.3 * found)

    def comes_before(self, other: _Effort) -> bool:
        """Whether it did less work per success than ``other``."""
        return self.work_seconds * other.success <= other.work_seconds * self.success


def _improve_natively(search: Incumbent, base: Schedule, turn: int) -> None:
    """Make the changes that windows cannot: one run for many, everywhere at once.

    Starts in turn from minimum cuts with the best schedule's implementations, from the best schedule, and from scratch.
    The result of annealing varies with its random choices by percents of the overhead, so another draw is worth more
    than a longer one (swin_t at 0.4 of its activations, from scratch: 7.26 to 7.62% overhead).
    """
    start = (search.cut, lambda: base, lambda: None)[turn % 3]()
    search.improve_greedily(min(4.0, max(0.3, 0.2 * search.left())), start)


def _improve_whole(search: Incumbent, work_seconds: float) -> bool:
    """Solve the paper's whole program; return whether it was solved to the end."""
    slots = all_slots(search.graph, search.options)
    start = search.best or each_once(search.graph)
    return _improve_slots(search, slots, start, work_seconds)[0] in ("optimal", "infeasible")


def _movable(graph: Graph, budget_bytes: int) -> list[int]:
    """The forward operators that need not run where they do, and whose outputs take bytes that matter."""
    return [
        op.id
        for op in graph.operators[: graph.forward_count]
        if (op.replayable or op.optional) and any(graph.tensors[t].nbytes > 1e-5 * budget_bytes for t in op.outputs)
    ]


def _choose(rng: random.Random, movable: list[int], length: int) -> set[int]:
    """One to three groups of neighbouring operators: bytes freed in one place may be worth more in another."""
    groups = rng.choice((1, 1, 2, 3))
    free: set[int] = set()
    for _ in range(groups):
        size = max(1, length // groups)
        begin = rng.randrange(-(size // 2), len(movable))
        free.update(movable[max(begin, 0) : max(begin, 0) + size])
    return free


def _improve_window(
    search: Incumbent, base: Schedule, free: set[int], work_seconds: float, reach: int | None
) -> tuple[str, float]:
    """Solve the window of ``base`` in which the operators ``free`` may rerun; return the solver's status and work."""
    slots = window_slots(search.graph, base, free, search.options, reach)
    return _improve_slots(search, slots, base, work_seconds)


def _improve_slots(search: Incumbent, slots: list[Slot], base: Schedule, work_seconds: float) -> tuple[str, float]:
    program = build(search.graph, search.costs, search.budget_bytes, slots)
    if program.infeasible:
        search.work_seconds += _BUILD_SECONDS
        return "infeasible", _BUILD_SECONDS
    start = start_from(search.graph, program, base)
    result = search.minimize(program.problem, work_seconds, search.mip_gap() / 4, start)
    if result.value is not None:
        search.offer(read_schedule(program, result.value))
    return result.status, result.work_seconds


def window_slots(
    graph: Graph, schedule: Schedule, free: set[int], options: Options, reach: int | None = None
) -> list[Slot]:
    """The slots of a window: ``schedule``'s own steps, and runs of the operators ``free``.

    A free operator may run before each step that reads what it, or another free one, reads or writes; elsewhere a run
    gains nothing. With ``reach`` it may only run where it runs now, and where the output of one of the next ``reach``
    free operators is read, which keeps a window over the whole network small. Steps that only serve runs of free
    operators become free as well.
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
    again = sorted(i for i in free if operators[i].replayable and options.recompute)

    def choices(operator: int, implementation: int) -> tuple[int, ...]:
        allowed = allowed_choices(graph, operator, options)
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
            slots.append(Slot(op.id, allowed_choices(graph, op.id, options), False, FORWARD))
    place = {i: n for n, i in enumerate(again)}
    running: list[int] = []
    runs = {s.operator for s in schedule.backward}
    missing = [op.id for op in reversed(operators[graph.forward_count :]) if op.id not in runs]
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
        # present runs keep their order: where that is not the graph's, some operators get several slots
        cuts = [n for n in range(1, len(running)) if running[n] <= running[n - 1]]
        for begin, end in itertools.pairwise([0, *cuts, len(running)]):
            group = sorted({*running[begin:end], *(here if begin == 0 else ())})
            slots += [Slot(i, allowed_choices(graph, i, options), False, BACKWARD) for i in group]
        while missing and graph.forward_count <= missing[-1] < step.operator:
            left_out = missing.pop()
            slots.append(Slot(left_out, allowed_choices(graph, left_out, options), False, BACKWARD))
        slots.append(Slot(step.operator, options_here, not operators[step.operator].optional, BACKWARD))
        running = []
    return slots
