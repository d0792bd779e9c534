"""Runs a script's first step under a plan, plain, and in float64, and compares what the three compute."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from monetrun.core import codec
from monetrun.core.errors import BudgetExceeded, MonetrunError, NeverTrained, PlanMismatch, ScriptFailed, UsageError
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.launcher.allocator import allocator_variables
from monetrun.launcher.differences import Values, difference, read_values
from monetrun.launcher.job import Job, not_here
from monetrun.launcher.plan_file import check_options, read_plan
from monetrun.launcher.progress import status
from monetrun.launcher.trial import how_it_failed, read_own_error, run_process
from monetrun.launcher.trial_environment import trial_environment
from monetrun.planning.check import (
    CheckedRun,
    CheckReport,
    Difference,
    is_another_step,
    judged,
    operator_times,
)
from monetrun.runtime.probe import UNSEEN, VALUES
from monetrun.runtime.settings import CHECK, CHECK_FLOAT64, CHECK_PLAIN
from monetrun.runtime.tensor_distance import same_bits


def check(job: Job, *, float64: bool) -> CheckReport:
    """Compare a launch's planned step with the plain one.

    Args:
        job: of the launch; ``--plan`` names the plan, else one is made.
        float64: whether there is a float64 run, too.

    Raises:
        NeverTrained, ScriptFailed: there is no step to compare.
        PlanMismatch: the plan is of another step.
        BudgetExceeded: the planned step ran out of memory.
        UsageError: the plan does not keep what was given beside it, or the script's runs do not begin with the same
            weights, inputs and random state.
    """
    if job.modelled_bytes:
        raise not_here(job.options.cost_model)
    given = read_plan(job.options.plan_file) if job.options.plan_file else None
    record = job.trial()
    plan = job.planned() if given is None else given
    if [g.fingerprint for g in plan.graphs] != [g.fingerprint for g in record.graphs]:
        raise PlanMismatch(
            f"the plan {job.options.plan_file} is of another step than {job.options.script}'s first one",
            "give the script and the arguments that were planned, or leave out --plan",
        )
    if given is not None:
        plan = check_options(given, record, job.options, job.budget)
    planned, planned_values = _run(job, CHECK, "planned step", plan)
    plain, plain_values = _run(job, CHECK_PLAIN, "plain step")
    check_beginnings(job.options.script, planned, plain)
    exact_values, no_float64 = _float64_values(job) if float64 else ({}, "--no-float64 was given")
    differences = [
        difference(*key, planned_values[key], plain_values[key], exact_values.get(key))
        for key in plain_values
        if key in planned_values
    ]
    if exact_values and is_another_step(differences):
        no_float64 = "it is another step: it draws other random numbers, or takes another branch"
        differences = [replace(d, planned_float64=None, plain_float64=None) for d in differences]
    why = _not_bitwise(record, plan, planned)
    if not why and not all(d.bitwise for d in differences):
        differences = _tried_twice(job, differences, plain_values)
    schedules = [own.schedule_for(graph) for own, graph in zip(plan.graphs, record.graphs, strict=True)]
    return CheckReport(
        plan.budget_bytes,
        plan.planned_peak_bytes,
        planned.peak_bytes,
        None if plan.pool is None else plan.pool.planned_bytes,
        planned.reserved_bytes,
        planned.steps,
        why,
        no_float64,
        judged(differences, bitwise=not why),
        tuple(" ".join(key) for key in sorted(planned_values.keys() ^ plain_values.keys())),
        operator_times(record, schedules, planned.operators),
        planned.warnings,
    )


def _not_bitwise(record: StepRecord, plan: Plan, planned: CheckedRun) -> str:
    """Why the plan does not promise the plain step's bits; empty: it does. See docs/exactness.md."""
    names: dict[str, None] = {}
    for own, graph in zip(plan.graphs, record.graphs, strict=True):
        schedule = own.schedule_for(graph)
        for step in (*schedule.forward, *schedule.backward):
            used = graph.operators[step.operator].implementations[step.implementation]
            if not used.exact:
                names[used.name] = None
    if names:
        return f"it uses implementations that differ from eager's by rounding: {', '.join(names)}"
    if record.breaks:
        return "the model is planned in parts, which may add the terms of a gradient in another order"
    if planned.as_compiled:
        return "the model asks whether it is being compiled, and may compute something else than in eager"
    return ""


def _tried_twice(job: Job, differences: Sequence[Difference], plain_values: Values) -> list[Difference]:
    """The differences, with whether the plain step repeats itself; unless they are more than rounding anyway."""
    if not all(d.within for d in judged(differences, bitwise=False)):
        return list(differences)
    again = _run(job, CHECK_PLAIN, "plain step once more")[1]
    return [
        replace(d, repeats=same_bits(plain_values[d.kind, d.name], again.get((d.kind, d.name)))) for d in differences
    ]


def check_beginnings(script: str, planned: CheckedRun, plain: CheckedRun) -> None:
    """Check that two runs can be compared.

    Raises:
        UsageError: they began with other weights, inputs or random numbers.
    """
    parts = ("weights", "inputs", "random")
    differ = [name for name in parts if getattr(planned, name) != getattr(plain, name)]
    if differ:
        what = ", ".join({"random": "random state"}.get(name, name) for name in differ)
        raise UsageError(
            f"two runs of {script} begin with different {what}: their steps cannot be compared",
            "have it give the same data each time: seed what it draws from, as in numpy.random.default_rng(0)",
        )


# ---- the runs


def _run(job: Job, mode: str, what: str, plan: Plan | None = None) -> tuple[CheckedRun, Values]:
    """Run the script up to its answer, and read what it leaves.

    Raises:
        NeverTrained: it made no step, or the run cannot see it.
        ScriptFailed, BudgetExceeded, MonetrunError: it failed; its stderr has been printed.
    """
    options, folder = job.options, Path(tempfile.mkdtemp(dir=job.folder))
    error_file, stderr_file, result = folder / "error.json", folder / "stderr.txt", folder / "checked.json"
    settings = replace(job.settings, mode=mode, record_file=str(result), report_folder="")
    if plan is not None:
        assert job.record is not None
        plan_file, step_file = folder / "plan.json", folder / "step.json"
        plan_file.write_text(codec.dumps(plan))
        step_file.write_text(codec.dumps(job.record))
        settings = replace(settings, plan_given=True, budget_bytes=plan.budget_bytes)
        settings = replace(settings, plan_file=str(plan_file), step_file=str(step_file))
    environment = trial_environment(options, job.ranks, settings, error_file) | allocator_variables(
        job.ranks.kind, settings
    )
    environment.setdefault("PYTHONHASHSEED", "0")  # the same order of sets in each run
    with status(job.console, what, shown=not options.quiet):
        code = run_process(options, environment, stderr_file, str(result))
    if error_file.exists() or not result.exists():
        raise _failure(options.script, what, code, result, error_file, stderr_file)
    return codec.loads(CheckedRun, result.read_text()), read_values(Path(f"{result}{VALUES}"))


def _failure(script: str, what: str, code: int, result: Path, error_file: Path, stderr_file: Path) -> Exception:
    """The error of a run that left no result."""
    unseen = Path(f"{result}{UNSEEN}")
    if unseen.exists():
        return NeverTrained(f"the {what} of {script} cannot be seen: {json.loads(unseen.read_text())['reason']}")
    if (error := read_own_error(error_file)) is not None and error.exit_code != BudgetExceeded.exit_code:
        return error
    if code == 0 and not error_file.exists():
        return NeverTrained(f"{script} ended without a training step", "monetrun check compares a training step")
    if error is not None:
        hint = error.hint or "the plan's budget bounds the step: give a larger --budget"
        if what.startswith("plain"):
            hint = "the plain step has to fit the device to be compared: a smaller batch"
        return BudgetExceeded(f"{script} failed in its {what}: {error.message}", hint)
    message = f"{script} failed in its {what}: {how_it_failed(code, error_file)}"
    return ScriptFailed(f"{stderr_file.read_text(errors='replace')}{message}", exit_code=code or 1)


def _float64_values(job: Job) -> tuple[Values, str]:
    """The values of the float64 run; or none, and why."""
    try:
        return _run(job, CHECK_FLOAT64, "plain step in float64")[1], ""
    except MonetrunError as error:
        return {}, error.message.strip().rpartition("\n")[2]
