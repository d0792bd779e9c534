"""What a plan computes beside the plain step, as its measured counterpart has it (``runtime.call_timing``)."""

from __future__ import annotations

from collections import Counter

from monetrun.core.event import calls_of_graphs
from monetrun.core.graph import extra_share
from monetrun.core.plan import Plan, plain_schedule
from monetrun.core.step import StepRecord


def extra_work(record: StepRecord, plan: Plan) -> float:
    """Seconds that the plain step would not take, over the plan's other ones.

    Of operators that run again, and of slower implementations what they take longer. Unlike a plan's overhead this is
    not made up for by implementations that are faster than the default.

    Args:
        record: of the step.
        plan: of that step.
    """
    schedules = [graph.schedule for graph in plan.graphs]
    calls, extra, total = calls_of_graphs(record.events), 0.0, 0.0
    for k, (graph, costs, schedule) in enumerate(zip(record.graphs, record.costs, schedules, strict=True)):
        again = Counter(plain_schedule(graph).runs_again())  # for the script's own checkpoints
        ran: set[int] = set()
        for step in (*schedule.forward, *schedule.backward):
            op, of_op = graph.operators[step.operator], costs.seconds[step.operator]
            seconds = calls[k] * of_op[step.implementation]
            in_plain = op.id in ran and again[op.id] > 0
            again[op.id] -= in_plain
            total += seconds
            extra += seconds * extra_share(op, of_op, step.implementation, again=op.id in ran and not in_plain)
            ran.add(op.id)
    return extra / (total - extra) if total > extra else 0.0
