"""The default solver: whole-network programs over blocks, then exact windows, starting from a greedy schedule.

1. *Greedy* (``monetrun.solve.greedy``) gives a schedule at once. *Minimum cuts* (``monetrun.solve.cut``) with the
   implementations that it chose give others, from which the greedy search goes on.
2. *Blocks.* The backward pass is cut at points into blocks. Within a block runs have no order, and memory is checked
   only at its ends (``monetrun.solve.relaxation``), so that a program of a whole network is solved in seconds. Its
   optimum bounds every schedule. Written as a schedule and replayed, it shows where memory was checked too seldom;
   there the next program has one point more, or models what runs before and after a rerun (``monetrun.solve.order``),
   or, when all of that is modelled or takes too long, leaves a *margin*. Whenever such a schedule fits the budget it is
   a candidate, and it is a cheapest one if no margin was needed.
3. *Windows.* The paper's program (``monetrun.solve.ilp_program``) with a few neighbouring operators free and everything
   else as in the best schedule, on a fixed profile of memory, started from that schedule; windows lie anywhere, across
   blocks.

2 and 3 are in ``monetrun.solve.programs``, which is imported where 1 has not reached the gap.

Blocks need no narrow points: what passes by a block is one more tensor that is alive at its ends.

Anytime: after the first step the best schedule so far is always there, and Ctrl-C returns it. All choices, and the
moment at which the search ends, follow from the inputs and the work done (``monetrun.solve.incumbent``), so that the
same inputs give the same plan, unless the machine is so busy that the clock ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from monetrun.core.graph import Costs, Graph
from monetrun.core.imports import without_collection
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, each_once
from monetrun.solve import greedy
from monetrun.solve.incumbent import Incumbent

_FRUGAL_DRAWS = 4  # each a quarter of the time: another seed is worth more than more steps


def solve(graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()) -> Solution:
    """A cheap schedule within the budget and a bound on all of them, for graphs of thousands of operators.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: what the schedule may have allocated at most.
        options: all are heeded.
        starts: valid schedules to begin with, within the budget or not.

    Returns:
        ``"optimal"``: within ``options.gap`` of the bound. ``"feasible"``: the time was up, or Ctrl-C was pressed.
        ``"infeasible"``: no schedule fits, by the bound. ``"unknown"``: none was found.
    """
    return run(Incumbent(graph, costs, budget_bytes, options), starts)


def run(search: Incumbent, starts: Sequence[Schedule] = ()) -> Solution:
    """``solve`` for a search that may already have a schedule or a bound."""
    options = search.options
    try:
        for schedule in (each_once(search.graph), *starts):
            search.offer(schedule)
        if greedy.least_step_bytes(search.graph, search.costs) > search.budget_bytes:
            search.raise_bound(math.inf)
        search.search_greedily(min(0.25, 0.05 * options.seconds))
        search.search_from_cuts(min(0.25, 0.05 * options.seconds))
        if search.best is None:
            _search_frugally(search, min(15.0, 0.3 * options.seconds))
        if not search.done():
            with without_collection():
                from monetrun.solve import programs  # imports cvxpy, which takes a second

            programs.improve(search)
    except KeyboardInterrupt:
        search.interrupt()
    if search.best is None:
        status = "infeasible" if math.isinf(search.bound_seconds) else "unknown"
    else:
        status = "optimal" if search.close() else "feasible"
    return Solution(search.best, search.bound_seconds, status, "hierarchical", search.elapsed())


def _search_frugally(search: Incumbent, seconds: float) -> None:
    """Go down to the budget in steps, and improve what is found there: for budgets that greedy does not reach.

    Whether that succeeds is a matter of luck (a U-Net at a third of its activations: two of five draws), so it is
    tried several times.
    """
    for _ in range(_FRUGAL_DRAWS):
        if search.done():
            return
        schedule = search.most_frugal(min(0.7 * seconds / _FRUGAL_DRAWS, search.left()), search.budget_bytes)
        if search.offer(schedule).peak_bytes <= search.budget_bytes:
            search.search_greedily(0.3 * seconds, schedule)
            return
