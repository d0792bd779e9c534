"""One launch, from its options to its workers' environment and to the report afterwards.

A record of the script's step and a plan are looked up in the cache. What is not there is made: the record by a trial
run, the plan by the solver.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from monetrun.core.budget import Budget, parse, resolve
from monetrun.core.errors import InfeasibleBudget, NeverTrained, NoPlanInTime, PlanningFault, UsageError, own_faults
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import Plan, Schedule
from monetrun.core.sources import Sources
from monetrun.core.step import StepRecord
from monetrun.core.step_changes import with_collectives, with_excess, with_plain_peaks
from monetrun.launcher import keys, memory, page, report, sources
from monetrun.launcher.decision import Decision
from monetrun.launcher.kept import find_store, keep_measured_step, kept_plan, kept_record, kept_schedules, record_of
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.plain import budget_that_fits, find_plain, plain_instead
from monetrun.launcher.plan_file import check_options, read_plan
from monetrun.launcher.process import exit_on_signals, full_disks_explained, restored_environment, temporary_folder
from monetrun.launcher.progress import SolverProgress
from monetrun.launcher.ranks import find_ranks
from monetrun.launcher.trial import PLAIN_FILE, end_outer_trial, hook_is_missing, run_trial
from monetrun.launcher.worker_settings import worker_settings
from monetrun.planning import kept_parameters, planner
from monetrun.planning.frontier import Frontier
from monetrun.planning.known import known_schedules
from monetrun.runtime.settings import PLAIN, PROBE, RUN, check_hook
from monetrun.solve import timing

_FROM_CACHE = "  (plan from the cache)"


@contextmanager
def open_job(options: LaunchOptions) -> Iterator[Job]:
    """A job that is closed at the end, on signals too; then this process's environment is restored."""
    end_outer_trial()
    with (
        exit_on_signals(named=options.torchrun.signals_to_handle),
        full_disks_explained(),
        restored_environment(),
        timing.within(options.solver_seconds),
    ):
        job = Job(options)
        try:
            yield job
        finally:
            job.close()


class Job:
    """Plans a launch.

    Args:
        options: of the launch.

    Attributes:
        options: as given.
        budget: parsed.
        ranks: the workers to start; ``node``: rank of this node among them, once they have met.
        record_key: of the script and its imports as the launch begins: they may be edited while it trains.
        modelled_bytes: memory of the device that ``--cost-model`` describes; 0 if costs are measured.
        console: for progress and reports; ``settings``, ``folder``: of the trial runs' and the workers' processes.
        plain: what the plain run takes of a CUDA device, once measured.
        record, plan: the script's step and its plan, once known.
        mode: of the workers that were started last.
        from_cache: nothing had to be made.

    Raises:
        UsageError: budget, cost model or one of torchrun's options cannot be used.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        self.budget: Budget = parse(options.budget)
        self.ranks, self.node = find_ranks(options), 0
        self.store = find_store(options)
        self.base_key = keys.record_key(options, self.ranks)
        self.record_key = sources.key_now(self.store, self.base_key)
        self.modelled_bytes = memory.modelled_bytes(options.cost_model)
        self.console = report.stderr_console()
        self.plain, self.plain_key = None, ""  # type: tuple[PlainPeaks | None, str]
        self.sources: Sources | None = None
        self.record: StepRecord | None = None
        self.plan: Plan | None = None
        self.mode, self.plain_cap_bytes = RUN, 0
        self.from_cache, self._plan_key = False, ""  # the key of the plan that was looked for
        self.folder = temporary_folder("monetrun_")
        self._reports = self.folder / "reports"
        self._reports.mkdir()
        self.settings = worker_settings(options, self._reports, self.store)

    def met(self, nodes: int) -> None:
        """Plan for so many nodes: what was found for another number of them is not used."""
        if nodes != self.ranks.nodes:
            self.ranks = replace(self.ranks, nodes=nodes)
            self.base_key = keys.record_key(self.options, self.ranks)
            self.record_key = sources.key_now(self.store, self.base_key)
            self.record = self.plan = self.plain = None

    def close(self) -> None:
        """Remove the job's files, other than the cache."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- before training

    def prepare(self) -> dict[str, str]:
        """Plan, and print the plan.

        Returns:
            The variables to add to the workers' environment.

        Raises: as ``decide``.
        """
        return self.follow(self.decide())

    def decide(self, *, look: bool = True) -> Decision:
        """Plan; ``look``: with what the cache has of trial runs.

        Raises:
            MonetrunError: there is no plan; see ``core.errors``.
        """
        if self.modelled_bytes:
            raise not_here(self.options.cost_model)
        without_hook = hook_is_missing(self.options)
        if self.options.plan_file:
            self.plan = read_plan(self.options.plan_file)
            self.record = record_of(self.plan, self.store, self.record_key)  # with it, workers measure intervals
            self.plan = check_options(self.plan, self.record, self.options, self.budget)
        elif self.options.probe and not without_hook:
            self.plain = self._find_plain(look=look)
            if (instead := _planned_or_as_it_is(self, look)) is not None:
                return instead
        budget_bytes = self.plan.budget_bytes if self.plan else memory.given_bytes(self.budget)
        found = self.plan, self.record, self.plain, bool(self.options.plan_file), self.settings.as_is
        return Decision(RUN, self.budget, budget_bytes, *found, sources=self.sources)

    def follow(self, decision: Decision, *, shown: bool = True) -> dict[str, str]:
        """Print what was decided, here or by another node; gives the variables of this node's workers."""
        self.plan, self.record, self.plain, self.mode = decision.plan, decision.record, decision.plain, decision.mode
        self.plain_cap_bytes = decision.budget_bytes
        # another node has measured, where this one has not
        self.plain_key = self.plain_key or sources.key_now(self.store, keys.plain_key(self.base_key))
        if shown:
            _print_decision(self, decision)
        return decision.environment(self.settings, self.folder, self.ranks.kind)

    def trial(self) -> StepRecord:
        """The script's step: from the cache, else from a trial run.

        Raises:
            NeverTrained, ScriptFailed: see ``run_trial``.
            UsageError: torch does not load monetrun's hook.
        """
        check_hook()
        self.plain = self.plain or self._find_plain()
        self._find_record()
        if self.record is None:
            untried = f"the trial run of {self.options.script} recorded no step of a model that can be planned"
            raise NeverTrained(untried, "monetrun --no-probe plans it while it trains")
        return self.record

    def planned(self) -> Plan:
        """The step's plan: from the cache, else from the solver.

        Raises:
            NeverTrained, ScriptFailed: there is no step to plan.
            InfeasibleBudget, NoPlanInTime: see ``planner.plan_step``.
        """
        record = self.trial()
        return self.plan or self._find_plan(record)

    def budget_bytes(self) -> int | None:
        """``memory.budget_bytes`` of the launch, on the device of the recorded step where that is known."""
        ranks = memory.where_recorded(self.ranks, self.record)
        return memory.budget_bytes(self.budget, ranks, self.modelled_bytes, self.plain)

    def print_plan(self, title: str) -> None:
        """Print the plan, unless ``--quiet``."""
        assert self.plan is not None
        if not self.options.quiet:
            for line in report.plan_lines(self.plan, title, self.record):
                self.console.print(line)

    def _find_plain(self, look: bool = True) -> PlainPeaks | None:
        """See ``find_plain``."""
        place = (self.settings, self.folder, self.console, self.store)
        key = keys.plain_key(self.base_key)
        plain, self.plain_key = find_plain(self.options, self.ranks, key, *place, look=look)
        return plain

    def _find_record(self, needed: bool = True, look: bool = True) -> None:
        """Set ``record``, from the cache (``look``) or by a trial run; see ``run_trial``."""
        if self.record is not None:
            return
        self.record = kept_record(self.store, self.record_key) if look else None
        self.from_cache = self.record is not None
        if self.record is None:
            file, given = self.folder / "record.json", memory.given_bytes(self.budget)
            settings = replace(self.settings, mode=PROBE, budget_bytes=given, record_file=str(file))
            trial = run_trial(self.options, self.ranks, settings, self.folder, self.console, needed=needed)
            self.record, self.settings = trial.record, replace(self.settings, as_is=trial.as_is)
            self.sources = sources.of_trial(str(file))
            self.record_key = sources.keep(self.store, self.base_key, self.sources)
            if self.record is not None and self.store is not None:
                self.store.put("probe", self.record_key, self.record)
        if self.record is not None and self.plain is not None:
            self.record = with_plain_peaks(self.record, self.plain)

    def _find_plan(self, record: StepRecord) -> Plan:
        """Set ``plan``, from the cache or by the solver."""
        record_key = self.record_key
        budget_bytes = self.budget_bytes()
        self._plan_key = keys.plan_key(self.options, record_key, budget_bytes, record)
        self.plan = kept_plan(self.store, self._plan_key, record, self.budget, budget_bytes)
        if self.plan is None:
            kept, self.from_cache = self.from_cache, False
            try:
                self.plan = _solved(
                    self, record, keys.smallest_budget_key(self.options, record_key, record), budget_bytes
                )
            except InfeasibleBudget:
                if not kept:
                    raise
                # the script may read what is no part of the key: a file
                return self._find_plan(_recorded_anew(self))
            if self.store is not None:
                self.store.put("plan", self._plan_key, self.plan)
        return self.plan

    def finish(self, exit_code: int) -> report.Outcome:
        """Report what the workers measured, which is given, and keep it for ``monetrun explain --measured``."""
        outcome = report.read_outcome(self._reports)
        if self.store is not None:
            keep_measured_step(self.store, (self.plan, outcome.plan), outcome.measured_step)
        seen = self.record and with_collectives(with_excess(self.record, outcome.excess_bytes), outcome.collectives)
        if self.store is not None and seen is not None and seen is not self.record:  # the next launch plans with it
            self.store.put("probe", self.record_key, seen)
        if self.options.report_folder:
            _write_report(self, outcome, seen)
        _print_outcome(self, outcome, exit_code)
        return outcome


def _print_outcome(job: Job, outcome: report.Outcome, exit_code: int) -> None:
    if job.options.json:
        report.print_last(json.dumps(report.outcome_json(outcome)))
    for warning in outcome.warnings if job.options.hides_warnings and job.node == 0 else ():
        report.warn(warning)
    if not job.options.quiet:
        for line in report.outcome_lines(outcome, exit_code, planned=job.plan is not None):
            job.console.print(line)


def _recorded_anew(job: Job) -> StepRecord:
    """The script's step from a new trial run, in the place of the one in the cache, which no plan fits."""
    kept, job.record = job.record, None
    if not job.options.quiet:
        job.console.print("monetrun: no plan fits the step that is kept from an earlier launch: it is recorded again")
    job._find_record(needed=False, look=False)
    job.record = job.record or kept
    assert job.record is not None
    return job.record


def _solved(job: Job, record: StepRecord, smallest_key: str, budget_bytes: int | None) -> Plan:
    # BudgetBelowSmallest names the smallest budget. A later launch with exactly that must succeed, even if its own
    # search finds nothing as small: so the schedules are kept.
    def budget_of(plain_bytes: int) -> int:
        return resolve(job.budget, None, plain_bytes) if budget_bytes is None else budget_bytes

    base = planner.baseline(record, kept_schedules(job.store, smallest_key, record.graphs), budget_of)
    budget_bytes, known = budget_of(planner.plain_bytes(record, base)), _known(job, base)
    try:
        with SolverProgress(job.console, base.plain.seconds, shown=not job.options.quiet) as progress:
            options = replace(job.options.solver_options(), on_progress=progress, on_search=progress.search)
            plan = kept_parameters.plan_step(record, budget_bytes, job.options.algorithm, options, base, known)
            progress.found(plan.overhead, plan.bound)
            return plan
    except planner.BudgetBelowSmallest as refused:
        if job.store is not None:
            job.store.put("plan", smallest_key, refused.smallest_schedules)
        raise


def _write_report(job: Job, outcome: report.Outcome, seen: StepRecord | None) -> None:
    """One that cannot be written changes nothing of how the training has ended: it is told."""
    frontier = None if job.store is None else job.store.get("frontier", keys.frontier_key(job.record_key), Frontier)
    try:
        page.write_report(job.options, outcome, seen, job.node, frontier)
    except UsageError as unwritable:
        report.warn(f"no report: {unwritable.message}")


def keep_plan(job: Job, tighter: Plan) -> None:
    """Keep a plan with which training went on after memory had run out: the next launch begins with it."""
    if job.store is None or job.record is None or not job._plan_key:
        return
    job.store.put("plan", job._plan_key, planner.of_step(job.record, tighter))


def _planned_or_as_it_is(job: Job, look: bool) -> Decision | None:
    """Record the step and plan it; gives a decision where the plain run needs no plan, or has to do without one.

    Raises:
        InfeasibleBudget, NoPlanInTime, NothingLeft: nothing keeps the budget.
    """
    try:
        if budget_bytes := budget_that_fits(job.plain, job.budget, job.ranks):
            return Decision(PLAIN, job.budget, budget_bytes, None, None, job.plain, plan_given=False)
        job._find_record(needed=False, look=look)
        if job.record is not None:
            job.settings = replace(job.settings, as_is=_why_no_plan(job, job.record))
    except (InfeasibleBudget, NoPlanInTime, memory.NothingLeft) as refused:
        if (instead := as_it_is(job, refused.message.partition("\n")[0])) is None:
            raise
        return instead
    return None


def decide_anew(job: Job) -> Decision | None:
    """``decide``, where memory has run out though the plain run fits by what an earlier launch has measured.

    The script may read what is no part of the key: a file.
    """
    if job.mode != PLAIN or job.plain is None or (job.folder / PLAIN_FILE).exists():
        return None
    report.warn("memory ran out though the plain run fits by what an earlier launch has measured: measured anew")
    return job.decide(look=False)


def as_it_is(job: Job, why: str) -> Decision | None:
    """Have models run as they are, after one warning, where no plan was found and ``plain_instead`` allows it."""
    instead = None if job.options.strict else plain_instead(job.plain, job.budget, job.ranks)
    if instead is None:
        return None
    line, cap_bytes = instead
    report.warn(f"{why}; {line}")
    return Decision(PLAIN, job.budget, cap_bytes, None, None, None, plan_given=False)


def _known(job: Job, base: planner.Baseline) -> list[tuple[Schedule, ...]]:
    """``known_schedules`` of the step; says how many there are."""
    known = known_schedules(job.store, base.searched.graphs, job.options.solver_options())
    if known and not job.options.quiet:
        job.console.print(f"monetrun: planning begins with {len(known)} known plans of these graphs")
    return known


def _print_decision(job: Job, decision: Decision) -> None:
    name = Path(job.options.script).name
    if warning := memory.more_than_there_is(job.budget, memory.where_recorded(job.ranks, job.record)):
        report.warn(warning)
    if decision.plan is not None:
        job.print_plan(f"monetrun  {name}{_FROM_CACHE * job.from_cache}")
    elif decision.mode == PLAIN and decision.plain is not None and not job.options.quiet:
        for line in report.plain_lines(decision.plain, decision.budget_bytes, name):
            job.console.print(line)


def _why_no_plan(job: Job, record: StepRecord) -> str:
    """Plan ``record``. Gives why models run as they are, where a fault of monetrun's own prevents that; else nothing.

    What torchrun would train is not ended for such a fault, unless ``--strict`` is given.
    """
    try:
        with own_faults():
            job._find_plan(record)
    except PlanningFault as fault:
        if job.options.strict:
            raise
        return f"models run without a plan, their budget is not enforced: {fault.message}, {fault.hint}"
    return job.settings.as_is


def not_here(cost_model: str) -> UsageError:
    """Training, or a part of it, is asked for on a device that ``--cost-model`` describes."""
    return UsageError(
        f"--cost-model {cost_model} plans for a device that is not here",
        f"monetrun plan --cost-model {cost_model} plans; leave it out to train here",
    )
