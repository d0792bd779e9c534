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

Blocks need no narrow points: what passes by a block is one more tensor that is alive at its ends.

Anytime: after the first step the best schedule so far is always there, and Ctrl-C returns it. All choices, and the
moment at which the search ends, follow from the inputs and the work done (``monetrun.solve.incumbent``), so that the
same inputs give the same plan, unless the machine is so busy that the clock ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, plain_schedule
from monetrun.solve import greedy, windows
from monetrun.solve.bound import offer_relaxed, raise_bound, solve_relaxed
from monetrun.solve.incumbent import Incumbent
from monetrun.solve.places import Places, find_excess, first_places

_FRUGAL_DRAWS = 4  # each a quarter of the time: another seed is worth more than more steps
_FRUITLESS = 4  # programs with margins that improve nothing, before the search over blocks ends


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
        for schedule in (plain_schedule(search.graph), *starts):
            search.offer(schedule)
        if greedy.least_step_bytes(search.graph, search.costs) > search.budget_bytes:
            search.raise_bound(math.inf)
        _search_greedily(search, min(0.25, 0.05 * options.seconds))
        _search_from_cuts(search, min(0.25, 0.05 * options.seconds))
        if search.best is None:
            _search_frugally(search, min(15.0, 0.3 * options.seconds))
        relaxed, places = _search_blocks(search)
        raise_bound(search, places, 0.2 * options.seconds)
        _search_from_cuts(search, min(15.0, 0.2 * options.seconds))
        if search.best is None and relaxed is not None:
            windows.repair(search, relaxed, 0.2 * search.left())
        windows.improve(search)
    except KeyboardInterrupt:
        search.interrupted = True
    if search.best is None:
        status = "infeasible" if math.isinf(search.bound_seconds) else "unknown"
    else:
        status = "optimal" if search.close() else "feasible"
    return Solution(search.best, search.bound_seconds, status, "hierarchical", search.elapsed())


def _search_greedily(search: Incumbent, seconds: float, start: Schedule | None = None) -> None:
    """Offer what the greedy solver finds."""
    if not search.done():
        search.improve_greedily(min(seconds, search.left()), start)


def _search_from_cuts(search: Incumbent, seconds: float) -> None:
    """Offer minimum cuts with the best schedule's implementations, and what the greedy solver makes of the nearest."""
    start = None if search.done() else search.cut()
    _search_greedily(search, seconds, start)


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
            _search_greedily(search, 0.3 * seconds, schedule)
            return


def _search_blocks(search: Incumbent) -> tuple[Schedule | None, Places]:
    """Solve programs over blocks, first for the bound, then, with margins for what they do not model, for schedules.

    Returns:
        The last program's schedule, which may be over the budget, and the places of the last bound.
    """
    relaxed: Schedule | None = None
    graph, costs, options, budget_bytes = search.graph, search.costs, search.options, search.budget_bytes
    places = bounded_at = first_places(graph, costs, search.best or plain_schedule(graph))
    margins: dict[int, int] | None = None
    slice_seconds = max(1.0, 0.15 * options.seconds)
    fruitless, bounded = 0, False
    while not search.done() and fruitless < _FRUITLESS and search.left() > 0.5 * options.seconds:
        solved = solve_relaxed(search, places, slice_seconds, margins)
        if margins is None:
            bounded_at = places
            if solved.result is None:
                return None, places
            if not bounded:  # easy budgets end with the first bound; the others are worth more draws
                bounded = True
                _search_from_cuts(search, min(7.0, 0.1 * options.seconds))
        before = search.seconds
        schedule = offer_relaxed(search, solved)
        relaxed = schedule or relaxed
        over = [] if schedule is None else find_excess(graph, costs, budget_bytes, schedule, places)
        if not over and margins is None and solved.optimal:
            return relaxed, bounded_at
        finer = places.also(graph, over)
        nothing_new = (finer.points, finer.runs) == (places.points, places.runs)
        nothing_new &= margins is not None or finer.ordered == places.ordered
        places = finer
        if margins is None:
            if not solved.optimal or nothing_new:
                margins = {e.point: e.nbytes for e in over} if nothing_new else {}
        elif solved.result is None or solved.result.value is None:
            margins = {point: margin // 2 for point, margin in margins.items()}
            fruitless += 1
        else:
            fruitless += search.seconds >= before and nothing_new
            for e in over:
                if nothing_new:
                    margins[e.point] = margins.get(e.point, 0) + e.nbytes
            if not over:
                return relaxed, bounded_at
        if over:
            _search_greedily(search, min(1.0, 0.05 * options.seconds), relaxed)
        if over and relaxed is not None and margins is not None and search.best is None:
            windows.repair(search, relaxed, slice_seconds / 2)
    return relaxed, bounded_at
