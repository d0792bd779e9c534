"""A launch whose memory runs out in its first training steps begins again, with a tighter plan.

The trial run saw less than the run takes: other ranks have larger batches, or the script does more where it is not
tried; or, on CUDA, what stays allocated from the first step on lies elsewhere than was planned. At most two steps are
trained again, from the script's start. Budget and batch stay as they are; the plan leaves more of the budget free.
On several nodes it is made when they meet again (``nodes``), since torch starts their workers again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monetrun.core import codec
from monetrun.core.budget import format_bytes
from monetrun.core.errors import BudgetExceeded, InfeasibleBudget, NoPlanInTime, PlanningFault, own_faults
from monetrun.core.keeping import as_planned
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.core.step_changes import with_more_held
from monetrun.launcher import report
from monetrun.launcher.decision import Decision
from monetrun.launcher.job import Job, as_it_is, decide_anew, keep_plan
from monetrun.launcher.options import LaunchOptions
from monetrun.machine.named_file import replace_file
from monetrun.planning import planner
from monetrun.planning.summary import rounding_note
from monetrun.runtime.settings import PLAIN
from monetrun.runtime.step_meter import SETTLING_STEPS

MOST_RESTARTS = 2
# Shares of the budget that a restart leaves free beside what the plan left free and what the failed allocation lacked:
# the first one; and, for each, a second one, or one that does not know what was lacking.
_FREE, _MUCH_FREE = 0.01, 0.08


_UNDER_EACH = "memory ran out under each plan"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Memory has run out.

    Attributes:
        steps: training steps before that.
        needed_bytes: the least budget that the failed allocation needs; 0 if not known.
    """

    steps: int
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class TighterPlan:
    """A plan under which more is held than in the one before it.

    Attributes:
        plan: the new one.
        record: the step with that.
        free_bytes: so much.
        line: for the user.
    """

    plan: Plan
    record: StepRecord
    free_bytes: int
    line: str


class Restarts:
    """What the workers of a launch on one node get after memory has run out in their first steps.

    Args:
        job: of the launch.
        environment: that the workers get at first.
    """

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self._job, self._environment = job, environment
        self._tightened = 0
        self._texts = texts_of(environment)
        self._started = False

    def joined(self, store: Any, rank: int, size: int, fixed: bool, ended: int) -> Mapping[str, str]:
        """An ``agent.Joined``: torch starts the same workers again by itself (``--max-restarts``)."""
        self._restore_files()
        environment = self.next_environment(ended) or self._environment
        if self._started:
            forget_reports(environment)  # of former workers, which may have come further than those that start now
        self._started = True
        return environment

    def _restore_files(self) -> None:
        """Write what the system may have removed of a temporary folder that was not used for days."""
        for path, text in self._texts.items():
            if not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_text(text)

    def next_environment(self, exit_code: int) -> Mapping[str, str] | None:
        """What the workers get after some have ended with ``exit_code``; None: there is nothing else to try."""
        job, environment = self._job, self._environment
        if not ran_short_early(environment, exit_code):
            return None
        if line := tighter_plan(environment, exit_code, self._tightened, job.options):
            print(f"monetrun: {line}", file=sys.stderr, flush=True)
            self._tightened += 1
            self._texts = texts_of(environment)
            return environment
        decision = decide_anew(job)
        if decision is None and job.mode != PLAIN:
            decision = as_it_is(job, _UNDER_EACH)
        if decision is None:
            return None
        self._tightened = 0
        forget_reports(environment)
        self._environment = job.follow(decision)
        self._texts = texts_of(self._environment)
        return self._environment

    def keep(self, exit_code: int) -> None:
        """Keep the tighter plan for the next launch, if there is one and training went on with it."""
        if not self._tightened:
            return
        self._restore_files()
        if (tighter := plan_that_lasted(self._environment, exit_code)) is not None:
            keep_plan(self._job, tighter)


def texts_of(environment: Mapping[str, str]) -> dict[Path, str]:
    """What is in the files of plan and record that workers get by ``environment``."""
    given = (environment.get(f"MONETRUN_{name}", "") for name in ("PLAN_FILE", "RECORD_FILE"))
    return {Path(path): Path(path).read_text() for path in given if path and os.path.exists(path)}


def tighter_plan(environment: Mapping[str, str], exit_code: int, restarts: int, options: LaunchOptions) -> str:
    """Replace the plan that the workers of a launch get, where they ran out of memory in the first steps.

    Args:
        environment: that the workers got: names the files of plan, record and reports.
        exit_code: of the launch.
        restarts: so far.
        options: of the launch.

    Returns:
        A line for the user; empty where the launch has ended.
    """
    files = [environment.get(f"MONETRUN_{name}", "") for name in ("PLAN_FILE", "RECORD_FILE", "REPORT_FOLDER")]
    if restarts >= MOST_RESTARTS or not all(files) or not ran_short_early(environment, exit_code):
        return ""
    plan_file, record_file, _ = map(Path, files)
    plan, record = codec.loads(Plan, plan_file.read_text()), codec.loads(StepRecord, record_file.read_text())
    made = tightened(plan, record, shortage_of(environment), restarts, options)
    if made is None:
        return ""
    replace_file(plan_file, codec.dumps(made.plan))
    replace_file(record_file, codec.dumps(made.record))
    forget_reports(environment)
    return made.line


def tightened(
    plan: Plan, record: StepRecord, shortage: Shortage, restarts: int, options: LaunchOptions
) -> TighterPlan | None:
    """A tighter plan in the place of ``plan``, under which memory ran out; None: none is found.

    Args:
        plan: of ``record``.
        record: the step.
        shortage: what is known of that.
        restarts: so far.
        options: of the launch.
    """
    record = as_planned(record, plan.keeps_parameters)
    planned = plan.planned_peak_bytes if plan.pool is None else plan.pool.planned_bytes
    lacking_bytes = max(0, shortage.needed_bytes - plan.budget_bytes)
    share = _FREE if lacking_bytes and not restarts else _MUCH_FREE * (restarts + 1)
    free_bytes = max(0, plan.budget_bytes - planned) + lacking_bytes + int(share * plan.budget_bytes)
    plan_step = own_faults()(planner.plan_step)
    try:
        more, found = with_more_held(record, free_bytes), [graph.schedule for graph in plan.graphs]
        base = planner.baseline(more, found)  # a more frugal one is looked for if this is over the budget
        made = plan_step(more, plan.budget_bytes, options.algorithm, options.solver_options(), base, [found])
    except (InfeasibleBudget, NoPlanInTime, PlanningFault):
        return None
    line = (
        f"memory ran out in training step {shortage.steps + 1}: starting again ({restarts + 1} of {MOST_RESTARTS}"
        f" times at most) with a plan that leaves {format_bytes(free_bytes)} of the budget free"
        f"{rounding_note(made, more)}"
    )
    return TighterPlan(made, more, free_bytes, line)


def relieved(job: Job, decision: Decision, shortage: Shortage) -> Decision:
    """What the workers of several nodes do after memory has run out under ``decision``: a tighter plan, or none.

    It is ``decision`` itself where there is neither.
    """
    plan, record = decision.plan, decision.held_record
    if plan is None or record is None:
        return decision
    made = None
    if decision.tightened < MOST_RESTARTS:
        made = tightened(plan, record, shortage, decision.tightened, job.options)
    if made is not None:
        print(f"monetrun: {made.line}", file=sys.stderr, flush=True)
        more_held = decision.more_held_bytes + made.free_bytes
        return replace(decision, plan=made.plan, tightened=decision.tightened + 1, more_held_bytes=more_held)
    instead = as_it_is(job, _UNDER_EACH)
    return decision if instead is None else replace(instead, nodes=decision.nodes)


def shortage_of(environment: Mapping[str, str]) -> Shortage:
    """What the workers have reported of it. ``environment``: as for ``tighter_plan``."""
    outcome = report.read_outcome(Path(environment["MONETRUN_REPORT_FOLDER"]))
    return Shortage(outcome.steps, outcome.needed_bytes)


def ran_short_early(environment: Mapping[str, str], exit_code: int) -> bool:
    """Whether workers of a launch ran out of memory in the first steps. Arguments as for ``tighter_plan``.

    Workers that train nothing under a plan, or no longer, do not: they would run out again.
    """
    reports = environment.get("MONETRUN_REPORT_FOLDER", "")
    if exit_code != BudgetExceeded.exit_code or not reports:
        return False
    outcome = report.read_outcome(Path(reports))
    return outcome.steps <= SETTLING_STEPS and (environment.get("MONETRUN_MODE") == PLAIN or bool(outcome.held))


def plan_that_lasted(environment: Mapping[str, str], exit_code: int) -> Plan | None:
    """The plan of a launch that has gone on beyond the first steps. Arguments as for ``tighter_plan``."""
    if not has_lasted(environment, exit_code):
        return None
    return codec.loads(Plan, Path(environment["MONETRUN_PLAN_FILE"]).read_text())


def has_lasted(environment: Mapping[str, str], exit_code: int) -> bool:
    """Whether a launch has gone on beyond the first steps. Arguments as for ``tighter_plan``."""
    return not exit_code or report.read_outcome(Path(environment["MONETRUN_REPORT_FOLDER"])).steps > SETTLING_STEPS


def forget_reports(environment: Mapping[str, str]) -> None:
    """Remove what the workers have reported: they start again."""
    if folder := environment.get("MONETRUN_REPORT_FOLDER", ""):
        for left in Path(folder).glob("rank*.json"):
            left.unlink()
