"""What ``monetrun.apply`` was given, checked at the call: a model, a budget or a plan, and options."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from monetrun.capture import roofline
from monetrun.core import budget
from monetrun.core.errors import UsageError
from monetrun.core.options import parse_kinds
from monetrun.core.plan import Plan
from monetrun.solve import solver
from monetrun.solve.mip import PACKAGES

_CALL = 'monetrun.apply(model, "0.6x")'
_LOAD = "monetrun.core.plan.parse_plan(pathlib.Path({path!r}).read_text())"


def budget_and_plan(budget_or_plan: Any, by_name: Any, model: Any) -> tuple[str, Plan | None]:
    """The budget in ``--budget``'s grammar, and the plan, if that was given.

    ``by_name``: what was given as ``budget=``.

    Raises:
        TypeError: ``model`` is no module, or ``budget_or_plan`` is neither a budget nor a plan.
        UsageError: it names a plan's file.
        BudgetSyntaxError: the budget is malformed.
    """
    if isinstance(budget_or_plan, nn.Module):
        raise TypeError(f"the model comes first, and then the budget or the plan: {_CALL}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument is {_shown(model)}, expected the model, a torch.nn.Module: {_CALL}")
    if budget_or_plan is not None and by_name is not None:
        raise TypeError(f"the budget is given twice, {_shown(budget_or_plan)} and budget={by_name!r}: {_CALL}")
    return checked_budget(budget_or_plan if by_name is None else by_name)


def checked_budget(budget_or_plan: Any) -> tuple[str, Plan | None]:
    """As ``budget_and_plan``, of the second argument alone."""
    if isinstance(budget_or_plan, Plan):
        return str(budget_or_plan.budget_bytes), budget_or_plan
    if isinstance(budget_or_plan, bool) or not isinstance(budget_or_plan, (str, int, float)):
        raise TypeError(
            f"the second argument is {_shown(budget_or_plan)}, expected a budget ({budget.GRAMMAR}) or a Plan: {_CALL}"
        )
    text = str(budget_or_plan)
    if text.endswith(".json") or os.path.isfile(text):
        raise UsageError(
            f"the budget {text!r} is a file's name", f"a plan is read with {_LOAD.format(path=text)}, and then applied"
        )
    budget.parse(text, "the budget")
    return text, None


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, by the names of ``Settings``' fields.

    Raises:
        TypeError: there is no option of that name.
        UsageError: an option's value cannot be used.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTIONS)}"
            raise TypeError(f"monetrun.apply has no option {name!r}: {hint}")
        OPTIONS[name](name, value)
    return dict(options)


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _unusable(name, value, "True or False")


def _seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise _unusable(name, value, "a positive number of seconds")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _unusable(name, value, "a string")


def _algorithm(name: str, value: Any) -> None:
    _text(name, value)
    solver(value)


def _kinds(name: str, value: Any) -> None:
    _text(name, value)
    parse_kinds(value, f"{name}=")


def _cost_model(name: str, value: Any) -> None:
    _text(name, value)
    roofline.parse(value)


def _mip_solver(name: str, value: Any) -> None:
    if value not in PACKAGES:
        raise _unusable(name, value, f"one of {', '.join(PACKAGES)}")


OPTIONS: Mapping[str, Callable[[str, Any], None]] = {
    "algorithm": _algorithm,
    "solver_seconds": _seconds,
    "mip_solver": _mip_solver,
    "cost_model": _cost_model,
    "implementations": _kinds,
    "cache_folder": _text,
    "recompute": _switch,
    "strict": _switch,
    "quiet": _switch,
}
"""What ``apply`` takes, and what checks each value: fields of ``Settings``."""


def _unusable(name: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"{name}={value!r} cannot be used", f"give {expected}")


def _shown(value: Any) -> str:
    """What was given, for an error: a model or an optimizer would fill the screen."""
    kind = type(value).__name__
    return f"{value!r}, a {kind}" if isinstance(value, (str, int, float, type(None))) else f"of the type {kind}"
