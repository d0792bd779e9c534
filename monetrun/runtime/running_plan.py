"""The plan that runs: a schedule for every graph, also for those that it does not have, and planning again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from monetrun.capture import cost
from monetrun.capture.cost import OperatorCost
from monetrun.capture.guards import FailedGuards
from monetrun.capture.joint import JointGraph
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, PlanMismatch
from monetrun.core.plan import Plan, Schedule
from monetrun.core.step import LIBRARIES, StepRecord, with_excess
from monetrun.planning import planner
from monetrun.planning.intervals import Interval, intervals, optimizer_steps
from monetrun.runtime import adaptation, agreement, pool
from monetrun.runtime.allocation_limit import set_limit
from monetrun.runtime.ruled_out import RuledOut
from monetrun.runtime.settings import Settings
from monetrun.runtime.step_meter import StepMeter

# A new shape is solved within a training step: no longer than this.
_ADAPTATION_SECONDS = 2.0


class RunningPlan:
    """Gives graphs their schedules, and keeps allocations within the plan's budget.

    Args:
        settings: of the process.
        device: of the models.
        steps: measures the steps under the plan.
        known: measured costs, by the operators' signatures; those of new shapes are added.
        plan: to run.
        record: of the planned step, where known.

    Attributes:
        schedules: by the graphs' fingerprints: the plan's, and those for other shapes.
        excess_bytes: what planned steps reserved beyond the plan, once seen.

    Raises:
        PlanMismatch: the plan was made with another torch.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        steps: StepMeter,
        known: dict[str, OperatorCost],
        plan: Plan,
        record: StepRecord | None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.steps = steps
        self.known = known
        self.record = record
        self.excess_bytes = 0 if record is None or record.memory is None else record.memory.excess_bytes
        self._ruled_out = RuledOut()
        if record is not None:
            self._ruled_out.add_recorded(record)
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        if plan.torch_version.split("+")[0] != torch.__version__.split("+")[0]:
            raise PlanMismatch(
                f"the plan was made with torch {plan.torch_version}, this is {torch.__version__}",
                "plan again: its graphs may differ",
            )
        self.plan = plan
        self.schedules: dict[str, Schedule] = {g.fingerprint: g.schedule for g in plan.graphs}
        if plan.pool is not None and self.device.type == "cuda":
            set_limit(self.device, None)
            pool.hold(self.device, plan.pool, bool(plan.ledger.get(LIBRARIES)))
        set_limit(self.device, plan.budget_bytes)
        self.steps.measure_a_settled_step(0 if self.record is None else optimizer_steps(self.record))

    def replan_without(self, failed: FailedGuards) -> None:
        """Use implementations whose guards failed no more: plan again without them, in rank 0 for all ranks.

        Without a record only the graph's schedule is dropped: it gets another one when it is captured again.

        Raises:
            InfeasibleBudget, NoPlanInTime: without them nothing fits the budget.
        """
        self._ruled_out.add_failed(failed)
        self.schedules.pop(failed.graph.fingerprint, None)
        if self.record is None:
            return
        record = self._ruled_out.record_without(self.record)
        if record == self.record:
            return
        self.record = record
        budget_bytes, algorithm = self.plan.budget_bytes, self.settings.algorithm
        options = self.settings.solver_options()
        made = agreement.plan_in_rank_0(
            lambda: planner.plan_step(record, budget_bytes, algorithm, options), self.device
        )
        self._follow(made)

    def correct(self, warn: Callable[[str], None]) -> bool:
        """Plan again, with a warning, where the first planned steps reserved more than the plan says.

        Gives whether that was done. Only in a process of its own, since ranks may see different excesses; the launcher
        keeps what was seen, so that the next launch plans with it.
        """
        memory = None if self.record is None else self.record.memory
        if self.record is None or memory is None or self.plan.pool is None:
            return False
        excess = self.steps.reserved_bytes - self.plan.pool.planned_bytes
        if self.steps.retries:  # what was free in pieces was given back to the driver, so that it was not reserved
            excess = max(excess, memory.settings.large_segment_bytes)
        if excess <= 0:
            return False
        self.excess_bytes = memory.excess_bytes + excess
        if agreement.several_ranks():
            return False
        record = with_excess(self.record, self.excess_bytes)
        budget_bytes, options = self.plan.budget_bytes, self.settings.solver_options()
        try:
            plan = planner.plan_step(record, budget_bytes, self.settings.algorithm, options)
        except (InfeasibleBudget, NoPlanInTime) as failure:
            warn(f"planned steps reserve more than was planned, and no other plan was found: {failure}")
            return False
        warn("the first planned steps reserved more than was planned: planned again with what was seen")
        self.record = record
        self._follow(plan)
        self.steps.forget_peaks()
        return True

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's index in the record (-1: none), and its schedule: the plan's, or one for the graph's shapes.

        Raises:
            InfeasibleBudget: nothing fits beside what is allocated now.
            PlanMismatch: the plan that the user gave is of another model.
        """
        fingerprint = joint.graph.fingerprint
        if fingerprint not in self.schedules:
            self.schedules[fingerprint] = self._adapted(joint)
        recorded = () if self.record is None else self.record.graphs
        number = next((k for k, graph in enumerate(recorded) if graph.fingerprint == fingerprint), -1)
        return number, self.schedules[fingerprint]

    def _adapted(self, joint: JointGraph) -> Schedule:
        """A schedule for a graph that the plan does not have, within what is left of the budget now."""
        meter = self.steps.meter
        self.steps.interrupt()
        self.known.update(cost.measure(joint, self.known, meter, self.device))
        meter.reset_peak()  # that of the measurement
        graph = self._ruled_out.without(cost.as_tried(joint, self.known))
        if self.settings.plan_given:
            adaptation.check_same_model(graph, self.plan)
        costs = cost.costs_of(joint, self.known, str(self.device))
        outside = adaptation.outside_bytes(joint, self.record, self.plan)
        available = self.plan.budget_bytes - meter.current_bytes() - outside
        options = self.settings.solver_options(min(_ADAPTATION_SECONDS, self.settings.solver_seconds))
        return adaptation.adapted_schedule(graph, costs, self.plan, available, options)

    def intervals(self) -> tuple[Interval, ...]:
        """Planned and measured bytes of one settled step; empty where the plan does not cover what was measured."""
        if self.record is None or not self.steps.stretches:
            return ()
        fingerprints = [graph.fingerprint for graph in self.record.graphs]
        if not self.schedules.keys() >= set(fingerprints):
            return ()
        return intervals(self.record, [self.schedules[f] for f in fingerprints], self.steps.stretches)
