"""Schedules for graphs that the plan does not have: the same model at other shapes, such as the last, smaller batch."""

from __future__ import annotations

import torch

from monetrun.capture.joint import JointGraph
from monetrun.core.budget import format_bytes
from monetrun.core.errors import InfeasibleBudget, PlanMismatch
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Plan, Schedule, Solution
from monetrun.core.simulate import simulate
from monetrun.core.step import StepRecord, call_footprint, replay
from monetrun.planning import planner
from monetrun.solve import greedy

# What a loss allocates between forward and backward, as a multiple of the model's outputs, where no step was recorded:
# log-probabilities, their gradient, and the logits' gradient.
_LOSS_COPIES = 3


def adapted_schedule(graph: Graph, costs: Costs, plan: Plan, available_bytes: int, options: Options) -> Schedule:
    """A schedule for ``graph``: one of the plan's, if it fits at these shapes, or a new one.

    Args:
        graph: without implementations that must not run.
        costs: of it.
        plan: for other shapes.
        available_bytes: the budget, less what is allocated outside this graph.
        options: for the solver.

    Raises:
        InfeasibleBudget: nothing fits.
    """
    for candidate in plan.graphs:
        if candidate.structural_fingerprint == graph.structural_fingerprint:
            carried = planner.carry_over(candidate, graph, costs, available_bytes)
            if carried is not None:
                return carried
    solution: Solution = greedy.solve(graph, costs, available_bytes, options)
    if solution.schedule is not None:
        return solution.schedule
    frugal = greedy.most_frugal(graph, costs)
    peak = simulate(graph, costs, frugal).peak_bytes
    if peak <= available_bytes:
        return frugal
    smallest = plan.budget_bytes - available_bytes + peak
    raise InfeasibleBudget(
        f"{graph.name} at these shapes needs {format_bytes(smallest, exact=True)} at least, "
        f"the budget is {format_bytes(plan.budget_bytes)}",
        "give more (--budget), or feed smaller batches",
        budget_bytes=plan.budget_bytes,
        smallest_bytes=smallest,
    )


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


def outside_bytes(joint: JointGraph, record: StepRecord | None, plan: Plan) -> int:
    """An estimate of the bytes that the step allocates outside this graph between its forward and its backward.

    Scaled by the bytes of the graph's outputs from what ``record`` has of the same graph at other shapes.
    """
    graph = joint.graph
    outputs = {joint.storage[n] for n in joint.outputs if isinstance(n, torch.fx.Node) and n in joint.storage}
    now = sum(graph.tensors[t].nbytes for t in outputs if not graph.tensors[t].external)
    for k, known in enumerate(record.graphs if record is not None else ()):
        if record is not None and known.structural_fingerprint == graph.structural_fingerprint:
            recorded = sum(t.nbytes for t in known.tensors if t.id in outputs and not t.external)
            outside = _recorded_outside_bytes(record, [g.schedule for g in plan.graphs], k)
            return int(outside * max(1.0, now / recorded)) if recorded else outside
    return _LOSS_COPIES * now


def _recorded_outside_bytes(record: StepRecord, schedules: list[Schedule], k: int) -> int:
    """How much more is allocated under graph ``k``'s backward than under its forward, at most."""
    starts = list(zip(record.events, replay(record, schedules).start_bytes, strict=True))
    saved = call_footprint(record.graphs[k], record.costs[k], schedules[k]).saved_bytes
    forward = [start for event, start in starts if event.graph == k and event.kind == FORWARD]
    backward = [start - saved for event, start in starts if event.graph == k and event.kind == BACKWARD]
    return max(0, max(backward, default=0) - min(forward, default=0))
