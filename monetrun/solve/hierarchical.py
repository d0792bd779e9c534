"""The default solver: whole-network programs over blocks, then exact windows, from a greedy schedule on.

1. *Greedy* (``monetrun.solve.greedy``) gives a schedule at once. With the implementations that it chose, *minimum cuts*
   (``monetrun.solve.cut``) give others, from which the search of greedy's file goes on.
2. *Blocks.* The backward pass is cut at points into blocks. Within a block runs have no order and memory is looked at
   only at its ends (``monetrun.solve.relaxation``): a program of a whole network is then solved in seconds. Its optimum
   bounds every schedule. Written down as a schedule and replayed, it tells where memory was looked at too
   seldom; there the next program has a point more, or tells what runs before and after a run again
   (``monetrun.solve.order``), or, when all that is said or takes too long, leaves a *margin*. Whenever such a schedule
   fits the budget it is a candidate, and it is a cheapest one when no margin was needed.
3. *Windows.* The paper's program (``monetrun.solve.ilp``) with a few neighbouring operators free and all else as in the
   best schedule, on a fixed profile of memory, started from that schedule; windows lie anywhere, across blocks.

Blocks need no narrow points: what passes by a block is one tensor more that is alive at its ends.

Anytime: after the first step the best schedule so far is always there, and Ctrl-C returns it. All choices, and the
moment at which the search ends, follow from the inputs and the work that was done (``monetrun.solve.incumbent``), so
that the same inputs give the same plan, unless the machine is so busy that the clock ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, plain_schedule
from monetrun.solve import greedy, mip, relaxation, tidy, windows
from monetrun.solve.incumbent import Incumbent
from monetrun.solve.places import Places, find_excess, first_places

_FRUGAL_DRAWS = 4  # each a quarter of the time: another seed is worth more than more steps


def solve(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    options: Options,
    progress: mip.Progress | None = None,
    known: Sequence[Schedule] = (),
    bound_seconds: float = 0.0,
) -> Solution:
    """A cheap schedule within the budget and a bound on all of them, for graphs of thousands of operators.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: what the schedule may have allocated at most.
        options: all are heeded.
        progress: called with (seconds of the best schedule or infinity, bound in seconds) when either improves.
        known: schedules to begin with, within the budget or not.
        bound_seconds: no schedule within the budget costs less, as far as the caller knows.

    Returns:
        ``"optimal"``: within ``options.gap`` of the bound. ``"feasible"``: the time was up, or Ctrl-C was pressed.
        ``"infeasible"``: no schedule fits, by the bound. ``"unknown"``: none was found.
    """
    search = Incumbent(graph, costs, budget_bytes, options, progress)
    try:
        for schedule in (plain_schedule(graph), *known):
            search.offer(schedule)
        search.raise_bound(math.inf if greedy.least_step_bytes(graph, costs) > budget_bytes else bound_seconds)
        _search_greedily(search, min(0.25, 0.05 * options.seconds))
        _search_from_cuts(search, min(0.25, 0.05 * options.seconds))
        if search.best is None:
            _search_frugally(search, min(15.0, 0.3 * options.seconds))
        relaxed, places = _search_blocks(search)
        _raise_bound(search, places, 0.2 * options.seconds)
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
    if search.done():
        return
    options, patience = search.native(min(seconds, search.left()))
    schedule = greedy.improve(search.graph, search.costs, search.budget_bytes, start, options, patience).schedule
    if schedule is not None:
        search.offer(schedule)


def _search_from_cuts(search: Incumbent, seconds: float) -> None:
    """Offer minimum cuts with the best schedule's implementations, and what the greedy solver makes of the nearest."""
    start = None if search.done() else search.cut()
    _search_greedily(search, seconds, start)


def _search_frugally(search: Incumbent, seconds: float) -> None:
    """Go down to the budget in steps, and improve what is found there: for budgets that greedy does not reach.

    Whether that gets there is a matter of luck (a U-Net at a third of its activations: two of five draws), so it is
    tried several times.
    """
    for _ in range(_FRUGAL_DRAWS):
        if search.done():
            return
        options, patience = search.native(min(0.7 * seconds / _FRUGAL_DRAWS, search.left()))
        schedule = greedy.most_frugal(search.graph, search.costs, options, search.budget_bytes, patience)
        if search.offer(schedule).peak_bytes <= search.budget_bytes:
            _search_greedily(search, 0.3 * seconds, schedule)
            return


def _search_blocks(search: Incumbent) -> tuple[Schedule | None, Places]:
    """Solve programs over blocks, first for the bound, then, with room for what they do not see, for schedules.

    Returns:
        What the last program said, which may be over the budget, and where the last bound looked at memory.
    """
    relaxed: Schedule | None = None
    graph, costs, options, budget_bytes = search.graph, search.costs, search.options, search.budget_bytes
    places = bounded_at = first_places(graph, costs, search.best or plain_schedule(graph))
    margins: dict[int, int] | None = None
    slice_seconds = max(1.0, 0.15 * options.seconds)
    fruitless, bounded = 0, False
    while not search.done() and fruitless < 4 and search.left() > 0.5 * options.seconds:
        program = relaxation.relax(graph, costs, budget_bytes, places, options, margins)
        result = _minimize(search, program, slice_seconds)
        if margins is None:
            bounded_at = places
            if result is None:
                search.raise_bound(math.inf)
                return None, places
            search.raise_bound(relaxation.bound_of(program, result))
            if not bounded:  # easy budgets end with the first bound; the others are worth more draws
                bounded = True
                _search_from_cuts(search, min(7.0, 0.1 * options.seconds))
        before = search.seconds
        said = None if result is None else _offer_relaxed(search, program, result)
        relaxed = said or relaxed
        over = [] if said is None else find_excess(graph, costs, budget_bytes, said, places)
        if not over and margins is None and result is not None and result.status == "optimal":
            return relaxed, bounded_at
        finer = places.also(graph, over)
        seen = (finer.points, finer.runs) == (places.points, places.runs)
        seen &= margins is not None or finer.ordered == places.ordered
        places = finer
        if margins is None:
            if result is None or result.status != "optimal" or seen:
                margins = {e.point: e.nbytes for e in over} if seen else {}
        elif result is None or result.value is None:
            margins = {point: margin // 2 for point, margin in margins.items()}
            fruitless += 1
        else:
            fruitless += search.seconds >= before and seen
            for e in over:
                if seen:
                    margins[e.point] = margins.get(e.point, 0) + e.nbytes
            if not over:
                return relaxed, bounded_at
        if over:
            _search_greedily(search, min(1.0, 0.05 * options.seconds), relaxed)
        if over and relaxed is not None and margins is not None and search.best is None:
            windows.repair(search, relaxed, slice_seconds / 2)
    return relaxed, bounded_at


def _raise_bound(search: Incumbent, places: Places, seconds: float) -> None:
    """Solve programs that look at memory in more and more places, from those at ``places`` on."""
    graph, costs, budget_bytes, until = search.graph, search.costs, search.budget_bytes, search.left() - seconds
    while not search.done() and search.left() > until:
        program = relaxation.relax(graph, costs, budget_bytes, places, search.options)
        result = _minimize(search, program, search.left() - until)
        search.raise_bound(math.inf if result is None else relaxation.bound_of(program, result))
        said = None if result is None else _offer_relaxed(search, program, result)
        if result is None or result.status != "optimal" or said is None:
            return
        over = find_excess(graph, costs, budget_bytes, said, places)
        finer = places.also(graph, over)
        if finer == places:
            return
        places = finer


def _minimize(search: Incumbent, program: relaxation.Relaxation, work_seconds: float) -> mip.Result | None:
    """Solve a program over blocks; None where it is infeasible."""
    if program.infeasible:
        return None
    start = None if search.best is None else relaxation.start_from(search.graph, program, search.best)
    result = search.minimize(program.problem, work_seconds, search.mip_gap(), start)
    return None if result.status == "infeasible" else result


def _offer_relaxed(search: Incumbent, program: relaxation.Relaxation, result: mip.Result) -> Schedule | None:
    """Offer a solution as a schedule; it may be over the budget."""
    if result.value is None:
        return None
    schedule = relaxation.relaxed_schedule(search.graph, program, result.value)
    if schedule is None:
        return None
    search.offer(schedule)
    return tidy.in_place_where_legal(search.graph, search.costs, schedule, search.options)
