"""The conductor: from a recorded training step and a budget to the plan of all its graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from monetrun import solve
from monetrun.core.budget import format_budget, format_bytes
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, ScheduleError
from monetrun.core.graph import EXACT, FORWARD, KINDS, Costs, Graph, dominated, without
from monetrun.core.options import Options
from monetrun.core.plan import GraphPlan, Plan, Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, RoundGraph, StepRecord, StepTimeline, replay, round_graph
from monetrun.planning.apart import ApartRound
from monetrun.solve import greedy
from monetrun.solve.tidy import in_place_where_legal

Progress = Callable[[float, float, float], None]

# The share of the step's time that other bits than eager's have to save.
ROUNDING_SAVES = 0.05


@dataclass(frozen=True)
class Baseline:
    """What is known of a step before any budget: the plain step, and the most frugal one.

    The plain step's bytes are those of every operator with its default implementation; its seconds are less where
    running in place is faster, since the script may do that itself: what a plan adds is added to the faster of the two.

    Attributes:
        plain: the plain step.
        frugal: the step with the least peak that is known to be possible.
        fast_schedules: the plain step in place wherever an operand dies, which is never slower.
        frugal_schedules: of ``frugal``.
        rounds: of the record's rounds, each as one graph where it joins.
        searched: the record without implementations that no schedule needs.
    """

    plain: StepTimeline
    frugal: StepTimeline
    fast_schedules: tuple[Schedule, ...]
    frugal_schedules: tuple[Schedule, ...]
    rounds: tuple[RoundGraph | ApartRound, ...]
    searched: StepRecord


def plain_in_place(record: StepRecord, options: Options | None = None) -> tuple[Schedule, ...]:
    """The plain step in place wherever an operand dies (and ``options`` allow it): never slower."""
    pairs = zip(record.graphs, record.costs, strict=True)
    return tuple(in_place_where_legal(g, c, plain_schedule(g), options or Options()) for g, c in pairs)


def _without_dominated(record: StepRecord) -> StepRecord:
    """The record, in whose graphs implementations that no schedule needs are not usable: less to search."""
    pairs = zip(record.graphs, record.costs, strict=True)
    return replace(record, graphs=tuple(without(g, dominated(g, c)) for g, c in pairs))


def baseline(record: StepRecord, frugal: Sequence[Schedule] | None = None) -> Baseline:
    """Replay the step plainly, and with the least memory that is known to be possible.

    Args:
        record: of the step.
        frugal: the most frugal schedules that are known; None: they are looked for.
    """
    record = _without_dominated(record)
    plain = replay(record, [plain_schedule(g) for g in record.graphs])
    fast = plain_in_place(record)
    rounds = tuple(round_graph(record, bounds) or ApartRound(record, bounds, fast) for bounds in record.rounds)
    pairs = zip(record.graphs, record.costs, strict=True)
    known = tuple(greedy.most_frugal(g, c) for g, c in pairs) if frugal is None else tuple(frugal)
    fastest = replace(plain, seconds=replay(record, fast).seconds)
    base = Baseline(fastest, replay(record, known), fast, known, rounds, record)
    if frugal is None:
        # the least peak of a graph alone need not give that of the step: what it saves counts for the others
        for joined in rounds:
            if isinstance(joined, ApartRound):
                base = _with_lower(record, base, joined.thrifty)
            else:
                base = _with_lower(record, base, joined.split(greedy.most_frugal(joined.graph, joined.costs)))
    return base


def more_frugal(record: StepRecord, base: Baseline, options: Options) -> Baseline:
    """The baseline with a most frugal step that was looked for longer, before a budget is refused.

    Takes at most about ``options.seconds``.
    """
    from monetrun.solve.least import least_budget  # cvxpy takes long to import, and most budgets are feasible

    share = replace(options, seconds=options.seconds / max(1, len(base.rounds)), on_progress=None)
    for joined in base.rounds:
        if isinstance(joined, ApartRound):
            base = _with_lower(record, base, joined.least(base.frugal_schedules, share.seconds))
        else:
            base = _with_lower(record, base, joined.split(least_budget(joined.graph, joined.costs, share).schedule))
    return base


def _with_lower(record: StepRecord, base: Baseline, parts: Mapping[int, Schedule]) -> Baseline:
    """The baseline with ``parts`` (schedules by graph) in its most frugal step, where they lower its peak."""
    frugal = tuple(parts.get(k, s) for k, s in enumerate(base.frugal_schedules))
    timeline = replay(record, frugal)
    if timeline.peak_bytes >= base.frugal.peak_bytes:
        return base
    return replace(base, frugal=timeline, frugal_schedules=frugal)


def plan_step(
    record: StepRecord,
    budget_bytes: int,
    algorithm: str = "hierarchical",
    options: Options | None = None,
    known: Baseline | None = None,
    starts: Sequence[Sequence[Schedule]] = (),
) -> Plan:
    """Find the cheapest schedules under which no moment of the step holds more than ``budget_bytes``.

    Args:
        record: from a trial run.
        budget_bytes: of the whole step on one device.
        algorithm: a name that ``solve.solver`` knows.
        options: for the solver; its ``seconds`` are shared by the rounds that need solving, and its ``on_progress`` is
            told the seconds of the whole step.
        known: the record's baseline, when the caller has it already.
        starts: schedules of all graphs to begin with, for the solvers that use them; those over the budget are
            harmless.

    Raises:
        InfeasibleBudget: less than the smallest budget known to be feasible; names it and the operator that sets it.
        NoPlanInTime: the solver found nothing within the budget in its time.
    """
    options = options or Options()
    base = known or baseline(record)
    if base.frugal.peak_bytes > budget_bytes:
        base = more_frugal(record, base, options)
    if base.frugal.peak_bytes > budget_bytes:
        raise infeasible(record, budget_bytes, base)

    def solved(options: Options) -> _Found:
        return _solve(record, budget_bytes, algorithm, options, base, starts)

    may_round = any(_may_round(g, options) for g in base.searched.graphs)
    found = _with_eagers_bits(record, budget_bytes, options, solved) if may_round else solved(options)
    timeline = replay(record, found.schedules)
    if timeline.peak_bytes > budget_bytes or not _permitted(record, found.schedules, options):
        raise NoPlanInTime(
            f"{algorithm} has no plan within {format_bytes(budget_bytes)} after {options.seconds:g} s"
            f"{'' if options.recompute else ', without recomputation'}"
            f"{'' if options.implementations is None else ', with part of the implementations'}",
            "give it more time (--solver-seconds), more memory, or --algorithm hierarchical",
        )
    plain_seconds = base.plain.seconds
    overhead = timeline.seconds / plain_seconds - 1.0 if plain_seconds else 0.0
    return Plan(
        graphs=tuple(
            GraphPlan(g.fingerprint, g.structural_fingerprint, s)
            for g, s in zip(record.graphs, found.schedules, strict=True)
        ),
        budget_bytes=budget_bytes,
        plain_peak_bytes=base.plain.peak_bytes,
        planned_peak_bytes=timeline.peak_bytes,
        overhead=overhead,
        bound=min(overhead, found.bound_seconds / plain_seconds - 1.0) if plain_seconds else 0.0,
        status=found.status,
        solver=algorithm,
        device=record.device,
        torch_version=record.torch_version,
        ledger=ledger(record, timeline.peak_bytes),
    )


def _may_round(graph: Graph, options: Options) -> bool:
    """Whether the options allow an implementation with other bits than eager's."""
    implementations = (i for op in graph.operators for i in op.implementations)
    return any(not i.exact and i.allowed_by(options.implementations) for i in implementations)


def _permitted(record: StepRecord, schedules: Sequence[Schedule], options: Options) -> bool:
    """Whether schedules keep to what the options allow of recomputation and of implementations."""
    for graph, schedule in zip(record.graphs, schedules, strict=True):
        if not options.recompute and any(s.operator < graph.forward_count for s in schedule.backward):
            return False
        for step in (*schedule.forward, *schedule.backward):
            implementation = graph.operators[step.operator].implementations[step.implementation]
            if not implementation.allowed_by(options.implementations):
                return False
    return True


def infeasible(record: StepRecord, budget_bytes: int, base: Baseline) -> InfeasibleBudget:
    """The error that names the smallest feasible budget, and what sets it."""
    smallest = base.frugal.peak_bytes
    return InfeasibleBudget(
        f"budget {format_bytes(budget_bytes)} < smallest feasible {format_bytes(smallest, exact=True)}\n"
        f"  floor: {base.frugal.peak_name}",
        f"fits: --budget {format_budget(smallest)} (the plain step takes {format_bytes(base.plain.peak_bytes)})",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        plain_bytes=base.plain.peak_bytes,
        operator=base.frugal.peak_name,
        schedules=base.frugal_schedules,
    )


def ledger(record: StepRecord, peak_bytes: int) -> dict[str, int]:
    """What the peak consists of, adding up to it; what is not named is the graphs' own."""
    rows = {name: nbytes for name, nbytes in record.ledger.items() if nbytes > 0}
    rest = peak_bytes - sum(rows.values())
    return {**rows, "activations and workspace": max(0, rest)}


@dataclass(frozen=True)
class _Found:
    schedules: tuple[Schedule, ...]
    bound_seconds: float
    status: str


def _with_eagers_bits(
    record: StepRecord, budget_bytes: int, options: Options, solved: Callable[[Options], _Found]
) -> _Found:
    """What is ``solved``; where implementations with other bits save no more than ``ROUNDING_SAVES``, without them."""
    kinds = KINDS if options.implementations is None else options.implementations
    half = replace(options, seconds=options.seconds / 2)
    exact = replace(half, implementations=(*kinds, EXACT), on_progress=None)
    found = solved(half)
    if _permitted(record, found.schedules, exact):
        return found
    other = solved(exact)
    timeline, seconds = replay(record, other.schedules), replay(record, found.schedules).seconds
    if timeline.peak_bytes > budget_bytes or not _permitted(record, other.schedules, exact):
        return found
    if timeline.seconds > seconds * (1 + ROUNDING_SAVES):
        return found
    proven = timeline.seconds <= found.bound_seconds * (1 + options.gap)
    return replace(found, schedules=other.schedules, status=found.status if proven else "feasible")


def _solve(
    record: StepRecord,
    budget_bytes: int,
    algorithm: str,
    options: Options,
    base: Baseline,
    starts: Sequence[Sequence[Schedule]],
) -> _Found:
    solver = solve.solver(algorithm)
    known: list[Sequence[Schedule]] = []
    if solve.ALGORITHMS[algorithm].uses_starts:
        known = [s for s in (base.frugal_schedules, *starts) if _permitted(base.searched, s, options)]
    schedules, fast = plain_in_place(record, options), base.fast_schedules
    # seconds that the graphs of a round cost more, at least: less where other implementations are faster
    added: dict[tuple[int, ...], float] = {}
    status = "optimal"
    pairs = zip(record.rounds, base.rounds, strict=True)
    tight = [(b, joined) for b, joined in pairs if _peak_in(record, schedules, b) > budget_bytes]
    # the round that needs most first: the schedules it is given then hold in most others too
    tight.sort(key=lambda pair: -_peak_in(record, base.frugal_schedules, pair[0]))
    for bounds, joined in tight:
        if _peak_in(record, schedules, bounds) <= budget_bytes:
            continue
        share = replace(options, seconds=options.seconds / len(tight), on_progress=None)
        if isinstance(joined, ApartRound):
            apart = joined.solve(schedules, budget_bytes, solver, share)
            schedules = tuple(apart.get(k, s) for k, s in enumerate(schedules))
            status = "feasible" if apart else "unknown"
            continue
        timeline = replay(record, schedules)
        graphs, calls = _members(record, bounds)
        plain = sum(simulate(record.graphs[k], record.costs[k], fast[k]).seconds for k in graphs)
        now = sum(simulate(record.graphs[k], record.costs[k], schedules[k]).seconds for k in graphs)
        share = replace(share, on_progress=_of_the_step(options.on_progress, timeline.seconds - calls * now, calls))
        free_bytes = budget_bytes - timeline.start_bytes[bounds[0]]
        solution = solver(joined.graph, joined.costs, free_bytes, share, [joined.join(s) for s in known])
        if solution.schedule is None:
            status = "unknown"
            continue
        parts = joined.split(solution.schedule)
        schedules = tuple(parts.get(k, s) for k, s in enumerate(schedules))
        more = calls * (solution.bound_seconds - plain)
        added[graphs] = max(added.get(graphs, more), more)
        status = solution.status if status == "optimal" else status
    if replay(record, schedules).peak_bytes > budget_bytes:
        schedules, status = base.frugal_schedules, "feasible"
    return _Found(schedules, base.plain.seconds + _disjoint_sum(added), status)


def _disjoint_sum(added: dict[tuple[int, ...], float]) -> float:
    """The largest values whose keys have no graph in common, added up: what rounds share they cost only once."""
    total, counted = 0.0, set[int]()
    for graphs, seconds in sorted(added.items(), key=lambda item: (-item[1], item[0])):
        if counted.isdisjoint(graphs):
            total += seconds
            counted.update(graphs)
    return total


def _members(record: StepRecord, bounds: tuple[int, int]) -> tuple[tuple[int, ...], int]:
    """The graphs of a round, and how often a step calls each of them (1 where that differs)."""
    graphs = tuple(sorted({e.graph for e in record.events[slice(*bounds)] if e.kind != OUTSIDE}))
    calls = {sum(e.kind == FORWARD and e.graph == k for e in record.events) for k in graphs}
    return graphs, calls.pop() if len(calls) == 1 else 1


def _of_the_step(tell: Progress | None, rest_seconds: float, calls: int) -> Progress | None:
    """``tell`` for a solver of one round: the step has ``calls`` such rounds and ``rest_seconds`` of others."""
    if tell is None:
        return None
    return lambda seconds, best, bound: tell(seconds, rest_seconds + calls * best, rest_seconds + calls * bound)


def _peak_in(record: StepRecord, schedules: Sequence[Schedule], bounds: tuple[int, int]) -> int:
    """The peak within one round."""
    cut = replace(record, events=record.events[: bounds[1]])
    timeline = replay(cut, schedules)
    own = replace(record, events=record.events[slice(*bounds)], base_bytes=timeline.start_bytes[bounds[0]])
    return replay(own, schedules).peak_bytes


def carry_over(plan_schedule: Schedule, graph: Graph, costs: Costs, budget_bytes: int) -> Schedule | None:
    """The same steps for the same model at other shapes, if ``simulate`` accepts them there and they fit.

    Steps that the other shapes or the weights do not allow there are dropped to the default.
    """

    def fitted(step: Step) -> Step:
        known = graph.operators[step.operator].implementations
        allowed = step.implementation < len(known) and known[step.implementation].usable
        return step if allowed else Step(step.operator)

    schedule = Schedule(
        tuple(fitted(s) for s in plan_schedule.forward), tuple(fitted(s) for s in plan_schedule.backward)
    )
    try:
        peak = simulate(graph, costs, schedule).peak_bytes
    except ScheduleError:
        return None
    return schedule if peak <= budget_bytes else None
