"""Overhead against budget: a step's trade-off from its plain peak down to the smallest feasible budget.

Each point is planned as a launch with that budget would be. A plan also fits every larger budget, and a bound also
holds for every smaller one; with both applied the table is monotone, whatever the solver's time. Where modules are
sharded (FSDP2), plans are compared by the seconds of the step, and a bound is one of plans that keep the same modules'
parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from monetrun.core.budget import format_budget
from monetrun.core.clocks import sharded_clocks
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.keeping import as_planned
from monetrun.core.options import Options
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.planning import kept_parameters, planner
from monetrun.planning.planner import Baseline
from monetrun.planning.summary import inexact_runs, planned_bytes

DEFAULT_POINTS = 8
DEFAULT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Point:
    """One budget.

    Attributes:
        budget_bytes: of the whole step on one device.
        planned_peak_bytes: of the cheapest plan found within it; None where none was.
        overhead: of that plan, over the plain step's seconds, as a fraction; None where none was found.
        bound: no plan within the budget has less.
        gap: overhead less bound, None where none was found.
        status: ``"optimal"``, ``"feasible"``, ``"infeasible"`` (less than the smallest budget) or ``"unknown"``.
        rounding: how many of the implementations that the plan runs differ from eager's by rounding.
    """

    budget_bytes: int
    planned_peak_bytes: int | None
    overhead: float | None
    bound: float
    gap: float | None
    status: str
    rounding: int = 0


@dataclass(frozen=True)
class Frontier:
    """The table, the largest budget first, and the step and algorithm it is of.

    Attributes:
        plain_peak_bytes: of the step without monetrun; as all bytes here allocated, on CUDA reserved.
        smallest_bytes: the smallest budget for which a plan is known.
        algorithm: name of the solver.
        device: for which the step was recorded.
        points: by falling budget; overhead and bound never fall, unless modules are sharded.
        implementations: which ones plans may use, as ``--implementations`` has it.
    """

    plain_peak_bytes: int
    smallest_bytes: int
    algorithm: str
    device: str
    points: tuple[Point, ...]
    implementations: str = "all"


def spread(plain_peak_bytes: int, smallest_bytes: int, points: int) -> tuple[int, ...]:
    """Budgets at equal distances, from the plain peak down to the smallest feasible one, both included."""
    width = plain_peak_bytes - smallest_bytes
    found = (plain_peak_bytes - width * i // (points - 1) for i in range(points))
    return tuple(sorted({*found}, reverse=True))


def frontier(
    record: StepRecord,
    budgets: Sequence[int],
    algorithm: str = "hierarchical",
    options: Options | None = None,
    known: Baseline | None = None,
    on_point: Callable[[int], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Frontier:
    """Plan the step for every budget.

    Args:
        record: from a trial run.
        budgets: of the whole step, in bytes, in any order.
        algorithm: a name that ``solve.solver`` knows.
        options: for the solver; its ``seconds`` are for all points together.
        known: the record's baseline, when the caller has it already.
        on_point: called with each budget before it is planned.
        on_plan: called with each plan that is found.

    Raises:
        InfeasibleBudget: no budget is feasible; names the smallest that is.
    """
    options = options or Options()
    base = known or planner.baseline(record)
    descending = sorted({*budgets}, reverse=True)
    smallest_bytes = kept_parameters.smallest_bytes(record, base)
    if not descending or descending[0] < smallest_bytes:
        raise planner.BudgetBelowSmallest(record, max(descending, default=0), base)
    until = time.monotonic() + options.seconds
    plans: dict[int, Plan] = {}
    refused: InfeasibleBudget | NoPlanInTime | None = None
    for i, budget_bytes in enumerate(reversed(descending)):  # plans of smaller budgets are starts for larger ones
        if on_point is not None:
            on_point(budget_bytes)
        share = max(0.1, until - time.monotonic()) / (len(descending) - i)
        starts = [[g.schedule for g in plan.graphs] for plan in plans.values()]
        own = replace(options, seconds=share)
        try:
            plan = plans[budget_bytes] = kept_parameters.plan_step(record, budget_bytes, algorithm, own, base, starts)
            if on_plan is not None:
                on_plan(plan)
        except (InfeasibleBudget, NoPlanInTime) as failure:
            refused = failure
    if not plans and refused is not None:
        raise refused  # of the largest budget
    points = _monotone(descending, [plans.get(b) for b in descending], smallest_bytes, record)
    return Frontier(planner.plain_bytes(record, base), smallest_bytes, algorithm, record.device, points)


def _seconds(record: StepRecord, plan: Plan) -> float:
    """What plans are compared by: the step's seconds where modules are sharded, else those of its graphs."""
    if record.sharding is None:
        return plan.overhead
    return sharded_clocks(as_planned(record, plan.keeps_parameters), [g.schedule for g in plan.graphs]).step_seconds


def _monotone(
    budgets: Sequence[int], plans: Sequence[Plan | None], smallest_bytes: int, record: StepRecord
) -> tuple[Point, ...]:
    """The points: at each budget the best of the plans within it, and the highest of the bounds of larger ones."""
    bounds: list[dict[tuple[tuple[str, bool], ...], float]] = []  # by which parameters are kept
    for plan in plans:  # an overhead may be negative, where other implementations are faster, but not below -1
        known = dict(bounds[-1]) if bounds else {}
        if plan is not None:
            known[_kept(plan)] = max(plan.bound, known.get(_kept(plan), -1.0))
        bounds.append(known)
    points: list[Point] = []
    best: Plan | None = None
    for budget_bytes, plan, known in reversed(list(zip(budgets, plans, bounds, strict=True))):
        if plan is not None and (best is None or _seconds(record, plan) <= _seconds(record, best)):
            best = plan
        if best is None:
            bound = max(known.values(), default=-1.0) if record.sharding is None else -1.0
            status = "infeasible" if budget_bytes < smallest_bytes else "unknown"
            points.append(Point(budget_bytes, None, None, bound, None, status))
            continue
        proven = min(max(known.get(_kept(best), -1.0), best.bound), best.overhead)
        status = "optimal" if best.overhead <= proven else best.status
        gap, rounding = best.overhead - proven, inexact_runs(best, record)
        points.append(Point(budget_bytes, planned_bytes(best), best.overhead, proven, gap, status, rounding))
    return tuple(reversed(points))


def _kept(plan: Plan) -> tuple[tuple[str, bool], ...]:
    return tuple(sorted(plan.keeps_parameters.items()))


def next_budget(found: Frontier) -> str:
    """The budget at the knee of the table, as ``parse`` reads it: below it, overhead rises fastest.

    The knee is the point farthest under the straight line between the two ends, both axes scaled to 1.
    """
    solved = [p for p in found.points if p.overhead is not None]
    first, last = solved[0], solved[-1]
    width = max(1, first.budget_bytes - last.budget_bytes)
    height = max(1e-9, (last.overhead or 0.0) - (first.overhead or 0.0))

    def under(p: Point) -> float:
        return (first.budget_bytes - p.budget_bytes) / width - ((p.overhead or 0.0) - (first.overhead or 0.0)) / height

    return format_budget(max(solved, key=under).budget_bytes)
