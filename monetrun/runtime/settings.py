"""The settings that the launcher hands to its workers in environment variables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monetrun.core.errors import UsageError
from monetrun.core.options import Options, parse_kinds

PROBE = "probe"
RUN = "run"
MEASURE = "measure"
PLAIN = "plain"
CHECK = "check"
CHECK_PLAIN = "check-plain"
CHECK_FLOAT64 = "check-float64"
CHECKS = (CHECK, CHECK_PLAIN, CHECK_FLOAT64)
OLDEST_TORCH = (2, 11)
NEWER_TORCH = f"install torch >= {'.'.join(map(str, OLDEST_TORCH))}"
TRIALS = (PROBE, MEASURE, *CHECKS)  # nothing may train in these

# Set in a trial run, for the script to recognise it.
TRIAL = "MONETRUN_TRIAL"

# The exit code of a trial run that left its record: one that scripts do not use.
PROBED = 96

# The file in the report folder where a worker leaves why models have to run as they are, before it ends with PROBED.
AS_IS_MARK = "as_is"
PREFIX = "MONETRUN_"

# Set in workers whose log folder stays when the launch has ended.
KEEPS_LOGS = PREFIX + "KEEPS_LOGS"
CLAIM = PREFIX + "WORKER_PID"


@dataclass(frozen=True)
class Settings:
    """The settings of one worker process.

    Attributes:
        mode: ``"run"``, ``"probe"`` (a trial run up to the first optimizer step), ``"measure"`` (a trial run without
            a plan, of a few steps), ``"plain"`` (a run that needs no plan), or one of ``CHECKS``: a trial run of a few
            steps whose first one is kept to be compared, under a plan, plain, or plain and in float64.
        budget: in ``--budget``'s grammar.
        budget_bytes: the budget in bytes, 0 where that is not known yet.
        plan_file: the plan to run, or empty: plan in this process after the first step.
        plan_given: the user named the plan, so that one for another model is an error.
        record_file: where a trial run writes its record, and where a run reads it.
        step_file: where a check, which writes its own record, reads that of the planned step.
        tensorboard_folder: where each rank writes scalars of its training steps, or empty.
        report_folder: where each rank leaves its measurements, or empty.
        cache_folder: of the store, or empty for none.
        algorithm: the solver's name.
        solver_seconds: the solver's time.
        mip_solver: ``"scip"`` or ``"highs"``.
        cost_model: where operators' costs come from: ``"measured"`` here, or a name that ``roofline.parse`` knows (a
            trial run on fake tensors).
        recompute: False: no operator runs twice.
        implementations: as ``options.parse_kinds`` reads it.
        strict: raise an error where something cannot be planned, instead of a warning.
        quiet: print nothing but warnings.
        own_allocator: CUDA's allocator is configured by the launcher, not by the user.
        visible_devices: what the launcher has seen in ``CUDA_VISIBLE_DEVICES``.
        as_is: why no model of the script is planned, as a trial run has found; empty: models are planned.
        rank: of this process.
        world_size: of the whole run.
    """

    mode: str = RUN
    budget: str = "auto"
    budget_bytes: int = 0
    plan_file: str = ""
    plan_given: bool = False
    record_file: str = ""
    step_file: str = ""
    report_folder: str = ""
    tensorboard_folder: str = ""
    cache_folder: str = ""
    algorithm: str = "hierarchical"
    solver_seconds: float = 20.0
    mip_solver: str = "scip"
    cost_model: str = "measured"
    recompute: bool = True
    implementations: str = "all"
    strict: bool = False
    quiet: bool = False
    own_allocator: bool = False
    visible_devices: str = ""
    as_is: str = ""
    rank: int = 0
    world_size: int = 1

    def to_environment(self) -> dict[str, str]:
        """The variables that ``from_environment`` reads; rank and world size are torchrun's.

        What a worker in which monetrun is called has claimed for itself (``claim``) is not passed on.
        """
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("rank", "world_size")]
        values = {name: getattr(self, name) for name in names}
        texts = {
            PREFIX + name.upper(): str(int(value)) if isinstance(value, bool) else str(value)
            for name, value in values.items()
        }
        return {**texts, CLAIM: ""}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read what ``to_environment`` wrote.

        Raises:
            UsageError: a variable cannot be read; it was not set by the launcher.
        """
        given: dict[str, object] = {}
        for field in dataclasses.fields(cls):
            name = field.name.upper()
            text = environ.get(name if field.name in ("rank", "world_size") else PREFIX + name)
            if text is None:
                continue
            kind: Any = type(field.default)
            try:
                given[field.name] = bool(int(text)) if kind is bool else kind(text)
            except ValueError as error:
                raise UsageError(f"{PREFIX}{name} is {text!r}, expected {kind.__name__}") from error
        return cls(**given)  # type: ignore[arg-type]

    def solver_options(self, seconds: float | None = None) -> Options:
        """The solver's options; ``seconds``: its time, where it is not ``solver_seconds``."""
        return Options(
            seconds=self.solver_seconds if seconds is None else seconds,
            recompute=self.recompute,
            implementations=parse_kinds(self.implementations),
            mip_solver=self.mip_solver,
        )

    def claim(self) -> bool:
        """Whether this process is the worker itself, and not a child that inherited its environment."""
        if os.environ.get(CLAIM, "") not in ("", str(os.getpid())):
            return False
        os.environ[CLAIM] = str(os.getpid())
        return True


def too_old_torch() -> str:
    """That torch is older than monetrun supports; empty: it is not, or has no version that can be read."""
    try:
        version = importlib.metadata.version("torch")
        numbers = tuple(map(int, version.split(".")[:2]))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
    return f"torch {version} is older than monetrun supports" if numbers < OLDEST_TORCH else ""


def why_no_hook() -> tuple[str, str]:
    """Why torch does not load monetrun's hook in workers, and what to do; empty: it does, or that is not known."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    if (given := os.environ.get(name, "1")) != "1":  # as torch reads it
        return f"{name}={given} keeps torch from loading monetrun's hook", "unset it"
    if hooks() == []:
        return "monetrun can be imported but is not installed: torch does not know its hook", "pip install ."
    if hooks() is not None and (why := too_old_torch()):
        return why, NEWER_TORCH
    return "", ""


def hooks() -> list[str] | None:
    """Monetrun's functions that torch calls in workers; None where these are run by another interpreter."""
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return None
    points = importlib.metadata.entry_points(group="torch.backends")
    return [point.value for point in points if point.value.startswith("monetrun.")]


def check_hook() -> None:
    """Check that torch loads monetrun's hook in workers.

    Raises:
        UsageError: it does not.
    """
    why, mend = why_no_hook()
    if why:
        raise UsageError(f"nothing can be planned: {why}", mend)
