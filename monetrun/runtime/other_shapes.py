"""Graphs that the plan does not have, each with a step and a schedule of its own: other shapes, or another model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from monetrun.capture import cost
from monetrun.capture.cost import OperatorCost
from monetrun.capture.joint import JointGraph
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.plan import Plan, Schedule, plain_schedule
from monetrun.core.step import StepRecord
from monetrun.runtime import adaptation, moved_memory
from monetrun.runtime.room import Shortage
from monetrun.runtime.ruled_out import RuledOut
from monetrun.runtime.settings import Settings
from monetrun.runtime.step_meter import StepMeter
from monetrun.solve import greedy


class OtherShapes:
    """Of one process.

    Args:
        settings: of the process.
        device: of the models.
        steps: measures the steps under the plan.
        known: measured costs, by the operators' signatures; those of new shapes are added.
        note: called with a line for the user.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        steps: StepMeter,
        known: dict[str, OperatorCost],
        note: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.device = device
        self.steps = steps
        self.known = known
        self.note = note
        self._held_more: dict[str, int] = {}  # by fingerprint: bytes that may come to be held beside what is there

    def step(
        self, joint: JointGraph, ruled_out: RuledOut, record: StepRecord | None, plan: Plan
    ) -> tuple[StepRecord, int]:
        """The step of a graph that is about to run, and the plain step's peak in bytes; operators are measured now."""
        meter = self.steps.meter
        self.steps.interrupt()
        known = self.known
        try:
            known.update(cost.measure(joint, known, meter, self.device))
        except torch.OutOfMemoryError:  # more than the budget is held: bytes alone decide, and the refusal names them
            known = {**{signature: cost.estimate(*timed) for signature, timed in joint.timed.items()}, **known}
        meter.reset_peak()  # that of the measurement
        graph = ruled_out.without(cost.as_tried(joint, known))
        costs = cost.costs_of(joint, known, str(self.device))
        self._held_more.setdefault(graph.fingerprint, 0)

        def step_among(others: Sequence[Schedule]) -> StepRecord:
            outside = adaptation.outside(joint, record, others)
            return adaptation.step_of(graph, costs, meter.current_bytes(), outside, meter.exact)

        plain = [plain_schedule(g) for g in record.graphs] if record is not None else []
        return step_among([g.schedule for g in plan.graphs]), moved_memory.plain_peak(step_among(plain))

    def schedule(self, joint: JointGraph, step: StepRecord, plan: Plan, *, estimated: bool) -> Schedule:
        """A schedule for ``step`` within the plan's budget, with room for what may come to be held where possible.

        ``estimated``: what is left to the graph is a rough estimate, since the model is not captured whole, or no step
        was recorded: where nothing fits, the most frugal schedule runs, and the allocation limit decides.

        Raises:
            InfeasibleBudget, NoPlanInTime: nothing fits.
        """
        graph, limit = step.graphs[0], moved_memory.allocated_limit(plan)
        options = moved_memory.options_within_a_step(self.settings)
        schedule = None
        if more := self._held_more[graph.fingerprint]:
            with contextlib.suppress(InfeasibleBudget, NoPlanInTime):  # else what is there now has to be enough
                schedule = adaptation.adapted_schedule(step, plan, limit - more, options)
        if schedule is None:
            try:
                schedule = adaptation.adapted_schedule(step, plan, limit, options)
            except InfeasibleBudget as refused:
                if estimated:
                    return greedy.most_frugal(graph, step.costs[0], options)
                raise moved_memory.refused_shape(joint, step, plan, refused) from None
        if names := adaptation.inexact(graph, schedule):
            self.note(
                f"inputs of {adaptation.input_shapes(joint)}: {', '.join(names)} differ from eager by rounding;"
                " --implementations exact leaves them out"
            )
        return schedule

    def more_is_held(self, shortage: Shortage, budget_bytes: int) -> bool:
        """Have the graph's next schedule leave room for twice as much; False where the graph is the plan's own."""
        if shortage.fingerprint not in self._held_more:
            return False
        least = budget_bytes >> moved_memory.LEAST_COVER_SHIFT
        before = self._held_more[shortage.fingerprint]
        self._held_more[shortage.fingerprint] = max(least, 2 * shortage.excess_bytes, 2 * before)
        return True
