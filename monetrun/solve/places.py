"""Where a relaxed program (``monetrun.solve.relaxation``) checks memory, and where the next one has to.

Its solution, written as a schedule and replayed, is over the budget where memory was not checked.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.plan import Schedule
from monetrun.core.simulate import simulate

# pairs of point and forward operator in the largest program whose root relaxation and cuts SCIP 10 solves in a second,
# on one 2.6 GHz Zen 4 core (2026-11)
_PLACES_PER_SECOND = 2000.0


@dataclass(frozen=True)
class Places:
    """Where a relaxed program checks memory.

    Attributes:
        points: compulsory operators, ascending.
        runs: forward operators, at whose reruns memory is checked as well.
        ordered: those of ``runs`` for which the program models what runs before and after (``monetrun.solve.order``).
    """

    points: tuple[int, ...]
    runs: frozenset[int] = frozenset()
    ordered: frozenset[int] = frozenset()

    def also(self, graph: Graph, over: Sequence[Excess]) -> Places:
        """These places, and those where a schedule is over the budget.

        Runs between two points have no order. So where a rerun is over, its segment is reduced to what runs between
        two compulsory operators; where it is over again, its order is modelled.
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


def first_places(graph: Graph, costs: Costs, schedule: Schedule) -> Places:
    """The place where ``schedule`` has its peak, which is where memory has to be checked first."""
    peak_bytes = simulate(graph, costs, schedule).peak_bytes
    over = find_excess(graph, costs, peak_bytes - 1, schedule, Places(()))
    return Places(tuple(sorted(e.point for e in over)))


def all_places(graph: Graph, seconds: float) -> Places | None:
    """Every operator of the backward pass and every rerun; None where such a program is too large for ``seconds``.

    It bounds best: on a U-Net at a third of its activations 38%, where eight points added where its schedules are over
    the budget give 20%.
    """
    points = tuple(op.id for op in graph.operators[graph.forward_count :] if not op.optional)
    if len(points) * graph.forward_count > _PLACES_PER_SECOND * seconds:
        return None
    return Places(points, frozenset(range(graph.forward_count)))


@dataclass(frozen=True, slots=True)
class Excess:
    """A place where a schedule is over the budget.

    Attributes:
        nbytes: by how much.
        point: the compulsory operator that runs there, or the next one.
        run: the forward operator that reruns there, or -1.
    """

    nbytes: int
    point: int
    run: int


def find_excess(graph: Graph, costs: Costs, budget_bytes: int, schedule: Schedule, places: Places) -> list[Excess]:
    """Where ``schedule`` is over the budget: the worst step between each two points of ``places``."""
    during = simulate(graph, costs, schedule).during_bytes
    steps = schedule.forward + schedule.backward
    worst: dict[int, Excess] = {}  # by segment
    point = -1
    for i in range(len(steps) - 1, -1, -1):
        op = graph.operators[steps[i].operator]
        part = FORWARD if i < len(schedule.forward) else BACKWARD
        again = op.phase != part or op.optional
        if not again:
            point = op.id
        if during[i] > budget_bytes and point >= 0:
            excess = Excess(during[i] - budget_bytes, point, op.id if again else -1)
            segment = bisect.bisect_left(places.points, point)
            if segment not in worst or excess.nbytes > worst[segment].nbytes:
                worst[segment] = excess
    return list(worst.values())
