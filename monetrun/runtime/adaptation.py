"""Schedules for graphs that the plan does not have: the same model at other shapes, such as the last, smaller batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from monetrun.capture.joint import JointGraph
from monetrun.core.errors import PlanMismatch
from monetrun.core.graph import EXACT, KINDS, Graph, counterpart
from monetrun.core.options import Options
from monetrun.core.plain_step import plain_step, plain_timeline
from monetrun.core.plan import GraphPlan, Plan, Schedule
from monetrun.core.reserved import reserved
from monetrun.core.step import StepRecord, replay
from monetrun.planning import kept, planner
from monetrun.solve import greedy

# Inputs whose shapes a message names.
_SHAPES_NAMED = 3


def taken_bytes(step: StepRecord, schedule: Schedule) -> int:
    """What a step of one graph takes at most under ``schedule``: allocated, or, where it has ``memory``, reserved."""
    allocated = replay(step, [schedule]).peak_bytes
    return allocated if step.memory is None else max(allocated, reserved(step, [schedule]).peak_bytes)


def carried(step: StepRecord, known: Iterable[GraphPlan], budget_bytes: int) -> Iterator[Schedule]:
    """The ``known`` schedules of the same model that fit a step of one graph at other shapes; see ``adapted_schedule``.

    Where only what they hold for those shapes does not fit, without that.
    """
    graph, costs = step.graphs[0], step.costs[0]
    for candidate in known:
        if candidate.structural_fingerprint == graph.structural_fingerprint:
            schedule = kept.carry_over(candidate, graph, costs, budget_bytes - step.base_bytes)
            variants = () if schedule is None else dict.fromkeys((schedule, replace(schedule, holds=())))
            yield from [s for s in variants if taken_bytes(step, s) <= budget_bytes][:1]


def adapted_schedule(step: StepRecord, plan: Plan, budget_bytes: int, options: Options) -> Schedule:
    """A schedule for a step of one graph: one of the plan's, if it fits at these shapes, or a new one.

    As in every plan, implementations that are not exact are used only where nothing else fits or they save enough.

    Args:
        step: see ``step_of``.
        plan: for other shapes.
        budget_bytes: what the step may take, see ``taken_bytes``.
        options: for the solver.

    Raises:
        InfeasibleBudget, NoPlanInTime: nothing fits.
    """
    graph, costs = step.graphs[0], step.costs[0]
    beside = replay(*plain_step(step)).peak_bytes - plain_timeline(graph, costs).peak_bytes
    available = budget_bytes - beside
    starts = []
    for schedule in carried(step, plan.graphs, budget_bytes):
        if not inexact(graph, schedule):
            return schedule
        starts.append([schedule])
    kinds = KINDS if options.implementations is None else options.implementations
    for allowed in (replace(options, implementations=(*kinds, EXACT)), options):
        frugal = greedy.most_frugal(graph, costs, allowed, enough_bytes=available)
        if taken_bytes(step, frugal) <= budget_bytes:
            break
    known = planner.baseline(step, [frugal])
    made = planner.plan_step(step, budget_bytes, "greedy", options, known, starts)
    return made.graphs[0].schedule_for(graph)


def inexact(graph: Graph, schedule: Schedule) -> list[str]:
    """The implementations in ``schedule`` that are not bitwise identical to eager, by name; each once."""
    steps = (*schedule.forward, *schedule.backward)
    used = (graph.operators[s.operator].implementations[s.implementation] for s in steps)
    return sorted({implementation.name for implementation in used if not implementation.exact})


def signatures_used(joint: JointGraph, graph: Graph, plans: Iterable[GraphPlan]) -> set[str]:
    """Signatures of a graph's default implementations, and of those that known schedules of the model use.

    Args:
        joint: the graph.
        graph: the same, without implementations that must not run.
        plans: of the model at other shapes.
    """
    found = {row[0] for row in joint.signatures}
    for kept_graph in plans:
        if kept_graph.structural_fingerprint == graph.structural_fingerprint:
            schedule = kept_graph.schedule_for(graph)
            for step in (*schedule.forward, *schedule.backward):
                rows = joint.signatures[step.operator : step.operator + 1]  # none: a damaged plan, which does not fit
                if rows and step.implementation < len(rows[0]):
                    # an implementation in place has no more bytes than its counterpart
                    k = counterpart(graph.operators[step.operator], step.implementation)
                    found |= {rows[0][step.implementation], rows[0][k]}
    return found


def input_shapes(joint: JointGraph) -> str:
    """The shapes of the inputs that each step replaces, for messages: ``"16x3x224x224, 16"``."""
    shapes = []
    for node in joint.primals:
        if isinstance(node, torch.fx.Node) and joint.storage.get(node) in joint.transient:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shapes.append("x".join(map(str, value.shape)) or "scalar")
    return ", ".join(shapes[:_SHAPES_NAMED]) or "these shapes"


def check_same_model(graph: Graph, plan: Plan) -> None:
    """Check that ``plan`` has a graph with the structure of ``graph``.

    Raises:
        PlanMismatch: it has none.
    """
    if all(g.structural_fingerprint != graph.structural_fingerprint for g in plan.graphs):
        raise PlanMismatch(
            f"{graph.name} has a graph of {len(graph.operators)} operators that the plan does not have",
            "the plan is of another model, or the model has changed: monetrun plan writes a new one",
        )


def is_known(joint: JointGraph, record: StepRecord | None) -> bool:
    """Whether what a step of this graph leaves to the script follows from ``record``, which has it at other shapes.

    Not where the model is not captured whole, nor where its forward takes another way than in the recorded step, nor
    where it is another model with weights of other sizes: nobody has seen its optimizer's step.
    """
    if record is None or record.breaks:
        return False
    weights = {t for n in joint.primals if (t := joint.storage.get(n)) is not None and t not in joint.transient}
    now = joint.graph.tensors
    alike = (g for g in record.graphs if g.structural_fingerprint == joint.graph.structural_fingerprint)
    return any(all(g.tensors[t].nbytes == now[t].nbytes for t in weights) for g in alike)


def is_recorded(joint: JointGraph, record: StepRecord) -> bool:
    """Whether ``record`` has this graph, at these shapes or at others."""
    return any(g.structural_fingerprint == joint.graph.structural_fingerprint for g in record.graphs)
