"""One launch, from its options to the variables its workers get, and its report afterwards.

Budget, cache, probe, plan: what is asked for is looked up by what determines it (the script, its arguments, the
devices, torch), and only what is missing is done.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monetrun import __version__
from monetrun.core import codec, errors
from monetrun.core.budget import Budget, format_bytes, parse, resolve
from monetrun.core.errors import MonetrunError, NeverTrained, PlanMismatch, ScriptFailed, UsageError
from monetrun.core.options import Options, parse_kinds
from monetrun.core.plan import PLAN_SCHEMA, Plan, StepSchedules, parse_plan
from monetrun.core.step import StepRecord
from monetrun.launcher import report
from monetrun.launcher.agent import local_world_size
from monetrun.machine.device import default_kind, query, smallest
from monetrun.machine.store import Store, default_root, key
from monetrun.planning import planner
from monetrun.planning.frontier import Frontier, frontier, spread
from monetrun.runtime.settings import PROBE, PROBED, RUN, Settings

_log = logging.getLogger("monetrun")

# A budget that follows the free memory is rounded down to this, so that the next launch finds the same plan.
_GRAIN_BYTES = 32 << 20


class Job:
    """A launch or a dry run.

    Args:
        args: what ``launch.parser()`` gave.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.budget: Budget = parse(args.budget)
        self.folder = Path(tempfile.mkdtemp(prefix="monetrun_"))
        self.store = None if args.no_cache else Store(default_root())
        self.local_ranks = local_world_size(args)
        self.world_size = self.local_ranks * _nodes(args)
        self.kind = default_kind()
        self.modelled_bytes = _modelled_bytes(args.cost_model)
        self.console = report.console()
        self.record: StepRecord | None = None
        self.plan: Plan | None = None
        self.cached = False

    # ---- before

    def prepare(self) -> dict[str, str]:
        """Plan, and give the variables to add to the workers' environment.

        Raises:
            MonetrunError: see ``errors``; nothing was started then, and nothing is left.
        """
        if self.modelled_bytes:
            raise UsageError(
                f"--cost-model {self.args.cost_model} plans for a device that is not here",
                f"monetrun plan --cost-model {self.args.cost_model} plans; leave it out to train here",
            )
        environment = self._settings(RUN).to_environment()
        if self.args.plan:
            self.plan = read_plan(self.args.plan)
        elif not self.args.no_probe:
            self._find_plan()
        if self.plan is not None:
            if not self.args.quiet:
                self._print_plan(self.plan)
            environment.update(self._settings(RUN).to_environment())
        return {**environment, **_allocator_variables(self.kind)}

    def dry_run(self, out: str) -> None:
        """Plan, print the ledger, and write the plan to ``out``; nothing is trained.

        Raises:
            MonetrunError: see ``errors``; ``out`` is as before then.
        """
        text = codec.dumps(self.planned())
        part = Path(f"{out}.{os.getpid()}")
        try:
            part.write_text(text + "\n")
            part.replace(out)
        except OSError as error:
            raise UsageError(f"--out {out}: {error.strerror}", "name a file in a folder that can be written") from error
        if not self.args.quiet:
            self._print_plan(self.planned(), f"DRY RUN  {Path(self.args.training_script).name}     nothing trained")
            command = shlex.join(
                ["monetrun", "--plan", out, self.args.training_script, *self.args.training_script_args]
            )
            self._say(f"  wrote {out}      next: {command}")
            if self.modelled_bytes:
                self._say(f"  of {self.args.cost_model}: nothing was measured, and kernels' workspaces are not counted")
            self._say(f"  what it does: {shlex.join(['monetrun', 'explain', out])}")
        if self.args.json:
            print(text)

    def trial(self) -> StepRecord:
        """The script's step: from the cache, else by a trial run.

        Raises:
            NeverTrained, ScriptFailed: see ``_probe``.
        """
        self._find_record()
        if self.record is None:
            raise NeverTrained(
                f"{self.args.training_script} could not be tried", "monetrun --no-probe plans it while it trains"
            )
        return self.record

    def planned(self) -> Plan:
        """The script's plan: from the cache, else by a trial run and the solver.

        Raises:
            NeverTrained, ScriptFailed: there is no step to plan.
            InfeasibleBudget, NoPlanInTime: see ``planner.plan_step``.
        """
        self.trial()
        if self.plan is None:
            self._find_plan()
        assert self.plan is not None
        return self.plan

    def frontier(self, budgets: Sequence[Budget], points: int) -> Frontier:
        """Plan for each of ``budgets``, or, without any, for so many points from the plain peak to the smallest budget.

        Raises:
            NeverTrained, ScriptFailed: there is no step to plan.
            InfeasibleBudget: no schedule fits any budget.
        """
        record = self.trial()
        base = planner.baseline(record)
        plain = base.plain.peak_bytes
        wanted = [resolve(b, None, plain) for b in budgets] or spread(plain, base.frugal.peak_bytes, points)
        with report.SolverProgress(self.console, base.plain.seconds, shown=not self.args.quiet) as progress:
            options = replace(self.options(), on_progress=progress)
            return frontier(record, wanted, self.args.algorithm, options, base, progress.begin)

    def _settings(self, mode: str) -> Settings:
        a = self.args
        plan_file = ""
        if self.plan is not None and mode == RUN:
            path = self.folder / "plan.json"
            path.write_text(codec.dumps(self.plan))
            plan_file = str(path)
        record_file = self.folder / "record.json"
        if self.record is not None and not record_file.exists():
            record_file.write_text(codec.dumps(self.record))
        reports = self.folder / "reports"
        reports.mkdir(exist_ok=True)
        return Settings(
            mode=mode,
            budget=a.budget,
            budget_bytes=self.plan.budget_bytes if self.plan else self._bytes_known(),
            plan_file=plan_file,
            plan_given=bool(a.plan),
            record_file=str(record_file) if mode == PROBE or self.record is not None else "",
            report_folder=str(reports),
            cache_folder=str(self.store.root) if self.store else "",
            algorithm=a.algorithm,
            solver_seconds=a.solver_seconds,
            mip_solver=a.solver,
            cost_model=a.cost_model,
            recompute=not a.no_recompute,
            implementations=a.implementations,
            strict=a.strict,
            quiet=a.quiet,
        )

    def _bytes_known(self) -> int:
        return int(self.budget.value) if self.budget.kind == "bytes" else 0

    def _find_record(self) -> None:
        """From the cache, else by a probe."""
        if self.record is not None:
            return
        probe_key = self._probe_key()
        self.record = self.store.get("probe", probe_key, StepRecord) if self.store else None
        self.cached = self.record is not None
        if self.record is None:
            self.record = self._probe()
            if self.record is not None and self.store is not None:
                self.store.put("probe", probe_key, self.record)

    def _find_plan(self) -> None:
        """From the cache, else by a probe and the solver."""
        self._find_record()
        if self.record is None:
            return
        probe_key = self._probe_key()
        plan_key, budget_bytes = self._plan_key(probe_key)
        self.plan = self.store.get("plan", plan_key, Plan) if self.store else None
        if self.plan is None:
            self.cached = False
            frugal_key = key("frugal", PLAN_SCHEMA, probe_key, *(g.fingerprint for g in self.record.graphs))
            # a budget that was named as the smallest one must do, however short this search is
            frugal = self.store.get("plan", frugal_key, StepSchedules) if self.store else None
            base = planner.baseline(self.record, frugal.schedules_for(self.record.graphs) if frugal else None)
            if budget_bytes is None:
                budget_bytes = resolve(self.budget, None, base.plain.peak_bytes)
            try:
                with report.SolverProgress(self.console, base.plain.seconds, shown=not self.args.quiet) as progress:
                    options = replace(self.options(), on_progress=progress)
                    self.plan = planner.plan_step(self.record, budget_bytes, self.args.algorithm, options, base)
            except planner.BudgetBelowSmallest as refused:
                if self.store is not None:
                    self.store.put("plan", frugal_key, refused.smallest_schedules)
                raise
            if self.store is not None:
                self.store.put("plan", plan_key, self.plan)

    def options(self) -> Options:
        """The solver's."""
        a = self.args
        return Options(
            seconds=a.solver_seconds,
            recompute=not a.no_recompute,
            implementations=parse_kinds(a.implementations),
            mip_solver=a.solver,
        )

    def budget_bytes(self) -> int | None:
        """What the budget comes to before the step is known; None where it is a share of the plain peak."""
        if self.budget.kind == "bytes":
            return int(self.budget.value)
        if self.budget.kind not in ("auto", "share_of_free"):
            return None
        free = self.modelled_bytes or smallest(query(self.kind, self.local_ranks)).free_bytes
        nbytes = resolve(self.budget, free, None, **({"reserve_bytes": 0} if self.kind == "cpu" else {}))
        return max(1, nbytes // _GRAIN_BYTES * _GRAIN_BYTES)

    def _plan_key(self, probe_key: str) -> tuple[str, int | None]:
        a = self.args
        budget_bytes = self.budget_bytes()
        wanted = a.budget if budget_bytes is None else budget_bytes
        parts = (wanted, a.algorithm, a.solver, a.solver_seconds, a.no_recompute, a.implementations)
        return key("plan", PLAN_SCHEMA, probe_key, *parts), budget_bytes

    def _probe_key(self) -> str:
        a = self.args
        script = Path(a.training_script)
        content: bytes = b""
        if a.module:
            spec = importlib.util.find_spec(a.training_script.partition(".")[0])
            origin = spec.origin if spec else None
            content = Path(origin).read_bytes() if origin and Path(origin).is_file() else b""
        elif script.is_file():
            content = script.read_bytes()
        devices = [i.uuid or i.device for i in query(self.kind, self.local_ranks)] if self.kind == "cuda" else ["cpu"]
        return key(
            "probe",
            __version__,
            importlib.metadata.version("torch"),
            sys.version,
            str(script.resolve()) if not a.module else a.training_script,
            content.decode("utf-8", "replace"),
            list(a.training_script_args),
            a.cost_model,
            self.local_ranks,
            self.world_size,
            self.kind,
            devices,
            os.environ.get("OMP_NUM_THREADS", ""),
        )

    # ---- the trial run

    def _probe(self) -> StepRecord | None:
        """Run the script up to its first optimizer step, in a process of its own.

        Raises:
            NeverTrained: it ended by itself.
            ScriptFailed: it failed; its traceback has been printed.
        """
        a = self.args
        settings = self._settings(PROBE)
        error_file = self.folder / "probe_error.json"
        environment = {
            **os.environ,
            **settings.to_environment(),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "GROUP_RANK": "0",
            "ROLE_RANK": "0",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "GROUP_WORLD_SIZE": str(_nodes(a)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "monetrun-probe",
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            **_allocator_variables(self.kind),
        }
        if self.local_ranks > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        command = [] if a.no_python else [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
        command += ["-m"] if a.module else []
        command += [a.training_script, *a.training_script_args]
        stderr_file = self.folder / "probe_stderr.txt"
        with stderr_file.open("wb") as stderr, self._status("trial run up to the first optimizer step"):
            code = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                check=False,
            ).returncode
        if code == PROBED:
            record = codec.loads(StepRecord, Path(settings.record_file).read_text())
            return record if record.graphs else None
        said = stderr_file.read_text(errors="replace")
        if code == 0:
            raise NeverTrained(
                f"{a.training_script} ended without a training step, so that there is nothing to plan",
                "monetrun plans scripts that call backward() and an optimizer's step(); run others with torchrun",
            )
        if (error := _own_error(error_file)) is not None:
            raise error
        if self.world_size > 1:
            self._say(said.rstrip())
            self._say("monetrun: warning: the trial run failed; planning at the first step instead (--no-probe)")
            return None
        sys.stderr.write(said)
        raise ScriptFailed(f"{a.training_script} failed in its trial run", exit_code=code)

    def _status(self, what: str) -> Any:
        if self.args.quiet or not self.console.is_terminal:
            self._say(f"monetrun: {what}")
            return _Nothing()
        return self.console.status(f"monetrun: {what}")

    def _say(self, line: str) -> None:
        if not self.args.quiet:
            print(line, file=sys.stderr, flush=True)

    def _print_plan(self, plan: Plan, title: str = "") -> None:
        script = Path(self.args.training_script).name
        if not title:
            title = f"monetrun  {script}" + ("  (plan from the cache)" if self.cached else "")
        for line in report.plan_lines(plan, title, self.record.graphs if self.record else ()):
            self.console.print(line)

    # ---- after

    def finish(self, exit_code: int) -> None:
        """Report what was measured.

        Raises:
            NeverTrained: the script ended well, and never trained.
        """
        reports = []
        for path in sorted((self.folder / "reports").glob("rank*.json")):
            reports.append(json.loads(path.read_text()))
        outcome = report.gather(reports)
        if self.args.json:
            print(json.dumps(report.outcome_json(outcome)))
        if exit_code == 0 and not self.args.quiet:
            for line in report.outcome_lines(outcome):
                self.console.print(line)
        elif exit_code == errors.BudgetExceeded.exit_code and outcome.plan is not None:
            planned = format_bytes(outcome.plan.planned_peak_bytes)
            budget = format_bytes(outcome.plan.budget_bytes)
            self._say(f"monetrun: out of memory: planned {planned}, budget {budget}; what lies outside the plan grew")

    def close(self) -> None:
        """Remove what the launch wrote beside the cache."""
        shutil.rmtree(self.folder, ignore_errors=True)


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


def read_plan(path: str) -> Plan:
    """A plan that ``monetrun plan`` wrote.

    Raises:
        PlanMismatch: no such file, or not a plan that this version reads.
    """
    try:
        return parse_plan(Path(path).read_text())
    except OSError as error:
        raise PlanMismatch(f"the plan {path}: {error.strerror}", "monetrun plan SCRIPT writes one") from error
    except ValueError as error:
        message = f"{path} is not a plan that this monetrun reads: {error}"
        raise PlanMismatch(message, "monetrun plan SCRIPT writes one") from error


def _own_error(path: Path) -> MonetrunError | None:
    """The error of monetrun's own that ended a probe, if it was one."""
    try:
        message = json.loads(path.read_text())["message"]
    except (OSError, ValueError, KeyError):
        return None
    if not isinstance(message, Mapping) or "errorCode" not in message:
        return None
    text = str(message["message"]).partition(": ")[2]
    error = MonetrunError(text)
    error.exit_code = int(message["errorCode"])
    return error


def _modelled_bytes(cost_model: str) -> int:
    """Memory of the device that a cost model is of, 0 for ``"measured"``.

    Raises:
        UsageError: there is no such cost model.
    """
    if cost_model == "measured":
        return 0
    from monetrun.capture import roofline  # here, since it imports torch

    model = roofline.parse(cost_model)
    return 0 if model is None else model.memory_bytes


def _nodes(args: argparse.Namespace) -> int:
    return int(str(args.nnodes).partition(":")[0])


def _allocator_variables(kind: str) -> dict[str, str]:
    """On CUDA, segments that can grow: what is reserved then stays close to what is allocated."""
    if kind != "cuda" or "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
