"""One launch, from its options to its workers' environment and to the report afterwards.

A record of the script's step and a plan are looked up in the cache. What is not there is made: the record by a trial
run, the plan by the solver.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from monetrun.core import codec
from monetrun.core.budget import Budget, parse, resolve
from monetrun.core.errors import NeverTrained, UsageError
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import Plan, StepSchedules
from monetrun.core.step import StepRecord, with_excess, with_plain_peaks
from monetrun.launcher import keys, memory, report
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.plain import budget_that_fits, find_plain
from monetrun.launcher.plan_file import read_plan
from monetrun.launcher.process import exit_on_sigterm, restored_environment
from monetrun.launcher.progress import SolverProgress
from monetrun.launcher.ranks import Ranks, find_ranks
from monetrun.launcher.trial import allocator_variables, run_trial
from monetrun.machine.store import Store, default_root
from monetrun.planning import planner
from monetrun.planning.explain import describes
from monetrun.planning.frontier import Frontier, frontier, spread
from monetrun.runtime.settings import PLAIN, PROBE, RUN, Settings
from monetrun.solve import timing

_FROM_CACHE = "  (plan from the cache)"


@contextmanager
def open_job(options: LaunchOptions) -> Iterator[Job]:
    """A job that is closed at the end, on SIGTERM too; then this process's environment is restored."""
    with exit_on_sigterm(), restored_environment(), timing.within(options.solver_seconds):
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
        ranks: the workers to start.
        modelled_bytes: memory of the device that ``--cost-model`` describes; 0 if costs are measured.
        console: for progress and reports.
        plain: what the plain run takes of a CUDA device, once measured.
        record: the script's step, once known.
        plan: the step's plan, once known.
        from_cache: nothing had to be made.

    Raises:
        UsageError: budget, cost model or one of torchrun's options cannot be used.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        self.budget: Budget = parse(options.budget)
        self.ranks = find_ranks(options)
        self.modelled_bytes = memory.modelled_bytes(options.cost_model)
        self.console = report.stderr_console()
        self.plain: PlainPeaks | None = None
        self.record: StepRecord | None = None
        self.plan: Plan | None = None
        self.from_cache = False
        self._store = Store(default_root()) if options.use_cache else None
        self._folder = Path(tempfile.mkdtemp(prefix="monetrun_"))
        self._reports = self._folder / "reports"
        self._reports.mkdir()
        self._settings = _settings(options, self._reports, self._store)
        place = (self._settings, self._folder, self.console, self._store)
        self._find_plain = partial(find_plain, options, self.ranks, *place)

    def close(self) -> None:
        """Remove the job's files, other than the cache."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- before training

    def prepare(self) -> dict[str, str]:
        """Plan, and print the plan.

        Returns:
            The variables to add to the workers' environment.

        Raises:
            MonetrunError: there is no plan; see ``core.errors``.
        """
        if self.modelled_bytes:
            raise _not_here(self.options.cost_model)
        if self.options.plan_file:
            self.plan = read_plan(self.options.plan_file)
            self.record = _record_of(self.plan, self._store, self.options, self.ranks)
        elif self.options.probe:
            self.plain = self._find_plain()
            if budget_bytes := budget_that_fits(self.plain, self.budget, self.ranks):
                return self._run_plainly(budget_bytes)
            self._find_record()
            if self.record is not None:
                self._find_plan(self.record)
        if self.plan is not None:
            self.print_plan(f"monetrun  {Path(self.options.script).name}{_FROM_CACHE * self.from_cache}")
        settings = replace(
            self._settings,
            mode=RUN,
            budget_bytes=self.plan.budget_bytes if self.plan else memory.given_bytes(self.budget),
            plan_file=_written(self._folder / "plan.json", self.plan),
            record_file=_written(self._folder / "record.json", self.record),
        )
        return {**settings.to_environment(), **allocator_variables(self.ranks.kind)}

    def trial(self) -> StepRecord:
        """The script's step: from the cache, else from a trial run.

        Raises:
            NeverTrained, ScriptFailed: see ``run_trial``.
        """
        self.plain = self.plain or self._find_plain()
        self._find_record()
        if self.record is None:
            raise NeverTrained(
                f"{self.options.script} could not be tried", "monetrun --no-probe plans it while it trains"
            )
        return self.record

    def planned(self) -> Plan:
        """The step's plan: from the cache, else from the solver.

        Raises:
            NeverTrained, ScriptFailed: there is no step to plan.
            InfeasibleBudget, NoPlanInTime: see ``planner.plan_step``.
        """
        record = self.trial()
        return self.plan or self._find_plan(record)

    def frontier(self, budgets: Sequence[Budget], points: int) -> Frontier:
        """Plan for each of ``budgets``; if there are none, for ``points`` from the plain peak to the smallest budget.

        Raises:
            NeverTrained, ScriptFailed: there is no step to plan.
            InfeasibleBudget: no schedule fits any budget.
        """
        record = self.trial()
        base = planner.baseline(record)
        plain = planner.plain_bytes(record, base)
        wanted = [resolve(b, None, plain) for b in budgets] or spread(plain, base.frugal.peak_bytes, points)
        with SolverProgress(self.console, base.plain.seconds, shown=not self.options.quiet) as progress:
            options = replace(self.options.solver_options(), on_progress=progress)
            return frontier(record, wanted, self.options.algorithm, options, base, progress.begin)

    def budget_bytes(self) -> int | None:
        """``memory.budget_bytes`` of the launch."""
        return memory.budget_bytes(self.budget, self.ranks, self.modelled_bytes, self.plain)

    def print_plan(self, title: str) -> None:
        """Print the plan, unless ``--quiet``."""
        assert self.plan is not None
        if not self.options.quiet:
            for line in report.plan_lines(self.plan, title, self.record.graphs if self.record else ()):
                self.console.print(line)

    def _find_record(self) -> None:
        """Set ``record``, from the cache or by a trial run; None after one that a launch can do without."""
        if self.record is not None:
            return
        key = keys.record_key(self.options, self.ranks)
        self.record = self._store.get("probe", key, StepRecord) if self._store else None
        self.from_cache = self.record is not None
        if self.record is None:
            settings = replace(
                self._settings,
                mode=PROBE,
                budget_bytes=memory.given_bytes(self.budget),
                record_file=str(self._folder / "record.json"),
            )
            self.record = run_trial(self.options, self.ranks, settings, self._folder, self.console)
            if self.record is not None and self._store is not None:
                self._store.put("probe", key, self.record)
        if self.record is not None and self.plain is not None:
            self.record = with_plain_peaks(self.record, self.plain)

    def _run_plainly(self, budget_bytes: int) -> dict[str, str]:
        """The variables of workers that run the script as it is, under the budget."""
        if self.plain is not None and not self.options.quiet:
            for line in report.plain_lines(self.plain, budget_bytes, Path(self.options.script).name):
                self.console.print(line)
        return replace(self._settings, mode=PLAIN, budget_bytes=budget_bytes).to_environment()

    def _find_plan(self, record: StepRecord) -> Plan:
        """Set ``plan``, from the cache or by the solver."""
        record_key = keys.record_key(self.options, self.ranks)
        budget_bytes = self.budget_bytes()
        plan_key = keys.plan_key(self.options, record_key, budget_bytes, record)
        self.plan = self._store.get("plan", plan_key, Plan) if self._store else None
        if self.plan is None:
            self.from_cache = False
            self.plan = self._solve(record, keys.smallest_budget_key(record_key, record), budget_bytes)
            if self._store is not None:
                self._store.put("plan", plan_key, self.plan)
        return self.plan

    def _solve(self, record: StepRecord, smallest_key: str, budget_bytes: int | None) -> Plan:
        # BudgetBelowSmallest names the smallest budget. A later launch with exactly that must succeed, even if its own
        # search finds nothing as small: so the schedules are kept.
        smallest = self._store.get("plan", smallest_key, StepSchedules) if self._store else None
        base = planner.baseline(record, smallest.schedules_for(record.graphs) if smallest else None)
        if budget_bytes is None:
            budget_bytes = resolve(self.budget, None, planner.plain_bytes(record, base))
        try:
            with SolverProgress(self.console, base.plain.seconds, shown=not self.options.quiet) as progress:
                options = replace(self.options.solver_options(), on_progress=progress)
                return planner.plan_step(record, budget_bytes, self.options.algorithm, options, base)
        except planner.BudgetBelowSmallest as refused:
            if self._store is not None:
                self._store.put("plan", smallest_key, refused.smallest_schedules)
            raise

    def finish(self, exit_code: int) -> None:
        """Report what the workers measured, and keep it for ``monetrun explain --measured``.

        Args:
            exit_code: of the launch.
        """
        outcome = report.read_outcome(self._reports)
        if self._store is not None and outcome.plan is not None and outcome.measured_step is not None:
            self._store.put("measured", keys.measured_key(outcome.plan), outcome.measured_step)
        seen = None if self.record is None else with_excess(self.record, outcome.excess_bytes)
        if self._store is not None and seen is not None and seen is not self.record:  # the next launch plans with it
            self._store.put("probe", keys.record_key(self.options, self.ranks), seen)
        if self.options.json:
            print(json.dumps(report.outcome_json(outcome)))
        if not self.options.quiet:
            for line in report.outcome_lines(outcome, exit_code):
                self.console.print(line)


def _not_here(cost_model: str) -> UsageError:
    return UsageError(
        f"--cost-model {cost_model} plans for a device that is not here",
        f"monetrun plan --cost-model {cost_model} plans; leave it out to train here",
    )


def _record_of(plan: Plan, store: Store | None, options: LaunchOptions, ranks: Ranks) -> StepRecord | None:
    """The record that a given plan was made from, if the cache has it: with it, workers measure intervals.

    None on several nodes: ranks with a record plan again together, and another node's cache may have none.
    """
    if store is None or str(options.torchrun.nnodes) not in ("1", "1:1"):
        return None
    record = store.get("probe", keys.record_key(options, ranks), StepRecord)
    return record if record is not None and describes(record, plan) else None


def _written(path: Path, value: Plan | StepRecord | None) -> str:
    """Write ``value`` to ``path`` for the workers; gives the path, empty for None."""
    if value is None:
        return ""
    path.write_text(codec.dumps(value))
    return str(path)


def _settings(options: LaunchOptions, report_folder: Path, store: Store | None) -> Settings:
    """What the options determine of a worker's settings, those of a run and those of a trial run."""
    return Settings(
        budget=options.budget,
        plan_given=bool(options.plan_file),
        report_folder=str(report_folder),
        cache_folder=str(store.root) if store else "",
        algorithm=options.algorithm,
        solver_seconds=options.solver_seconds,
        mip_solver=options.mip_solver,
        cost_model=options.cost_model,
        recompute=options.recompute,
        implementations=options.implementations,
        strict=options.strict,
        quiet=options.quiet,
    )
