"""The exact solver: the paper's whole integer program (``monetrun.solve.ilp_program``), for tens of operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, each_once
from monetrun.core.simulate import simulate
from monetrun.solve import tidy, timing
from monetrun.solve.ilp_program import Program, build
from monetrun.solve.ilp_schedule import read_schedule, start_from
from monetrun.solve.mip.canonical import Progress, StopRule
from monetrun.solve.mip.minimize import Result, minimize
from monetrun.solve.slot import all_slots, floor_seconds

_ATTEMPTS = 4  # each after a solution that is a few bytes over the budget, by the solver's tolerance


def solve(graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()) -> Solution:
    """A cheapest schedule of the class that ``monetrun.solve.ilp_program`` states.

    Args:
        graph: of tens of operators; hundreds are beyond any solver.
        costs: of the graph.
        budget_bytes: what the schedule may have allocated at most.
        options: all are heeded; ``on_progress`` is called with bounds of the class.
        starts: valid schedules, within the budget or not. The solver starts from the cheapest that fits, else from
            the plain schedule, and returns that start if it finds no cheaper schedule.

    Returns:
        ``"optimal"``: within ``options.gap`` of the best of the class, whose bound ``bound_seconds`` is.
        ``"feasible"``: the time was up, or only a start fits. ``"infeasible"``: the class has no schedule within the
        budget. ``"unknown"``: none was found.
    """
    began = timing.now()
    fitting = [(t.seconds, s) for s in starts if (t := simulate(graph, costs, s)).peak_bytes <= budget_bytes]
    best_seconds, best = min(fitting, key=lambda pair: pair[0], default=(math.inf, None))
    status, bound_seconds = "unknown", floor_seconds(graph, costs, options)
    limit_bytes = budget_bytes
    for _ in range(_ATTEMPTS):
        program = build(graph, costs, limit_bytes, all_slots(graph, options))
        if program.infeasible:
            status = "infeasible"
            break
        result = _minimize(graph, program, best or each_once(graph), options, began)
        status = result.status
        if status != "infeasible":
            bound_seconds = max(bound_seconds, program.fixed_seconds + result.bound * program.unit_seconds)
        if result.value is None:
            break
        schedule = tidy.without_dead_runs(graph, read_schedule(program, result.value))
        timeline = simulate(graph, costs, schedule)
        over = timeline.peak_bytes - budget_bytes
        if over <= 0:
            if best is None or timeline.seconds < best_seconds:
                best_seconds, best = timeline.seconds, schedule
            break
        status = "unknown"
        limit_bytes -= over
    seconds = timing.now() - began
    if best is None:
        return Solution(None, 0.0, status, "ilp", seconds)
    bound_seconds = min(bound_seconds, best_seconds)
    if options.on_progress is not None:
        options.on_progress(seconds, best_seconds, bound_seconds)
    if status in ("infeasible", "unknown"):
        status = "feasible"
    return Solution(best, bound_seconds, status, "ilp", seconds)


def _minimize(graph: Graph, program: Program, start: Schedule, options: Options, began: float) -> Result:
    """Solve ``program``, starting from ``start``, in what is left of the time."""
    stop = StopRule(options.seconds - (timing.now() - began), options.gap * 0.5, seed=options.seed)
    warm = start_from(graph, program, tidy.without_dead_runs(graph, start))
    return minimize(program.problem, options.mip_solver, stop, warm, _progress(program, options, began))


def _progress(program: Program, options: Options, began: float) -> Progress | None:
    """``options.on_progress`` for the objective and the bound of ``program``."""
    report, fixed, unit = options.on_progress, program.fixed_seconds, program.unit_seconds
    if report is None:
        return None
    return lambda objective, bound: report(timing.now() - began, fixed + objective * unit, fixed + bound * unit)
