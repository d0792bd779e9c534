"""How cheap can any schedule within the budget be, and how little memory can any schedule take: bounds that are safe.

They come from a relaxed program (``monetrun.solve.relaxation``). Its points are found as cutting planes are: solve,
write the solution down as a schedule (``relaxed_schedule``), replay it, and add a point where it is over the budget. If
it is not over anywhere, it is a cheapest schedule. The first point is where a good schedule has its peak: a program
with that one alone is solved in a second, and bounds better than one with eight anywhere does in half a minute (swin_t
at 0.27 of its activations: 10.7 against 9.7% overhead).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, plain_schedule
from monetrun.solve import mip
from monetrun.solve.places import Places, find_excess, first_places
from monetrun.solve.relaxation import bound_of, floor_seconds, relax, relaxed_schedule


@dataclass(frozen=True)
class Bound:
    """What ``improve`` found.

    Attributes:
        seconds: no schedule within the budget costs less; infinite where there is none.
        places: of the last relaxation.
        schedule: the last relaxation's solution as a schedule; it may be over the budget. None without one.
        interrupted: Ctrl-C was pressed.
    """

    seconds: float
    places: Places
    schedule: Schedule | None
    interrupted: bool = False


def lower_bound(graph: Graph, costs: Costs, budget_bytes: int, options: Options) -> float:
    """No schedule within ``budget_bytes`` costs fewer seconds than this; infinity proves that there is none.

    Takes at most about ``options.seconds``.
    """
    return improve(graph, costs, budget_bytes, options).seconds


def improve(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    options: Options,
    places: Places | None = None,
    rounds: int = 1000,
    enough_seconds: float = math.inf,
) -> Bound:
    """Solve relaxations with more and more points, until nothing is over the budget or the time is up.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: as for a solver.
        options: ``seconds``, ``mip_solver``, ``seed``, and which implementations and recomputations are allowed.
        places: to begin with; the plain schedule's peak otherwise.
        rounds: how many relaxations at most.
        enough_seconds: stop when the bound is at least this.
    """
    end = time.monotonic() + options.seconds
    places = places or first_places(graph, costs, plain_schedule(graph))
    best = floor_seconds(graph, costs, options)
    schedule: Schedule | None = None
    interrupted = False
    for _ in range(rounds):
        relaxation = relax(graph, costs, budget_bytes, places, options)
        if relaxation.infeasible:
            return Bound(math.inf, places, None)
        left = end - time.monotonic()
        if left <= 0:
            break
        limits = mip.Limits(left, seed=options.seed)
        result = mip.minimize(relaxation.problem, options.mip_solver, limits)
        interrupted = result.interrupted
        if result.status == "infeasible":
            return Bound(math.inf, places, None, interrupted)
        best = max(best, bound_of(relaxation, result))
        if result.value is None:
            break
        schedule = relaxed_schedule(graph, relaxation, result.value)
        over = [] if schedule is None else find_excess(graph, costs, budget_bytes, schedule, places)
        finer = places.also(graph, over)
        if finer == places or result.status != "optimal" or interrupted or best >= enough_seconds:
            break
        places = finer
    return Bound(best, places, schedule, interrupted)
