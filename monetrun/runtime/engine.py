"""Runs the planned models of one process: record a step, plan it, run the plan, and measure how it goes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from monetrun.capture import cost_store, roofline
from monetrun.capture.guards import FailedGuards
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import meter_for
from monetrun.core import codec
from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.plan import Plan, Schedule
from monetrun.core.step import StepRecord
from monetrun.machine.store import Store
from monetrun.ops import kernels
from monetrun.planning import planner
from monetrun.runtime import agreement, probe
from monetrun.runtime.allocation_limit import set_limit
from monetrun.runtime.backend import Backend, PlannedCallMeters
from monetrun.runtime.budget_here import budget_here
from monetrun.runtime.call_timing import CallTiming
from monetrun.runtime.recorder import Recorder
from monetrun.runtime.running_plan import RunningPlan
from monetrun.runtime.settings import PROBE, Settings
from monetrun.runtime.step_meter import StepMeter

_log = logging.getLogger("monetrun")


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
        recorder: while a step is recorded.
        running: from then on, the plan that runs.
        known: measured costs, by the operators' signatures.

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
        self.meters = PlannedCallMeters(CallTiming(self.meter, self.known), StepMeter(self.meter))
        self.generation = 0
        self.recorder: Recorder | None = None
        self.running: RunningPlan | None = None
        self._step_recorded = False
        self._looked = False
        self._compiled = False  # a graph, since traces were dropped last
        if plan is None and settings.plan_file:
            plan = codec.loads(Plan, Path(settings.plan_file).read_text())
        if plan is None:
            model = roofline.parse(settings.cost_model)
            plain = AllocatorSettings() if settings.own_allocator else None
            self.recorder = Recorder(self.meter, device, self.known, model, plain)
            return
        record = codec.loads(StepRecord, Path(settings.record_file).read_text()) if settings.record_file else None
        self._run(plan, record)
        agreement.check_same_plan(plan, self.device)

    def close(self) -> None:
        """Lift the allocation limit, and drop what refers to parameters: torch keeps its last backend, and so this."""
        set_limit(self.device, None)
        self.recorder = None

    @property
    def plan(self) -> Plan | None:
        """The plan that runs, once there is one."""
        return None if self.running is None else self.running.plan

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated in any training step under a plan so far."""
        return self.meters.steps.peak_bytes

    # ---- the plan

    def _run(self, plan: Plan, record: StepRecord | None) -> None:
        self.running = RunningPlan(self.settings, self.device, self.meters.steps, self.known, plan, record)

    def _plan_recorded_step(self) -> None:
        """Plan the recorded step, in rank 0 for all, and have all models compiled anew."""
        assert self.recorder is not None
        self._drop_traces()
        record = self.recorder.record(self.recorder.measure(self.store))
        self.known.update(self.recorder.known)
        plan = agreement.plan_in_rank_0(lambda: self._planned(record), self.device)
        self._run(plan, record)
        self.recorder = None
        self.generation += 1

    def _planned(self, record: StepRecord) -> Plan:
        base = planner.baseline(record)
        plain = planner.plain_bytes(record, base)
        budget_bytes = self.settings.budget_bytes or budget_here(self.settings.budget, self.device, self.meter, plain)
        options = self.settings.solver_options()
        return planner.plan_step(record, budget_bytes, self.settings.algorithm, options, base)

    def plan_without(self, failed: FailedGuards) -> None:
        """Plan again without implementations whose guards failed, and have all models compiled anew.

        All ranks have the same weights, so that all of them get here in the same step.

        Raises:
            InfeasibleBudget, NoPlanInTime: without them nothing fits the budget.
        """
        assert self.running is not None
        rest = f" and {len(failed.guards) - 1} more" if len(failed.guards) > 1 else ""
        self.warn(f"{failed.guards[0].name}{rest} cannot be used with the present weights: planning again without")
        self.running.replan_without(failed)
        self.generation += 1

    # ---- compiling

    def backend(self, name: str) -> Backend:
        """The compiler backend for the model called ``name``."""
        if self.recorder is not None:
            return Backend(self, name, observer=self)
        return Backend(self, name, meters=self.meters)

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's number (-1: none), and its schedule: see ``Recorder.choose`` and ``RunningPlan.choose``."""
        self._compiled = True
        chooser = self.recorder or self.running
        assert chooser is not None
        return chooser.choose(joint)

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
            if self.meters.steps.settled and not self._looked:
                self._looked = True
                assert self.running is not None
                self.generation += self.running.correct(self.warn)
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
            "measured_reserved_bytes": self.meters.steps.reserved_bytes,
            "excess_bytes": 0 if self.running is None else self.running.excess_bytes,
            "allocation_retries": self.meters.steps.retries,
            "measured_overhead": self.meters.timing.overhead(),
            "steps": self.meters.steps.steps,
            "exact": self.meter.exact,
            "plan": None if self.plan is None else codec.to_plain(self.plan),
            "intervals": [] if self.running is None else codec.to_plain(self.running.intervals()),
        }
