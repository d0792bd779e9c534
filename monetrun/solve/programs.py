"""Improves a search by integer programs: of the network over blocks, then of windows (``monetrun.solve.windows``).

The second and third part of the default solver (``monetrun.solve.hierarchical``, which describes them).
"""

from __future__ import annotations

from monetrun.core.plan import Schedule, each_once
from monetrun.solve import windows
from monetrun.solve.bound import offer_relaxed, raise_bound, solve_relaxed
from monetrun.solve.incumbent import Incumbent
from monetrun.solve.places import Places, find_excess, first_places

_FRUITLESS = 4  # programs with margins that improve nothing, before the search over blocks ends


def improve(search: Incumbent) -> None:
    """Offer what programs find, and raise the bound, until the gap is reached or the time is up."""
    relaxed, places = _search_blocks(search)
    raise_bound(search, places, 0.2 * search.options.seconds)
    search.search_from_cuts(min(15.0, 0.2 * search.options.seconds))
    if search.best is None and relaxed is not None:
        windows.repair(search, relaxed, 0.2 * search.left())
    windows.improve(search)


def _search_blocks(search: Incumbent) -> tuple[Schedule | None, Places]:
    """Solve programs over blocks, first for the bound, then, with margins for what they do not model, for schedules.

    Returns:
        The last program's schedule, which may be over the budget, and the places of the last bound.
    """
    relaxed: Schedule | None = None
    graph, costs, options, budget_bytes = search.graph, search.costs, search.options, search.budget_bytes
    places = bounded_at = first_places(graph, costs, search.best or each_once(graph))
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
                search.search_from_cuts(min(7.0, 0.1 * options.seconds))
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
            search.search_greedily(min(1.0, 0.05 * options.seconds), relaxed)
        if over and relaxed is not None and margins is not None and search.best is None:
            windows.repair(search, relaxed, slice_seconds / 2)
    return relaxed, bounded_at
