"""Every error that monetrun raises on purpose, with the exit code the launcher ends with.

    MonetrunError                  70   a fault of monetrun itself
    +-- UsageError                  2   a value the user gave cannot be used
    |   +-- BudgetSyntaxError       2   --budget does not follow its grammar
    |   +-- ScriptNotFound          2   there is no such script or module
    +-- InfeasibleBudget           80   no schedule fits; names the smallest budget that does
    +-- NoPlanInTime               81   the solver had no schedule when its time was up
    +-- CaptureFailed              82   the model cannot be planned (only with --strict)
    +-- PlanMismatch               83   the plan is not for this model, or ranks disagree
    +-- BudgetExceeded             84   a step needed more than the budget
    +-- NeverTrained               85   no training step was seen in the trial run (where a plan is needed, or --strict)
    +-- CheckFailed                86   monetrun check: the planned step is not the plain one, or not within the budget
    +-- ScriptFailed                    the user's script failed in its trial run; its own exit code
    +-- PlanningFault              70   planning failed by a fault of monetrun itself; models run as they are
    +-- ScheduleError              70   a schedule breaks the replay rules, and is not run
    +-- GuardFailed                70   weights violate what a schedule assumes (the worker catches it and plans again)
    +-- MemoryShort                70   too much is held for a forward (the worker catches it and plans again)
    +-- DeviceQueryFailed          70   the free memory of a device could not be read
    +-- StorageFailed              70   a temporary file or stdout could not be written

Only the command line prints them; all other packages raise.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

_OPTION = re.compile(r"--(?P<name>[a-z][a-z-]*)(?: (?P<value>\d[\w.%]*|exact|hierarchical)(?=$|[\s,;:)]))?")
_arguments: Collection[str] = ()  # options that are given in Python, by name


def word_as_arguments(names: Collection[str]) -> None:
    """Have messages name these options as arguments; all others as the command line takes them."""
    global _arguments
    _arguments = names


def worded(text: str) -> str:
    """A message with its options as they are given here: ``--implementations exact``, ``implementations="exact"``."""

    def argument(found: re.Match[str]) -> str:
        name, value = found["name"].replace("-", "_"), found["value"]
        if name not in _arguments:
            return found[0]
        if value is None:
            return name
        given = value if value.isdecimal() else f'"{value}"'
        return given if name == "budget" else f"{name}={given}"

    return _OPTION.sub(argument, text)


REPORT_IT = "please report it, with what is printed above and the output of monetrun doctor"
"""What to do about a fault of monetrun itself."""


class MonetrunError(Exception):
    """Base of all errors here.

    Args:
        message: what was wrong, with the value.
        hint: what to do next, one line, or empty.
    """

    exit_code = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return worded(f"{self.message}\n  {self.hint}" if self.hint else self.message)


class UsageError(MonetrunError):
    """A value the user gave cannot be used."""

    exit_code = 2


class BudgetSyntaxError(UsageError):
    """``--budget`` does not follow its grammar."""


class ScriptNotFound(UsageError):
    """There is no such script or module."""


class InfeasibleBudget(MonetrunError):
    """No schedule fits the budget.

    Attributes:
        budget_bytes: the budget that was given.
        smallest_bytes: the smallest budget for which a schedule is known, in bytes.
        plain_bytes: what the plain step takes, 0 when unknown.
        operator: the name of the operator at the peak of that smallest step.
    """

    exit_code = 80

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        budget_bytes: int = 0,
        smallest_bytes: int = 0,
        plain_bytes: int = 0,
        operator: str = "",
    ) -> None:
        super().__init__(message, hint)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.plain_bytes = plain_bytes
        self.operator = operator

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n  monetrun.close() ends the budget: models run as they are" if _arguments else text


class NoPlanInTime(MonetrunError):
    """The solver found no schedule in its time."""

    exit_code = 81


class CaptureFailed(MonetrunError):
    """The model cannot be planned."""

    exit_code = 82


class PlanMismatch(MonetrunError):
    """The plan is not for this model, or the ranks disagree about it."""

    exit_code = 83


class BudgetExceeded(MonetrunError):
    """A step needed more memory than the budget.

    Attributes:
        smallest_bytes: the smallest budget for which a schedule is known now, in bytes; 0 when unknown.
    """

    exit_code = 84

    def __init__(self, message: str, hint: str = "", *, smallest_bytes: int = 0) -> None:
        super().__init__(message, hint)
        self.smallest_bytes = smallest_bytes


class NeverTrained(MonetrunError):
    """No training step was seen in the trial run, and a launch is ``--strict``, or a command needs its plan."""

    exit_code = 85


class CheckFailed(MonetrunError):
    """The planned step computes something else than the plain one, or takes more than the budget."""

    exit_code = 86


class ScriptFailed(MonetrunError):
    """The user's script failed before training; its own traceback has been printed, its own exit code is passed on."""

    def __init__(self, message: str, hint: str = "", *, exit_code: int = 1) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code if exit_code >= 0 else 128 - exit_code


class PlanningFault(MonetrunError):
    """Planning failed by a fault of monetrun itself; or there is no plan, and need not be one.

    Attributes:
        of_one_call: it is known of one call's step only.
    """

    of_one_call = False


@contextlib.contextmanager
def own_faults() -> Iterator[None]:
    """Within it, or in a function that it decorates, what is no error raised on purpose becomes a ``PlanningFault``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (MonetrunError, OSError)) and not isinstance(error, ScheduleError):
            raise
        if hasattr(error, "sigval"):  # torch's launcher raises a signal as an error
            raise
        first_line = str(error).partition("\n")[0]
        what = f"{type(error).__name__}: {first_line}"
        raise PlanningFault(f"planning failed by a fault of monetrun itself ({what})", REPORT_IT) from error


class ScheduleError(MonetrunError):
    """A schedule breaks the rules of the replay (see ``monetrun.core.simulate``).

    Attributes:
        step: index of the offending step in the whole schedule, or -1.
    """

    def __init__(self, message: str, hint: str = "", *, step: int = -1) -> None:
        super().__init__(message, hint)
        self.step = step


class GuardFailed(MonetrunError):
    """A guard failed: the weights violate what an implementation assumes. Nothing of the graph has run.

    Attributes:
        failed: a ``guards.FailedGuards``.
    """

    def __init__(self, message: str, hint: str = "", *, failed: Any) -> None:
        super().__init__(message, hint)
        self.failed = failed


class MemoryShort(MonetrunError):
    """More is held when a forward begins than its step has room for. Nothing of the graph has run.

    Attributes:
        shortage: a ``runtime.room.Shortage``.
    """

    def __init__(self, message: str, hint: str = "", *, shortage: Any) -> None:
        super().__init__(message, hint)
        self.shortage = shortage


class DeviceQueryFailed(MonetrunError):
    """The free memory of a device could not be read."""


class StorageFailed(MonetrunError):
    """A temporary file, or stdout, could not be written: the disk is full, or there is no folder."""


_NO_ENGINE = "unable to find an engine to execute this computation"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; also in cuDNN, of whose engines none may be left where none gets its workspace."""
    without_engine = type(error) is RuntimeError and _NO_ENGINE in str(error)
    return without_engine or type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
