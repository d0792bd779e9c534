"""From a recorded training step and a budget to the plan of all its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from monetrun import solve
from monetrun.core.budget import format_budget, format_bytes, format_share
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.keeping import choice_of
from monetrun.core.options import Options
from monetrun.core.plan import GraphPlan, Plan, Pool, Schedule, StepSchedules, each_once
from monetrun.core.reserved import Reserved, reserved
from monetrun.core.step import StepRecord, replay
from monetrun.planning import device_budget, placement, shared_graphs
from monetrun.planning.baseline import Baseline as Baseline
from monetrun.planning.baseline import baseline as baseline
from monetrun.planning.baseline import lowered
from monetrun.planning.baseline import more_frugal as more_frugal
from monetrun.planning.baseline import plain_in_place as plain_in_place
from monetrun.planning.device_budget import Found, plain_allocated_bytes, plain_reserved_bytes
from monetrun.planning.ledger import FRAGMENTATION, ledger, ledger_line
from monetrun.planning.round_bounds import calls_in_step, disjoint_sum, least_more, seconds_of
from monetrun.planning.separate_graphs import SeparateRound
from monetrun.planning.two_searches import allowed, exact_where_nearly_as_fast, offers_inexact
from monetrun.solve import timing

Progress = Callable[[float, float, float], None]

# A thousandth of the budget is left free, where schedules are known that fit into the rest.
_SPARE_SHIFT = 10
_ADVISED_SHIFT = 5  # of the smallest budget: so much more is advised, for what a script keeps from its later steps


class BudgetBelowSmallest(InfeasibleBudget):
    """The budget is below the smallest one known to be feasible.

    Attributes:
        smallest_schedules: of the step that takes ``smallest_bytes``; kept, so that this budget is met from now on.
    """

    def __init__(self, record: StepRecord, budget_bytes: int, base: Baseline, options: Options | None = None) -> None:
        smallest, plain, of_it = smallest_bytes(record, base), plain_bytes(record, base), ""
        if record.memory is not None:
            of_it = f" reserved, of it {format_bytes(base.frugal.peak_bytes)} allocated"
        with_spare = max(smallest, min(plain, smallest + (smallest >> _ADVISED_SHIFT) + 1))
        if smallest <= plain:
            fits = f"fits: --budget {format_budget(with_spare, plain)} or {format_share(with_spare, plain)}"
            hint = f"{fits} (the plain step takes {format_bytes(plain)}), or a smaller batch (monetrun batch)"
        else:
            least = f"no schedule that is known takes less than the plain step, {format_bytes(plain)}"
            hint = f"{least}: with --budget 1.0x models run as they are"
        super().__init__(
            f"budget {format_bytes(budget_bytes)} < smallest feasible {format_bytes(smallest, exact=True)}"
            f"{of_it}{_restriction(options)}\n"
            f"  at its peak: {base.frugal.peak_name}\n  it is: {ledger_line(ledger(record, base.frugal))}",
            hint,
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
            plain_bytes=plain,
            operator=base.frugal.peak_name,
        )
        self.smallest_schedules = StepSchedules.of(record.graphs, base.frugal_schedules)


@timing.one_plan()
def plan_step(
    record: StepRecord,
    budget_bytes: int,
    algorithm: str = "hierarchical",
    options: Options | None = None,
    known: Baseline | None = None,
    starts: Sequence[Sequence[Schedule]] = (),
) -> Plan:
    """Find the cheapest schedules under which the step never takes more than ``budget_bytes``.

    These are bytes allocated; where the record has the device's memory (CUDA), bytes that the allocator reserves.

    Args:
        record: from a trial run.
        budget_bytes: of the whole step on one device.
        algorithm: a name that ``solve.solver`` knows.
        options: for the solver; its ``seconds`` are shared by the rounds that need solving, and its ``on_progress``
            gets the seconds of the whole step.
        known: the record's baseline, when the caller has it already.
        starts: schedules of all graphs to begin with, for the solvers that use them; those over the budget are
            harmless.

    Raises:
        BudgetBelowSmallest: no schedule known fits; names the smallest feasible budget and the operator that sets it.
        NoPlanInTime: the solver found nothing within the budget in its time.
    """
    options = options or Options()
    base = lowered(record, known or baseline(record), starts)

    def within(target_bytes: int, options: Options, starts: Sequence[Sequence[Schedule]]) -> Found:
        return _found_within(record, target_bytes, algorithm, options, base, starts)

    reserve: Reserved | None = None
    try:
        if record.memory is None:
            # what is small and was not in the recorded step (a loss that is kept) must not end the training
            target = budget_bytes
            if base.frugal.peak_bytes <= budget_bytes < base.plain.peak_bytes:
                target = max(budget_bytes - (budget_bytes >> _SPARE_SHIFT), base.frugal.peak_bytes)
            found = within(target, options, starts)
        else:
            lowest = base.frugal.peak_bytes
            found, reserve = device_budget.found_within(record, budget_bytes, options, within, lowest, starts)
    except device_budget.OverBudget as over:
        candidates = [base.frugal_schedules, more_frugal(record, base, options).frugal_schedules]
        candidates += [tuple(over.least)] if over.least is not None else []
        candidates = [c for c in candidates if allowed(record, c, options)] or candidates[:1]
        candidates = [placement.placed(record, c, options.seconds / 10) for c in candidates]
        smallest = min(candidates, key=lambda schedules: reserved(record, schedules).peak_bytes)
        base = replace(base, frugal=replay(record, smallest), frugal_schedules=smallest)
        reserve = reserved(record, smallest)
        if reserve.peak_bytes > budget_bytes or not allowed(record, smallest, options):
            raise BudgetBelowSmallest(record, budget_bytes, base) from None
        found = Found(smallest, replay(record, base.fast_schedules).seconds, "feasible")
        if over.least is None and base.frugal.peak_bytes <= budget_bytes:  # nothing was solved for
            found, reserve = _faster(record, budget_bytes, options, within, base, (found, reserve))
    except NoPlanInTime:
        frugal = _most_frugal_allowed(record, budget_bytes, options, base) if algorithm == "hierarchical" else None
        if frugal is None:
            raise
        found, reserve = frugal
    return _plan(record, budget_bytes, algorithm, base, found, reserve)


def _faster(
    record: StepRecord,
    budget_bytes: int,
    options: Options,
    within: Callable[[int, Options, Sequence[Sequence[Schedule]]], Found],
    base: Baseline,
    known: tuple[Found, Reserved],
) -> tuple[Found, Reserved]:
    """What is found on from the most frugal schedules of ``base``, or ``known`` where that is faster."""
    try:
        found, reserve = device_budget.found_within(
            record, budget_bytes, options, within, base.frugal.peak_bytes, [base.frugal_schedules]
        )
    except (device_budget.OverBudget, NoPlanInTime):
        return known
    seconds = [replay(record, schedules).seconds for schedules in (known[0].schedules, found.schedules)]
    return (found, reserve) if seconds[1] < seconds[0] else known


def of_step(record: StepRecord, plan: Plan) -> Plan:
    """The schedules of ``plan``, made for the same graphs with more held beside them, as a plan of ``record``."""
    schedules = tuple(graph.schedule for graph in plan.graphs)
    base = baseline(record, schedules)
    found = Found(schedules, (1 + plan.bound) * base.plain.seconds, plan.status)
    reserve = None if record.memory is None else reserved(record, schedules)
    return _plan(record, plan.budget_bytes, plan.solver, base, found, reserve)


def _most_frugal_allowed(
    record: StepRecord, budget_bytes: int, options: Options, base: Baseline
) -> tuple[Found, Reserved | None] | None:
    """After the default solver has found nothing: the most frugal schedules of those that ``options`` allow, if known.

    Raises:
        BudgetBelowSmallest: they take more than the budget.
    """
    base = _allowed_baseline(record, options, base)
    if not allowed(record, base.frugal_schedules, options):
        return None
    reserve = None if record.memory is None else reserved(record, base.frugal_schedules)
    taken = base.frugal.peak_bytes if reserve is None else reserve.peak_bytes
    if taken > budget_bytes:
        raise BudgetBelowSmallest(record, budget_bytes, base, options) from None
    return Found(base.frugal_schedules, replay(record, base.fast_schedules).seconds, "feasible"), reserve


def _allowed_baseline(record: StepRecord, options: Options, base: Baseline) -> Baseline:
    """``base`` with the most frugal schedules that ``options`` allow; where none are known, as it is."""
    start = plain_in_place(record, options, each_once)
    if not allowed(record, start, options):
        return base
    found = more_frugal(record, replace(base, frugal=replay(record, start), frugal_schedules=start), options)
    return found if allowed(record, found.frugal_schedules, options) else base


def plain_bytes(record: StepRecord, base: Baseline) -> int:
    """What the plain step takes, of which ``0.6x`` is a share: allocated bytes, on CUDA reserved ones."""
    return base.plain.peak_bytes if record.memory is None else plain_reserved_bytes(record)


def smallest_bytes(record: StepRecord, base: Baseline) -> int:
    """The smallest budget that is known to be feasible: allocated bytes, on CUDA reserved ones."""
    return base.frugal.peak_bytes if record.memory is None else reserved(record, base.frugal_schedules).peak_bytes


def _found_within(
    record: StepRecord,
    budget_bytes: int,
    algorithm: str,
    options: Options,
    base: Baseline,
    starts: Sequence[Sequence[Schedule]],
) -> Found:
    """The cheapest schedules under which the step never has more than ``budget_bytes`` allocated.

    Raises:
        BudgetBelowSmallest, NoPlanInTime: see ``plan_step``.
    """
    if base.frugal.peak_bytes > budget_bytes:
        base = more_frugal(record, base, options)
    if base.frugal.peak_bytes > budget_bytes and not allowed(record, base.frugal_schedules, options):
        base = _allowed_baseline(record, options, base)
    if base.frugal.peak_bytes > budget_bytes:
        raise BudgetBelowSmallest(record, budget_bytes, base, options)

    def solved(options: Options, more_starts: Sequence[Sequence[Schedule]] = ()) -> Found:
        return _solve_rounds(record, budget_bytes, algorithm, options, base, [*more_starts, *starts])

    inexact = any(offers_inexact(g, options) for g in base.searched.graphs)
    found = exact_where_nearly_as_fast(record, budget_bytes, options, solved) if inexact else solved(options)
    if replay(record, found.schedules).peak_bytes > budget_bytes or not allowed(record, found.schedules, options):
        raise NoPlanInTime(
            f"{algorithm} has found no plan within {format_bytes(budget_bytes)}{_restriction(options)},"
            f" in {options.seconds:g} s at most",
            "give it more time (--solver-seconds)"
            + (" or more memory" if algorithm == "hierarchical" else ", more memory, or --algorithm hierarchical"),
        )
    return found


def _plan(
    record: StepRecord,
    budget_bytes: int,
    algorithm: str,
    base: Baseline,
    found: Found,
    reserve: Reserved | None = None,
) -> Plan:
    timeline, plain_seconds = replay(record, found.schedules), base.plain.seconds
    overhead = timeline.seconds / plain_seconds - 1.0 if plain_seconds else 0.0
    rows, pool = ledger(record, timeline), None
    if reserve is not None and (memory := record.memory) is not None:
        pool = Pool(
            plain_reserved_bytes(record),
            reserve.small_bytes,
            reserve.large_bytes,
            memory.other_streams_bytes,
            plain_is_estimated=not memory.plain_reserved_bytes,
        )
        rows[FRAGMENTATION] = pool.planned_bytes - timeline.peak_bytes
    return Plan(
        graphs=tuple(GraphPlan.of(g, s) for g, s in zip(record.graphs, found.schedules, strict=True)),
        budget_bytes=budget_bytes,
        plain_peak_bytes=base.plain.peak_bytes if record.memory is None else plain_allocated_bytes(record),
        planned_peak_bytes=timeline.peak_bytes,
        overhead=overhead,
        bound=min(overhead, found.bound_seconds / plain_seconds - 1.0) if plain_seconds else 0.0,
        status=found.status,
        solver=algorithm,
        device=record.device,
        torch_version=record.torch_version,
        ledger=rows,
        pool=pool,
        keeps_parameters=choice_of(record),
        gradients_by_turns=record.gradients_by_turns,
    )


def _restriction(options: Options | None) -> str:
    """What ``options`` leave out, for messages."""
    if options is None:
        return ""
    recompute = "" if options.recompute else ", without recomputation"
    return recompute + ("" if options.implementations is None else ", with the allowed implementations only")


def _solve_rounds(
    record: StepRecord,
    budget_bytes: int,
    algorithm: str,
    options: Options,
    base: Baseline,
    starts: Sequence[Sequence[Schedule]],
) -> Found:
    """Solve the rounds in which the plain step exceeds the budget, one after the other."""
    solver = solve.solver(algorithm)
    known: list[Sequence[Schedule]] = []
    if solve.algorithm(algorithm).uses_starts:
        known = [
            s for s in (base.frugal_schedules, base.plain_schedules, *starts) if allowed(base.searched, s, options)
        ]
    schedules = plain_in_place(record, options, each_once)
    candidates = []
    # by the graphs of a round: by how much more seconds they cost at least (negative: other implementations are faster)
    added: dict[tuple[int, ...], float] = {}
    status = "optimal"
    pairs, peaks = zip(record.rounds, base.rounds, strict=True), _round_peaks(record, schedules)
    tight = [(b, joined) for b, joined in pairs if peaks[b] > budget_bytes]
    # the round that needs most comes first: its schedules then fit most of the others too
    peaks = _round_peaks(record, base.frugal_schedules)
    tight.sort(key=lambda pair: -peaks[pair[0]])
    alike, searched = {tuple(calls_in_step(record, bounds)) for bounds, _ in tight}, set[tuple[int, ...]]()
    for bounds, joined in tight:
        candidates.append(schedules)
        if _round_peaks(record, schedules)[bounds] <= budget_bytes:
            continue
        # rounds of the same graphs (an accumulation's) mostly need one search: the others are tried for a moment
        calls = calls_in_step(record, bounds)
        graphs, least_calls = tuple(calls), min(calls.values())
        parts = len(tight) if graphs in searched else len(alike)
        searched.add(graphs)
        share = replace(options, seconds=options.seconds / parts, on_progress=None)
        if isinstance(joined, SeparateRound):
            found = joined.solve(schedules, budget_bytes, solver, share, known)
            schedules = tuple(found.get(k, s) for k, s in enumerate(schedules))
            status = "feasible" if found else "unknown"
            continue
        timeline = replay(record, schedules)
        shares = {k: calls[k] / least_calls for k in graphs}  # some of them are called in other rounds, too
        plain_seconds = sum(shares[k] * seconds_of(record, [k], base.fast_schedules) for k in graphs)
        rest_seconds = timeline.seconds - sum(calls[k] * seconds_of(record, [k], schedules) for k in graphs)
        share = replace(share, on_progress=_of_the_step(options.on_progress, rest_seconds, least_calls))
        free_bytes = budget_bytes - timeline.start_bytes[bounds[0]]
        solution = solver(joined.graph, joined.costs_of(shares), free_bytes, share, [joined.join(s) for s in known])
        if solution.schedule is None:
            status = "unknown"
            continue
        found = joined.split(solution.schedule)
        schedules = tuple(found.get(k, s) for k, s in enumerate(schedules))
        more = least_calls * (solution.bound_seconds - plain_seconds)
        added[graphs] = max(added.get(graphs, more), more)
        status = solution.status if status == "optimal" else status
    if replay(record, schedules).peak_bytes > budget_bytes and solve.algorithm(algorithm).uses_starts:
        half = replace(options, seconds=options.seconds / 2)
        if not allowed(record, base.frugal_schedules, options):
            base = _allowed_baseline(record, half, base)
        schedules = shared_graphs.within(record, budget_bytes, base, [*candidates, schedules], solver, half)
        status = "feasible"
    least = [least_more(record, k, base.fast_schedules, options) for k in range(len(schedules))]
    more = disjoint_sum(added, least)
    if more < 0 and status == "optimal" and not added:
        status = "feasible"  # others may be faster
    return Found(schedules, replay(record, base.fast_schedules).seconds + more, status)


def _of_the_step(report: Progress | None, rest_seconds: float, calls: int) -> Progress | None:
    """``report`` for the solver of one round: the step has ``calls`` such rounds and ``rest_seconds`` of others."""
    if report is None:
        return None
    return lambda seconds, best, bound: report(seconds, rest_seconds + calls * best, rest_seconds + calls * bound)


def _round_peaks(record: StepRecord, schedules: Sequence[Schedule]) -> dict[tuple[int, int], int]:
    """The peak within each round."""
    high_bytes = replay(record, schedules).high_bytes
    return {bounds: max(high_bytes[slice(*bounds)]) for bounds in record.rounds}
