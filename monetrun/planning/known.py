"""Schedules that are known of a model before it is planned: those that come with monetrun, or those of other machines.

They are found by the structure of the step's graphs, whatever batch size, device and costs they were made for. So they
are where planning begins and never its result: each is judged by the replay, and the planner takes what is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from monetrun.core.errors import PlanMismatch, ScheduleError
from monetrun.core.graph import Graph
from monetrun.core.left_out import without
from monetrun.core.options import Options
from monetrun.core.plan import PLAN_SCHEMA, Schedule, StepSchedules
from monetrun.core.simulate import judge
from monetrun.machine.store import Store, key
from monetrun.planning.kept import check_schedules


@dataclass(frozen=True, slots=True)
class KnownSchedules:
    """Schedules for the graphs of one training step, of which each plan has one for each graph."""

    steps: tuple[StepSchedules, ...]


def known_key(structures: Sequence[str]) -> str:
    """The key in the cache, of kind ``"plan"``.

    Args:
        structures: ``Graph.structural_fingerprint`` of each graph of the step.
    """
    return key("known", PLAN_SCHEMA, *structures)


def known_schedules(store: Store | None, graphs: Sequence[Graph], options: Options) -> list[tuple[Schedule, ...]]:
    """What the cache has for a step of ``graphs``: schedules that they can run, each once, to begin planning with.

    An implementation that a graph does not have or ``options`` do not allow is replaced by the default. Of what was
    made for these very shapes a schedule that breaks a rule makes all of it a miss, with one warning; of other shapes
    it is left out.
    """
    if store is None:
        return []
    name = known_key([graph.structural_fingerprint for graph in graphs])
    found = store.get("plan", name, KnownSchedules, partial(_check, graphs=graphs))
    allowed = [_allowed_only(graph, options) for graph in graphs]
    usable: dict[tuple[Schedule, ...], None] = {}
    for step in () if found is None else found.steps:
        schedules = step.schedules_for(allowed)
        try:
            for graph, schedule in zip(graphs, schedules, strict=True):
                judge(graph, schedule)
        except ScheduleError:
            continue
        usable[schedules] = None
    return list(usable)


def _check(known: KnownSchedules, graphs: Sequence[Graph]) -> None:
    """Check that ``known`` is of the structure of ``graphs``, and that they run what was made for their shapes.

    Raises:
        PlanMismatch: it is of other graphs.
        ScheduleError: a schedule breaks the rules of the replay.
    """
    structures, shapes = [g.structural_fingerprint for g in graphs], [g.fingerprint for g in graphs]
    for step in known.steps:
        if [plan.structural_fingerprint for plan in step.graphs] != structures:
            raise PlanMismatch("its graphs are not those of the recorded step", "import it again")
        if [plan.fingerprint for plan in step.graphs] == shapes:
            check_schedules(step, graphs)


def _allowed_only(graph: Graph, options: Options) -> Graph:
    """``graph`` with what ``options`` do not allow marked as not usable."""
    return without(
        graph,
        {
            (op.id, k)
            for op in graph.operators
            for k, implementation in enumerate(op.implementations)
            if not implementation.allowed_by(options.implementations)
        },
    )
