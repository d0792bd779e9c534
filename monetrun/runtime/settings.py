"""What the launcher tells its workers, by environment variables; one frozen dataclass on both sides."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monetrun.core.errors import UsageError

PROBE = "probe"
RUN = "run"

# The exit code of a probe that left its record: nothing a script ends with by itself.
PROBED = 96
PREFIX = "MONETRUN_"


@dataclass(frozen=True)
class Settings:
    """The settings of one worker process.

    Attributes:
        mode: ``"probe"`` (a trial run up to the first optimizer step) or ``"run"``.
        budget: in ``--budget``'s grammar.
        budget_bytes: what it comes to, 0 when that is not known yet.
        plan_file: the plan to run, or empty: plan in this process after the first step.
        plan_given: the user named the plan, so that one for another model is an error.
        record_file: where a probe leaves its record, and where a run finds it.
        report_folder: where each rank leaves what it measured, or empty.
        cache_folder: of the store, or empty for none.
        algorithm: the solver's name.
        solver_seconds: its time.
        mip_solver: ``"scip"`` or ``"highs"``.
        cost_model: what operators cost: ``"measured"`` here, or a name that ``roofline.parse`` knows (a probe on fake
            tensors).
        recompute: False: no operator runs twice.
        implementations: as ``plan.parse_kinds`` reads it.
        strict: what cannot be planned is an error.
        quiet: no warnings.
        rank: of this process.
        world_size: of the whole run.
    """

    mode: str = RUN
    budget: str = "auto"
    budget_bytes: int = 0
    plan_file: str = ""
    plan_given: bool = False
    record_file: str = ""
    report_folder: str = ""
    cache_folder: str = ""
    algorithm: str = "hierarchical"
    solver_seconds: float = 20.0
    mip_solver: str = "scip"
    cost_model: str = "measured"
    recompute: bool = True
    implementations: str = "all"
    strict: bool = False
    quiet: bool = False
    rank: int = 0
    world_size: int = 1

    def to_environment(self) -> dict[str, str]:
        """The variables that ``from_environment`` reads; rank and world size are torchrun's."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("rank", "world_size")]
        values = {name: getattr(self, name) for name in names}
        return {
            PREFIX + name.upper(): str(int(value)) if isinstance(value, bool) else str(value)
            for name, value in values.items()
        }

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """What the launcher set.

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

    def claim(self) -> bool:
        """Whether this process is the worker itself, and not a child that inherited its environment."""
        mark = PREFIX + "WORKER_PID"
        if os.environ.get(mark, "") not in ("", str(os.getpid())):
            return False
        os.environ[mark] = str(os.getpid())
        return True
