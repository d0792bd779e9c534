"""How cheap can any schedule within the budget be, and how little memory can any schedule take: bounds that are safe.

They come from a relaxed program (``monetrun.solve.relaxation``). Its points are found as cutting planes are: solve,
write the solution down as a schedule (``relaxed_schedule``), replay it, and add a point where it is over the budget. If
it is not over anywhere, it is a cheapest schedule. The first point is where a good schedule has its peak: a program
with that one alone is solved in a second, and bounds better than one with eight anywhere does in half a minute (swin_t
at 0.27 of its activations: 10.7 against 9.7% overhead).
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.plan import Options, Schedule, plain_schedule
from monetrun.simulate import simulate
from monetrun.solve import mip
from monetrun.solve.relaxation import bound_of, floor_seconds, relax, relaxed_schedule

# so many pairs of point and forward operator can a program have of which SCIP 10 solves the root relaxation and cuts in
# a second on one 2.6 GHz Zen 4 core (2026-11)
_PLACES_PER_SECOND = 2000.0


@dataclass(frozen=True)
class Places:
    """Where a relaxed program looks at memory.

    Attributes:
        points: compulsory operators, ascending.
        runs: forward operators, at whose runs again memory is looked at as well.
        ordered: those of them of which it is told what runs before and after them (``monetrun.solve.order``).
    """

    points: tuple[int, ...]
    runs: frozenset[int] = frozenset()
    ordered: frozenset[int] = frozenset()

    def also(self, graph: Graph, over: Sequence[Excess]) -> Places:
        """Also where a schedule is over the budget.

        Runs between two points have no order. So where a run again is over, its segment is cut down to what runs
        between two compulsory operators; where it still is, it is ordered.
        """
        again = [e for e in over if e.run >= 0]
        points = {*self.points, *(e.point for e in over), *(_before(graph, e.point) for e in again)}
        return Places(
            tuple(sorted(points - {-1})),
            self.runs.union(e.run for e in again),
            self.ordered.union(e.run for e in again if e.run in self.runs and e.point in self.points),
        )


def _before(graph: Graph, operator: int) -> int:
    """The compulsory operator before another, or -1."""
    return next((i for i in range(operator - 1, -1, -1) if not graph.operators[i].optional), -1)


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


def first_places(graph: Graph, costs: Costs, schedule: Schedule) -> Places:
    """The place where ``schedule`` has its peak, which is where memory has to be looked at first."""
    peak_bytes = simulate(graph, costs, schedule).peak_bytes
    return Places(tuple(sorted(e.point for e in find_excess(graph, costs, peak_bytes - 1, schedule, ()))))


def all_places(graph: Graph, seconds: float) -> Places | None:
    """Every operator of the backward pass and every run again; None where such a program is too large.

    It bounds best: on a U-Net at a third of its activations 38% where eight points that grow to where its schedules are
    over the budget give 20%. ``seconds`` is the time there is.
    """
    points = tuple(op.id for op in graph.operators[graph.forward_count :] if not op.optional)
    if len(points) * graph.forward_count > _PLACES_PER_SECOND * seconds:
        return None
    return Places(points, frozenset(range(graph.forward_count)))


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
        relaxation = relax(graph, costs, budget_bytes, places.points, options, places.runs, ordered=places.ordered)
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
        over = [] if schedule is None else find_excess(graph, costs, budget_bytes, schedule, places.points)
        finer = places.also(graph, over)
        if finer == places or result.status != "optimal" or interrupted or best >= enough_seconds:
            break
        places = finer
    return Bound(best, places, schedule, interrupted)


@dataclass(frozen=True, slots=True)
class Excess:
    """A place where a schedule is over the budget.

    Attributes:
        nbytes: by how much.
        point: the compulsory operator that runs there, or the next one.
        run: the forward operator that runs there again, or -1.
    """

    nbytes: int
    point: int
    run: int


def find_excess(
    graph: Graph, costs: Costs, budget_bytes: int, schedule: Schedule, points: Sequence[int], most: int = 1
) -> list[Excess]:
    """Where ``schedule`` is over the budget: in every segment the worst ``most`` steps, the worst first."""
    during = simulate(graph, costs, schedule).during_bytes
    steps = schedule.forward + schedule.backward
    found: dict[int, list[Excess]] = {}
    point = -1
    for i in range(len(steps) - 1, -1, -1):
        op = graph.operators[steps[i].operator]
        part = FORWARD if i < len(schedule.forward) else BACKWARD
        again = op.phase != part or op.optional
        if not again:
            point = op.id
        if during[i] > budget_bytes and point >= 0:
            excess = Excess(during[i] - budget_bytes, point, op.id if again else -1)
            found.setdefault(bisect.bisect_left(points, point), []).append(excess)
    return [e for places in found.values() for e in sorted(places, key=lambda e: -e.nbytes)[:most]]
