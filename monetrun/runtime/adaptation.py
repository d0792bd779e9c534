"""Schedules for graphs that the plan does not have: the same model at other shapes, such as the last, smaller batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from monetrun.capture.joint import JointGraph
from monetrun.core import last_gradients
from monetrun.core.call_footprint import call_footprint
from monetrun.core.errors import PlanMismatch
from monetrun.core.graph import BACKWARD, EXACT, FORWARD, KINDS, Costs, Graph, counterpart
from monetrun.core.options import Options
from monetrun.core.plan import GraphPlan, Plan, Schedule
from monetrun.core.reserved import reserved
from monetrun.core.step import LAST_GRADIENTS, OUTSIDE, DeviceMemory, Event, StepRecord, replay
from monetrun.planning import kept, planner
from monetrun.solve import greedy

# What a loss allocates between forward and backward, as a multiple of the model's outputs, where no step was recorded:
# log-probabilities, their gradient, and the logits' gradient.
_LOSS_COPIES = 3
# Inputs whose shapes a message names.
_SHAPES_NAMED = 3


@dataclass(frozen=True, slots=True)
class Outside:
    """What the script allocates and frees between a graph's forward and its backward, in bytes.

    Attributes:
        held_bytes: allocated then, and still there when the backward begins.
        peak_bytes: allocated at most.
        gradients_bytes: of the last step's gradients, which it frees then.
    """

    held_bytes: int
    peak_bytes: int
    gradients_bytes: int = 0


def step_of(
    graph: Graph, costs: Costs, held_bytes: int, outside: Outside, exact: bool, memory: DeviceMemory | None = None
) -> StepRecord:
    """A training step of one graph.

    Args:
        graph: without implementations that must not run.
        costs: of it.
        held_bytes: allocated when its forward begins.
        outside: what the script allocates and frees between its forward and its backward.
        exact: whether bytes are counted by the allocator.
        memory: of the device, where its allocator reserves more than it gives out.
    """
    events, base_bytes = events_of(outside), held_bytes - outside.gradients_bytes
    return StepRecord((graph,), (costs,), events, base_bytes, {}, costs.device, torch.__version__, exact, memory)


def events_of(outside: Outside) -> tuple[Event, ...]:
    """The events of a step of one graph, between whose forward and backward the script allocates and frees this."""
    gradients = outside.gradients_bytes
    return (
        *([last_gradients.are_there(gradients)] if gradients else []),
        Event(FORWARD, 0),
        Event(OUTSIDE, -1, outside.held_bytes, outside.peak_bytes),
        *([last_gradients.are_freed(gradients)] if gradients else []),
        Event(BACKWARD, 0),
        Event(OUTSIDE, -1, -outside.held_bytes, 0),
    )


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
    available = budget_bytes - step.base_bytes
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


def outside(
    joint: JointGraph, record: StepRecord | None, schedules: Sequence[Schedule], gradients_bytes: int = 0
) -> Outside:
    """An estimate of what the step allocates outside this graph between its forward and its backward.

    Scaled by the bytes of the graph's outputs from what ``record`` has of the same graph at other shapes, under
    ``schedules`` of its graphs. Gradients are not scaled: of the ``gradients_bytes`` held now, as many are freed as in
    ``record``, where that has one call of the graph; none where fewer are held.
    """
    graph = joint.graph
    outputs = {joint.storage[n] for n in joint.outputs if isinstance(n, torch.fx.Node) and n in joint.storage}
    now = sum(graph.tensors[t].nbytes for t in outputs if not graph.tensors[t].external)
    for k, known in enumerate(record.graphs if record is not None else ()):
        if record is not None and known.structural_fingerprint == graph.structural_fingerprint:
            recorded = sum(t.nbytes for t in known.tensors if t.id in outputs and not t.external)
            growth = max(1.0, now / recorded) if recorded else 1.0
            then = _recorded_outside(record, schedules, k)
            freed = then.gradients_bytes if then.gradients_bytes <= gradients_bytes else 0
            return Outside(math.ceil(then.held_bytes * growth), math.ceil(then.peak_bytes * growth), freed)
    return Outside(_LOSS_COPIES * now, _LOSS_COPIES * now)


def _recorded_outside(record: StepRecord, schedules: Sequence[Schedule], k: int) -> Outside:
    """How much more is allocated under graph ``k``'s backward, and before it, than under its forward, at most.

    The last step's gradients that are freed meanwhile are counted apart, where the step has one call of the graph.
    """
    timeline = replay(record, schedules)
    saved = call_footprint(record.graphs[k], record.costs[k], schedules[k]).saved_bytes
    held = peak = freed = calls = 0
    forwards: list[int] = []  # calls without a backward yet: the events after them
    for i, event in enumerate(record.events):
        if event.graph != k:
            continue
        if event.kind == FORWARD:
            forwards.append(i + 1)
            calls += 1
        elif forwards:
            first, freed = forwards.pop(), 0
            before = timeline.start_bytes[first - 1] + saved
            for j in range(first, i):
                peak = max(peak, timeline.high_bytes[j] + freed - before)
                if record.events[j].name == LAST_GRADIENTS:
                    freed -= record.events[j].delta_bytes
            held = max(held, timeline.start_bytes[i] + freed - before)
    return Outside(held, max(held, peak), freed if calls == 1 else 0)
