"""Runs the planned models of one process: record a step, plan it, run the plan, keep other shapes within its budget."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from monetrun.capture import cost, cost_store, roofline
from monetrun.capture.guards import Failed
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import meter_for
from monetrun.core import codec
from monetrun.core.budget import parse, resolve
from monetrun.core.errors import PlanMismatch
from monetrun.core.plan import Plan, Schedule
from monetrun.core.step import StepRecord
from monetrun.machine.device import default_kind, query, smallest
from monetrun.machine.store import Store
from monetrun.ops import kernels
from monetrun.planning import planner
from monetrun.planning.intervals import Interval, intervals, optimizer_steps
from monetrun.runtime import adaptation, agreement, probe
from monetrun.runtime.allocation_limit import set_limit
from monetrun.runtime.backend import Backend, PlannedCallMeters
from monetrun.runtime.call_timing import CallTiming
from monetrun.runtime.recorder import Recorder
from monetrun.runtime.ruled_out import RuledOut
from monetrun.runtime.settings import PROBE, Settings
from monetrun.runtime.step_meter import StepMeter

_log = logging.getLogger("monetrun")

# A new shape is solved within a training step: no longer than this.
_ADAPTATION_SECONDS = 2.0


class Engine:
    """Chooses the schedules of all captured graphs, and measures what running them takes.

    Without a plan the first step is recorded; when it has ended it is planned.

    Args:
        settings: of the process.
        device: of the models.
        trained_parameters: gives the parameters of all optimizers.
        warn: called with what the user should know.
        plan: to run; None: that of ``settings``, if any.

    Attributes:
        generation: goes up when models have to be compiled anew.
        plan: that runs, once there is one.
        record: of the planned step, where known.
        schedules: that run under the plan, by the graphs' fingerprints.
        recorder: while a step is recorded.
        known: measured costs, by the operators' signatures.
        budget_bytes: of the process on its device; 0 before it is known.

    Raises:
        PlanMismatch: the plan was made with another torch, or is not rank 0's.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        trained_parameters: Callable[[], list[torch.Tensor]],
        warn: Callable[[str], None],
        plan: Plan | None = None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.trained_parameters = trained_parameters
        self.warn = warn
        self.meter = meter_for(device)
        if not kernels.load(device.type):
            _log.info("torch.ops.monet runs its references: %s", kernels.unavailable_reason(device.type))
        self.store = Store(Path(settings.cache_folder)) if settings.cache_folder else None
        self.known = cost_store.load(self.store, device)
        self.meters = PlannedCallMeters(CallTiming(self.meter), StepMeter(self.meter))
        self.generation = 0
        self.budget_bytes = settings.budget_bytes
        self.plan: Plan | None = None
        self.record: StepRecord | None = None
        self.schedules: dict[str, Schedule] = {}
        self.recorder: Recorder | None = None
        self._ruled_out = RuledOut()
        self._step_recorded = False
        self._compiled = False  # a graph, since traces were dropped last
        if plan is None and settings.plan_file:
            plan = codec.loads(Plan, Path(settings.plan_file).read_text())
        if plan is None:
            self.recorder = Recorder(self.meter, device, self.known, roofline.parse(settings.cost_model))
            return
        if settings.record_file:
            self._keep_record(codec.loads(StepRecord, Path(settings.record_file).read_text()))
        self._follow(plan)
        agreement.check_same_plan(plan)

    def close(self) -> None:
        """Lift the allocation limit, and drop what refers to parameters: torch keeps its last backend, and so this."""
        set_limit(self.device, None)
        self.recorder = None

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated in any training step under a plan so far."""
        return self.meters.steps.peak_bytes

    # ---- the plan

    def _follow(self, plan: Plan) -> None:
        """From now on run ``plan``, and limit allocations to its budget."""
        if plan.torch_version.split("+")[0] != torch.__version__.split("+")[0]:
            raise PlanMismatch(
                f"the plan was made with torch {plan.torch_version}, this is {torch.__version__}",
                "plan again: its graphs may differ",
            )
        self.plan = plan
        self.schedules = {g.fingerprint: g.schedule for g in plan.graphs}
        self.budget_bytes = plan.budget_bytes
        set_limit(self.device, plan.budget_bytes)
        self.meters.steps.measure_a_settled_step(0 if self.record is None else optimizer_steps(self.record))

    def _keep_record(self, record: StepRecord) -> None:
        self.record = record
        self._ruled_out.add_recorded(record)

    def _plan_recorded_step(self) -> None:
        """Plan the recorded step, in rank 0 for all, and have all models compiled anew."""
        assert self.recorder is not None
        self._drop_traces()
        record = self.recorder.record(self.recorder.measure(self.store))
        self.known.update(self.recorder.known)
        plan = agreement.plan_in_rank_0(lambda: self._planned(record))
        self._keep_record(record)
        self._follow(plan)
        self.recorder = None
        self.generation += 1

    def _planned(self, record: StepRecord) -> Plan:
        base = planner.baseline(record)
        budget = parse(self.settings.budget)
        free = None
        if budget.kind in ("auto", "share_of_free"):
            free = smallest(query(default_kind())).free_bytes + self.meter.current_bytes()
        budget_bytes = self.settings.budget_bytes or resolve(budget, free, base.plain.peak_bytes)
        options = self.settings.solver_options()
        return planner.plan_step(record, budget_bytes, self.settings.algorithm, options, base)

    def plan_without(self, failed: Failed) -> None:
        """Plan again without implementations whose guards failed, and have all models compiled anew.

        All ranks have the same weights, so that all of them get here in the same step.

        Raises:
            InfeasibleBudget, NoPlanInTime: without them nothing fits the budget.
        """
        rest = f" and {len(failed.guards) - 1} more" if len(failed.guards) > 1 else ""
        self.warn(f"the weights no longer allow {failed.guards[0].name}{rest}: planning again without")
        self._ruled_out.add_failed(failed)
        self.schedules.pop(failed.graph.fingerprint, None)
        if self.record is not None:
            record = self._ruled_out.record_without(self.record)
            if record != self.record:
                self.record = record
                budget_bytes, options = self.budget_bytes, self.settings.solver_options()
                self._follow(
                    agreement.plan_in_rank_0(
                        lambda: planner.plan_step(record, budget_bytes, self.settings.algorithm, options)
                    )
                )
        self.generation += 1

    # ---- compiling

    def backend(self, name: str) -> Backend:
        """The compiler backend for the model called ``name``."""
        if self.recorder is not None:
            return Backend(self, name, observer=self)
        return Backend(self, name, meters=self.meters)

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's index in the record (-1: none), and its schedule: the plan's, or one for the graph's shapes.

        Raises:
            InfeasibleBudget: nothing fits beside what is allocated now.
            PlanMismatch: the plan that the user gave is of another model.
        """
        self._compiled = True
        if self.recorder is not None:
            return self.recorder.choose(joint)
        fingerprint = joint.graph.fingerprint
        if fingerprint not in self.schedules:
            self.schedules[fingerprint] = self._adapted(joint)
        recorded = () if self.record is None else self.record.graphs
        number = next((k for k, graph in enumerate(recorded) if graph.fingerprint == fingerprint), -1)
        return number, self.schedules[fingerprint]

    def _adapted(self, joint: JointGraph) -> Schedule:
        """A schedule for a graph that the plan does not have, within what is left of the budget now."""
        assert self.plan is not None
        self.meters.steps.interrupt()
        self.known.update(cost.measure(joint, self.known, self.meter, self.device))
        self.meter.reset_peak()  # that of the measurement
        graph = self._ruled_out.without(cost.as_tried(joint, self.known))
        costs = cost.costs_of(joint, self.known, str(self.device))
        outside = adaptation.outside_bytes(joint, self.record, self.plan)
        available = self.budget_bytes - self.meter.current_bytes() - outside
        if self.settings.plan_given:
            adaptation.check_same_model(graph, self.plan)
        options = self.settings.solver_options(min(_ADAPTATION_SECONDS, self.settings.solver_seconds))
        return adaptation.adapted_schedule(graph, costs, self.plan, available, options)

    def _drop_traces(self) -> None:
        """After compiling: Dynamo's trace of a frame that it left alone holds that call's batch, in a cycle."""
        if self._compiled:
            self._compiled = False
            gc.collect()

    # ---- the step

    def call_begins(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph is about to run, while a step is recorded."""
        if self.recorder is not None:
            self.recorder.call_begins(phase, graph, arguments)

    def call_ended(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """It has run."""
        if self.recorder is not None:
            self.recorder.call_ended(phase, graph, results)

    def forward_begins(self) -> None:
        """A planned model is called in training."""
        if self.recorder is not None and self._step_recorded and self.settings.mode != PROBE:
            self._plan_recorded_step()
        if self.recorder is None:
            self.meters.steps.forward_begins()

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``."""
        if self.recorder is not None and not self._step_recorded:
            self.recorder.zeroing_gradients(parameters, set_to_none)

    def optimizer_begins(self, again: bool) -> None:
        """An optimizer's step begins. A trial run ends where one begins its second step (``again``)."""
        if self.recorder is None:
            self.meters.steps.optimizer_begins()
            return
        if again and self.settings.mode == PROBE:
            self._end_trial()
        self.recorder.optimizer_begins()

    def optimizer_ended(self, name: str, all_stepped: bool) -> None:
        """An optimizer's step has ended; ``all_stepped``: every optimizer has made at least one."""
        if self.recorder is None:
            self.meters.steps.optimizer_ended(name)
            self._drop_traces()
            return
        self.recorder.optimizer_ended(name, self.trained_parameters())
        self._step_recorded |= all_stepped and self.recorder.complete
        if all_stepped and self.settings.mode == PROBE:
            self._end_trial()

    def _end_trial(self) -> None:
        """Write the record and end the process."""
        assert self.recorder is not None
        record = self.recorder.record(self.recorder.measure(self.store))
        probe.leave(record, self.settings.record_file)

    # ---- the report

    def findings(self) -> dict[str, Any]:
        """What was planned and measured in this process, for the launcher."""
        return {
            "measured_peak_bytes": self.peak_bytes,
            "measured_overhead": self.meters.timing.overhead(),
            "steps": self.meters.steps.steps,
            "exact": self.meter.exact,
            "plan": None if self.plan is None else codec.to_plain(self.plan),
            "intervals": codec.to_plain(self.intervals()),
        }

    def intervals(self) -> tuple[Interval, ...]:
        """Planned and measured bytes of one settled step; empty where the plan does not cover what was measured."""
        if self.record is None or not self.meters.steps.stretches:
            return ()
        schedules = [self.schedules.get(graph.fingerprint) for graph in self.record.graphs]
        known = [schedule for schedule in schedules if schedule is not None]
        return intervals(self.record, known, self.meters.steps.stretches) if len(known) == len(schedules) else ()
