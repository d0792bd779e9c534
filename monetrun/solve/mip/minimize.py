"""Pass a cvxpy problem to SCIP or HiGHS, with a warm start, a work limit, and a Ctrl-C that keeps the incumbent.

cvxpy builds the program, but hides the solver's model, takes no warm start for it, and loses the incumbent when the
solver is interrupted. So its canonical matrices (``get_problem_data``) go to the solver directly.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from types import ModuleType

import cvxpy as cp
import numpy as np
import scipy.sparse as sp

from monetrun.core.errors import UsageError
from monetrun.solve.mip import PACKAGES
from monetrun.solve.mip.canonical import Matrices, Progress, StopRule, Vector

_log = logging.getLogger("monetrun")


@dataclass(frozen=True, slots=True)
class Result:
    """What a solver found.

    Attributes:
        status: as in ``canonical.Outcome``.
        value: the incumbent's value of each variable of the problem, by name; None without an incumbent.
        objective: of the incumbent.
        bound: no solution has a smaller objective.
        interrupted: Ctrl-C was pressed.
        work_seconds: estimated seconds on an idle core, from the work done: the same on every machine.
    """

    status: str
    value: dict[str, Vector] | None
    objective: float
    bound: float
    interrupted: bool = False
    work_seconds: float = 0.0


def minimize(
    problem: cp.Problem,
    solver: str = "scip",
    stop: StopRule = StopRule(),  # noqa: B008
    start: dict[str, Vector] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Minimize a mixed-integer linear ``problem`` whose variables are named vectors.

    Args:
        problem: built with cvxpy; its objective must have no constant term.
        solver: ``"scip"`` or ``"highs"``; only this one is imported, unless its package is missing.
        stop: when to stop.
        start: a value for every variable, by name, to start from; the solver ignores it where it is not feasible.
        progress: called with (objective, bound) at each new incumbent.

    Raises:
        UsageError: there is no such solver, or none is installed.
    """
    backend = _backend(solver)
    if not problem.variables():
        return Result("optimal", {}, 0.0, 0.0)
    data, _, _ = problem.get_problem_data(cp.SCIP if backend.__name__.endswith("scip") else cp.HIGHS)
    size = len(data["c"])
    integral = np.zeros(size, dtype=bool)
    integral[sorted(data["bool_vars_idx"]) + sorted(data["int_vars_idx"])] = True
    lower = np.full(size, -np.inf) if data.get("lower_bounds") is None else np.array(data["lower_bounds"], float)
    upper = np.full(size, np.inf) if data.get("upper_bounds") is None else np.array(data["upper_bounds"], float)
    booleans = sorted(data["bool_vars_idx"])
    lower[booleans], upper[booleans] = np.maximum(lower[booleans], 0.0), np.minimum(upper[booleans], 1.0)
    matrices = Matrices(
        np.asarray(data["c"], float), sp.csr_matrix(data["A"]), data["b"], data["dims"].zero, lower, upper, integral
    )
    columns = data["param_prob"].var_id_to_col
    spans = {v.name(): slice(columns[v.id], columns[v.id] + v.size) for v in problem.variables()}
    x0 = None
    if start is not None:
        x0 = np.zeros(size)
        for name, span in spans.items():
            x0[span] = start[name]
    found = backend.minimize(matrices, stop, x0, progress)
    value = None if found.x is None else {name: found.x[span] for name, span in spans.items()}
    work_seconds = matrices.work_seconds(found.iterations)
    return Result(found.status, value, found.objective, found.bound, found.interrupted, work_seconds)


@functools.cache
def _backend(solver: str) -> ModuleType:
    """The module of ``solver``, or of the other one where its package cannot be imported."""
    if solver not in PACKAGES:
        raise UsageError(f"there is no solver {solver!r}", f"use {' or '.join(map(repr, PACKAGES))}")
    errors = []
    for one in sorted(PACKAGES, key=lambda name: name != solver):
        try:
            module = importlib.import_module(f"monetrun.solve.mip.{one}")
        except ImportError as error:
            errors.append(f"the package {PACKAGES[one]} cannot be imported: {error}")
        else:
            if errors:
                _log.warning("%s; --solver %s is used (to mend it: pip install %s)", errors[0], one, PACKAGES[solver])
            return module
    raise UsageError("; ".join(errors), f"pip install {PACKAGES[solver]}")
