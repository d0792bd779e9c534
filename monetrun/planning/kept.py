"""Whether a record or a plan that was kept is that of this launch: judged before it is used.

The cache's checksums show what was damaged, not what another monetrun, another torch or a hand has written. So a plan's
schedules and numbers are compared with what the replay of its record gives. Each ``PlanMismatch`` makes it a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

from monetrun.core.budget import Budget, format_bytes, resolve
from monetrun.core.errors import PlanMismatch, ScheduleError
from monetrun.core.graph import Costs, Graph
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import GraphPlan, Plan, Schedule, StepSchedules
from monetrun.core.simulate import judge, simulate
from monetrun.core.step import StepRecord, replay
from monetrun.planning.device_budget import plain_allocated_bytes
from monetrun.planning.explain import describes


def check_torch(made_with: str, torch_version: str, what: str = "it") -> None:
    """Check the version of torch that a plan or a record was made with.

    Args:
        made_with: the version that it names.
        torch_version: that is used here.
        what: was made, for the message.

    Raises:
        PlanMismatch: it is another one.
    """
    if made_with.partition("+")[0] != torch_version.partition("+")[0]:
        raise PlanMismatch(
            f"{what} was made with torch {made_with}, this is {torch_version}", "plan again: its graphs may differ"
        )


def check_plan(plan: Plan, record: StepRecord, budget: Budget, budget_bytes: int | None) -> None:
    """Check that ``plan`` is what a solver may have made from ``record`` for this budget.

    Args:
        plan: from the cache.
        record: of the step.
        budget: of the launch.
        budget_bytes: None where the budget is a share of the plain peak.

    Raises:
        PlanMismatch: it was made with another torch, for other graphs or another budget, a schedule breaks the rules
            of the replay, or the peaks are not those of the replay.
    """
    check_torch(plan.torch_version, record.torch_version)
    if not describes(record, plan):
        raise PlanMismatch("its graphs or its peak are not those of the recorded step", "plan again")
    plain = replay(*plain_step(record)).peak_bytes
    if plan.plain_peak_bytes != (plain if record.memory is None else plain_allocated_bytes(record)):
        raise PlanMismatch(f"its plain peak is {format_bytes(plan.plain_peak_bytes)}, not the step's", "plan again")
    if budget_bytes is None:
        budget_bytes = resolve(budget, None, plain if plan.pool is None else plan.pool.plain_bytes)
    if plan.budget_bytes != budget_bytes:
        raise PlanMismatch(
            f"its budget is {plan.budget_bytes} bytes, not {budget_bytes} as the launch has it", "plan again"
        )


def check_schedules(schedules: StepSchedules, graphs: Sequence[Graph]) -> None:
    """Check that ``schedules`` can run ``graphs``.

    Raises:
        PlanMismatch: they are of other graphs.
        ScheduleError: one breaks the rules of the replay.
    """
    if [s.fingerprint for s in schedules.graphs] != [g.fingerprint for g in graphs]:
        raise PlanMismatch("its graphs are not those of the recorded step", "plan again")
    for kept, graph in zip(schedules.graphs, graphs, strict=True):
        judge(graph, kept.schedule_for(graph))


def carry_over(plan: GraphPlan, graph: Graph, costs: Costs, budget_bytes: int) -> Schedule | None:
    """The schedule of ``plan`` for the same model at other shapes; None where it is not valid there or does not fit.

    Implementations are resolved by name, see ``GraphPlan.schedule_for``.
    """
    schedule = plan.schedule_for(graph)
    try:
        peak = simulate(graph, costs, schedule).peak_bytes
    except ScheduleError:
        return None
    return schedule if peak <= budget_bytes else None
