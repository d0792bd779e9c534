"""Many budgets of one graph in one run: what one of them shows is used for the others.

A schedule within one budget is within every larger one, and a bound for one budget holds for every smaller one. So the
budgets are solved from the smallest up, each begins with the schedules of all before it, and in the end each is given
the highest bound of those above it: more budget never costs more, and never has a higher bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from monetrun.graph import Costs, Graph
from monetrun.plan import Options, Schedule, Solution
from monetrun.simulate import simulate
from monetrun.solve import hierarchical, relaxation


def frontier(graph: Graph, costs: Costs, budgets: Sequence[int], options: Options) -> list[Solution]:
    """A cheap schedule and a bound for each of ``budgets`` (bytes), in their order.

    Args:
        graph: of any size.
        costs: of the graph.
        budgets: in any order.
        options: ``seconds`` are for all budgets together, in equal shares.
    """
    found: dict[int, Solution] = {}
    schedules: list[Schedule] = []
    waiting = sorted(set(budgets))
    share = dataclasses.replace(options, seconds=options.seconds / max(1, len(waiting)))
    for budget_bytes in waiting:
        solution = hierarchical.solve(graph, costs, budget_bytes, share, known=schedules)
        found[budget_bytes] = solution
        if solution.schedule is not None:
            schedules.append(solution.schedule)
    bound_seconds = relaxation.floor_seconds(graph, costs, options)
    for budget_bytes in reversed(waiting):
        solution = found[budget_bytes]
        bound_seconds = max(bound_seconds, solution.bound_seconds)
        found[budget_bytes] = _with_bound(graph, costs, solution, bound_seconds, options.gap)
    return [found[b] for b in budgets]


def _with_bound(graph: Graph, costs: Costs, solution: Solution, bound_seconds: float, gap: float) -> Solution:
    if solution.schedule is None:
        return dataclasses.replace(solution, bound_seconds=bound_seconds)
    seconds = simulate(graph, costs, solution.schedule).seconds
    status = "optimal" if seconds <= bound_seconds * (1 + gap) else solution.status
    return dataclasses.replace(solution, bound_seconds=bound_seconds, status=status)
