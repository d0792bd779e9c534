"""Runs the planned models of one process: record a step, plan it, run the plan, and measure how it goes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from monetrun.capture import cost_store, roofline
from monetrun.capture.guards import FailedGuards
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import meter_for
from monetrun.core import codec
from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.budget import Budget, parse, resolve
from monetrun.core.errors import InfeasibleBudget
from monetrun.core.plan import Plan, Schedule
from monetrun.core.step import Break, StepRecord
from monetrun.machine.store import Store
from monetrun.ops import kernels
from monetrun.planning import kept_parameters, planner
from monetrun.planning.extra_work import extra_work
from monetrun.planning.known import known_schedules
from monetrun.planning.summary import summary_lines
from monetrun.runtime import agreement, collective_times, probe, second_step
from monetrun.runtime.allocation_limit import set_limit
from monetrun.runtime.autocast import BackwardAutocast
from monetrun.runtime.backend import Backend, PlannedCallMeters
from monetrun.runtime.budget_here import auto_is_no_limit, budget_here
from monetrun.runtime.call_timing import CallTiming, OperatorTiming
from monetrun.runtime.eager_comparison import EagerComparison
from monetrun.runtime.first_steps import FirstSteps
from monetrun.runtime.recorder import Recorder, begun_anew, is_forgotten
from monetrun.runtime.reporter import Reporter
from monetrun.runtime.room import Shortage
from monetrun.runtime.running_plan import RunningPlan, intervals_of
from monetrun.runtime.scalars import StepScalars, planned_values
from monetrun.runtime.second_step import SecondStep, followed, outputs_are_held, with_what_is_held
from monetrun.runtime.settings import CHECK, PROBE, Settings
from monetrun.runtime.step_meter import StepMeter
from monetrun.runtime.terms import GradientTerms
from monetrun.runtime.traces import Traces
from monetrun.runtime.with_room import WithRoom

_log = logging.getLogger("monetrun")


class Engine(WithRoom):
    """Chooses the schedules of all captured graphs, and measures what running them takes.

    Without a plan the first step is recorded; when it has ended, or the one after it, it is planned.

    Args:
        settings: of the process.
        device: of the models.
        trained_parameters: gives the parameters of all optimizers.
        reporter: of this rank.
        plan: to run; None: that of ``settings``, if any.

    Attributes:
        generation: goes up when models have to be compiled anew.
        recorder: while a step is recorded.
        running: from then on, the plan that runs.
        scalars: of its steps, where they are wanted.
        known: measured costs, by the operators' signatures.
        breaks: modules that are not captured whole, by ``Break.module``.
        autocast: under which the script calls the backward.
        terms: whether graphs give gradients in terms.
        comparison: of a trial's models with eager.

    Raises:
        PlanMismatch: the plan was made with another torch.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        trained_parameters: Callable[[], list[torch.Tensor]],
        reporter: Reporter,
        plan: Plan | None = None,
    ) -> None:
        super().__init__()
        self.settings, self.device = settings, device
        self.trained_parameters = trained_parameters
        self.reporter = reporter
        self.meter = meter_for(device)
        if not kernels.load(device.type):
            _log.info("torch.ops.monet runs its references: %s", kernels.unavailable_reason(device.type))
        self.store = Store(Path(settings.cache_folder)) if settings.cache_folder else None
        self.known = cost_store.load(self.store, device)
        timing = OperatorTiming if settings.mode == CHECK else CallTiming
        self.meters = PlannedCallMeters(timing(self.meter, self.known), StepMeter(self.meter), self.capturing)
        self.scalars = StepScalars(settings, reporter.warn, partial(_scalars, self))
        self.generation, self.breaks = 0, dict[str, Break]()
        self.running: RunningPlan | None = None
        self.autocast, self.terms = BackwardAutocast(reporter.warn), GradientTerms()
        self._first_steps = FirstSteps(self.meters.steps, settings)
        self._traces, self.comparison = Traces(), EagerComparison()
        plan = _given_plan(plan, settings)
        if plan is None:
            self.recorder = _recorder(self)
        else:
            self._run(plan, _known_step(self))

    def close(self) -> None:
        """Lift the allocation limit, and drop what refers to parameters: torch keeps its last backend, and so this."""
        set_limit(self.device, None)
        second_step.stop(self.recorder)
        self.recorder = None
        self.comparison.forget()
        if self.running is not None:
            self.running.collectives.close()
        self.scalars.close()

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
        steps, note = self.meters.steps, self.reporter.note
        self.running = RunningPlan(self.settings, self.device, steps, self.known, plan, record, note)
        self.running.enforcement.share_is_estimate = self.part_in_python
        self.terms.by_turns |= plan.gradients_by_turns

    def plan_recorded_step(self) -> None:
        """Before a model's call: plan the recorded step, if there is one, in rank 0 for all; models are compiled anew.

        Where the script holds the step's outputs, one more step shows first how long.
        """
        if self.recorder is None or not self._step_recorded or self._record_again or self.settings.mode == PROBE:
            return
        self._traces.drop()
        record = _recorded(self, self.recorder)
        self.known.update(self.recorder.known)
        if isinstance(self.recorder, Recorder) and agreement.largest(int(outputs_are_held(record)), record):
            self.recorder, self._step_recorded = SecondStep(self.recorder, record), False
            return
        with auto_is_no_limit(self.settings):
            plan = _agreed(self, record)
        self._run(plan, record)
        self.recorder = None
        self.generation += 1
        self.reporter.tell("\n".join(summary_lines(plan, "the plan", record)))

    def plan_without(self, failed: FailedGuards) -> None:
        """Plan again without implementations whose guards failed, and have all models compiled anew.

        Raises:
            InfeasibleBudget, NoPlanInTime: without them nothing fits the budget.
        """
        assert self.running is not None
        name = failed.guards[0].name + (f" and {len(failed.guards) - 1} more" if len(failed.guards) > 1 else "")
        self.reporter.warn(f"{name} cannot be used with the present weights: planning again without")
        with auto_is_no_limit(self.settings, self.running.record):
            self.running.replan_without(failed)
        self.generation += 1

    def make_room(self, shortage: Shortage) -> None:
        """Plan again, in this rank alone, where more is held than planned: see ``RunningPlan.make_room``."""
        assert self.running is not None
        with auto_is_no_limit(self.settings, self.running.record):
            self.running.make_room(shortage)
        self.generation += 1

    def backend(self, name: str) -> Backend:
        """The compiler backend for the model called ``name``."""
        observed: dict[str, Any] = {"meters": self.meters} if self.recorder is None else {"observer": self}
        autocast = self.autocast.state
        return Backend(self, name, **observed, autocast=autocast, terms=self.terms, traced=self._traces.were_made)

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's number (-1: none), and its schedule: see ``Recorder.choose`` and ``RunningPlan.choose``."""
        self.terms.graph_captured()
        self.open_step.goes_on(self.running)
        chooser = self.recorder or self.running
        assert chooser is not None
        with auto_is_no_limit(self.settings, None if self.running is None else self.running.record):
            return chooser.choose(joint)

    # ---- the step

    @contextlib.contextmanager
    def forward(self, hooked: Iterable[Any] | None = None) -> Iterator[None]:
        """A planned model is called in training; ``hooked``: the call's values, if hooks allocate before its graphs."""
        if is_forgotten(self.recorder):
            self.recorder = begun_anew(self.recorder, _recorder(self))
        if self.recorder is not None and hooked is not None:
            self.recorder.forward_begins(hooked)
        with self.planned_forward():
            yield
        self._traces.drop()

    def optimizer_begins(self, again: bool) -> None:
        """An optimizer's step begins (``again``: its second, where a trial run ends), or goes on after its closure."""
        if again and self.recorder is not None and self.settings.mode == PROBE and not self._record_again:
            _end_trial(self)
        self.optimizer_goes_on()
        if self.recorder is not None:
            self.recorder.optimizer_begins()

    def optimizer_ended(self, optimizer: Optimizer, all_stepped: bool) -> None:
        """An optimizer's step has ended; ``all_stepped``: every optimizer has made at least one."""
        if self.running is not None:
            _step_ended(self, self.running, optimizer)
        if self.recorder is None:
            return
        self.recorder.optimizer_ended(type(optimizer).__name__, self.trained_parameters())
        self._step_recorded |= all_stepped and self.recorder.complete
        if all_stepped and self.settings.mode == PROBE and not self._record_again:
            _end_trial(self)

    def backward_begins(self, roots: Iterable[Any]) -> None:
        """The script differentiates ``roots``. Under an autocast that changes a backward, it is traced for that."""
        roots = self.differentiated(roots)
        if self.recorder is not None:
            self.terms.look_at(roots)
        if self.terms.changes(roots):  # a recorded graph gives terms if need be
            self.generation += self.recorder is None
        if self.autocast.changes(roots, replace=self.settings.mode != PROBE):
            self._record_again = self.recorder is not None
            self.generation += self.recorder is None

    def found_broken(self, anew: bool) -> bool:
        """A module is in parts (``anew``: since this step: another is recorded). Gives whether its numbers count."""
        self._record_again |= anew and self.recorder is not None
        return self.settings.mode != PROBE

    def records_again(self) -> bool:
        """All optimizers have made a step. Gives whether the next one is recorded, in place of this one."""
        again, self._record_again = self._record_again, False
        if again:
            self.recorder, self._step_recorded = _recorder(self), False
            self.generation += 1
        return again

    def findings(self) -> dict[str, Any]:
        """What was planned and measured in this process, for the launcher."""
        return _findings(self)


def _step_ended(engine: Engine, running: RunningPlan, optimizer: Optimizer) -> None:
    """An optimizer's step has ended under a plan."""
    engine.meters.steps.optimizer_ended(type(optimizer).__name__, id(optimizer))
    engine.generation += running.step_ended(id(optimizer))
    engine.scalars.step_ended(engine.meters.steps.steps)
    engine._traces.drop()
    if engine._first_steps.have_settled:
        engine.generation += engine._first_steps.looked(_look(engine, running))


def _look(engine: Engine, running: RunningPlan) -> bool:
    """The first planned steps have been made: plan again where they were not as planned, and say whether."""
    corrected = running.correct(engine.reporter.warn)
    if not running.collectives.wanted or running.record is None:
        return corrected
    found = running.collectives.end()
    running.record, plan = collective_times.weighed(running.record, running.plan, running.settings, found)
    if plan == running.plan:
        return corrected
    running.follow(plan)
    running.steps.forget_peaks()
    engine.reporter.tell(collective_times.line(running.record, plan))
    return True


def _end_trial(engine: Engine) -> None:
    assert engine.recorder is not None
    record = _recorded(engine, engine.recorder)
    engine.recorder = followed(engine.recorder, record, engine.settings.record_file, partial(_compared, engine))


def _compared(engine: Engine, record: StepRecord) -> StepRecord:
    """``record`` with what its models compute otherwise than in eager."""
    if engine.settings.cost_model != roofline.MEASURED or engine.autocast.state:
        return record
    recorder, engine.recorder = engine.recorder, second_step.looking_at_nothing(engine.recorder, record)
    try:
        with probe.comparing(record, engine.settings.record_file):
            found = engine.comparison.differences(record, engine.device)
    finally:
        engine.recorder = recorder
    return dataclasses.replace(record, unlike_eager=found)


def _recorded(engine: Engine, recorder: Recorder | SecondStep) -> StepRecord:
    first = recorder if engine.settings.mode != PROBE and isinstance(recorder, Recorder) else None
    if first is not None and first.memory is not None:
        first.memory.seen_between_steps(first.schedules)  # the next step begins
    record = recorder.record(recorder.measure(engine.store), engine.breaks.values())
    if first is not None:
        record = with_what_is_held(first, record)
    return dataclasses.replace(
        record,
        backward_autocast=engine.autocast.state,
        gradients_in_terms=engine.terms.needed,
        gradients_by_turns=engine.terms.by_turns,
    )


def _recorder(engine: Engine) -> Recorder:
    settings = engine.settings
    engine.comparison.forget()  # of calls before those that are recorded
    model = roofline.parse(settings.cost_model)
    plain = AllocatorSettings() if settings.own_allocator else None
    return Recorder(engine.meter, engine.device, engine.known, model, plain, _budget(settings))


def _given_plan(plan: Plan | None, settings: Settings) -> Plan | None:
    """The plan to run, the same in all ranks: rank 0's ``plan``, or the launcher's, which has given it to all."""
    if plan is not None:
        return agreement.plan_in_rank_0(lambda budgets: plan)
    return codec.loads(Plan, Path(settings.plan_file).read_text()) if settings.plan_file else None


def _known_step(engine: Engine) -> StepRecord | None:
    """The record of the planned step, if there is one; the engine follows what it says of models."""
    path = engine.settings.step_file or engine.settings.record_file
    record = codec.loads(StepRecord, Path(path).read_text()) if path else None
    if record is not None:
        engine.breaks, engine.autocast.state = {b.module: b for b in record.breaks}, record.backward_autocast
        engine.terms.needed = record.gradients_in_terms
    return record


def _agreed(engine: Engine, record: StepRecord) -> Plan:
    """The plan of the recorded step that all ranks run."""
    made: list[Plan] = []

    def make(budgets: Sequence[str]) -> Plan:
        made.append(_planned(engine, record, budgets))
        return made[0]

    plan = agreement.plan_in_rank_0(make, budget_here(engine.settings, engine.device, engine.meter), record)
    # where this rank's is of its own graphs, its modules keep what rank 0's keep
    return collective_times.with_own_schedules(record, made[0], plan, engine.settings) if made else plan


def _planned(engine: Engine, record: StepRecord, budgets: Sequence[str]) -> Plan:
    """The plan of the recorded step, within the smallest of all ranks' ``budgets``."""

    def budget_of(plain_bytes: int) -> int:
        return min(resolve(parse(budget), None, plain_bytes) for budget in budgets)

    settings, base = engine.settings, planner.baseline(record, budget_of=budget_of)
    budget_bytes = budget_of(planner.plain_bytes(record, base))
    options = settings.solver_options()
    known = known_schedules(engine.store, base.searched.graphs, options)
    try:
        return kept_parameters.plan_step(record, budget_bytes, settings.algorithm, options, base, known)
    except InfeasibleBudget:
        engine.refused = True
        raise


def _scalars(engine: Engine, last: bool) -> dict[str, float | None]:
    assert engine.plan is not None
    values = planned_values(engine.plan, engine.meters.steps, engine.device.type, engine.meter.exact)
    return {**values, "measured_overhead": engine.meters.timing.overhead()} if last else values


def _budget(settings: Settings) -> Budget | None:
    return parse(settings.budget) if settings.budget else None


def _findings(engine: Engine) -> dict[str, Any]:
    steps, running = engine.meters.steps, engine.running
    return {
        "measured_peak_bytes": engine.peak_bytes,
        "measured_reserved_bytes": steps.reserved_bytes,
        "most_planned": steps.most_planned,
        "excess_bytes": 0 if running is None else running.excess_bytes,
        "collectives": () if running is None else collective_times.known(running.record),
        "allocation_retries": steps.retries,
        "measured_overhead": engine.meters.timing.overhead(),
        "planned_extra_work": running and running.record and extra_work(running.record, running.plan),
        "call_seconds": engine.meters.timing.call_seconds(),
        "steps": steps.training_steps,
        "exact": engine.meter.exact,
        "unbounded_steps": running is not None and running.enforcement.share_was_estimated,
        "plan": None if engine.plan is None else codec.to_plain(engine.plan),
        "intervals": [] if running is None else codec.to_plain(intervals_of(running)),
    }
