"""Hand a cvxpy problem to SCIP or HiGHS, with a warm start, a live incumbent and a Ctrl-C that keeps it.

cvxpy builds the program, but hides the solver's model, takes no warm start for it, and loses the incumbent when the
solver is interrupted. Here its canonical matrices (``get_problem_data``) are given to the solver directly.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import highspy
import numpy as np
import pyscipopt
import scipy.sparse as sp
from numpy.typing import NDArray
from pyscipopt import SCIP_STAGE
from pyscipopt.scip import PY_SCIP_EVENTTYPE, PY_SCIP_PARAMSETTING, Expr, ExprCons, Term

from monetrun.core.errors import UsageError

Vector = NDArray[np.float64]

# Seconds of a simplex iteration, and of a nonzero in it, with all that solvers do beside: SCIP 10 and HiGHS 1.15 on the
# programs of six networks, one 2.6 GHz Zen 4 core, 2026-11; single solves take 0.4 to 2.5 times as long.
_ITERATION_SECONDS, _NONZERO_SECONDS = 3e-4, 2e-9
_ENTRY_SECONDS = 5e-6  # of building, handing over and presolving a nonzero
Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class Limits:
    """When a solver stops.

    Attributes:
        seconds: wall clock.
        work_seconds: of ``Result.work_seconds``, looked at after each relaxation (SCIP) or node (HiGHS): unlike
            ``seconds`` it stops at the same point every time.
        gap: relative distance of incumbent and bound.
        cutoff: only solutions of a smaller objective are looked for, or None.
        seed: of the solver's random choices.
    """

    seconds: float = 1e9
    gap: float = 0.0
    work_seconds: float = np.inf
    cutoff: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What a solver found.

    Attributes:
        status: ``"optimal"`` (within the gap), ``"feasible"``, ``"infeasible"`` (proven; with a cutoff: nothing
            better than it), or ``"unknown"``.
        value: the incumbent's value of each variable of the problem, by name; None without incumbent.
        objective: the incumbent's.
        bound: no solution has a smaller objective.
        interrupted: Ctrl-C was pressed.
        work_seconds: about how long it takes on an idle core, from the work done: the same on every machine.
    """

    status: str
    value: dict[str, Vector] | None
    objective: float
    bound: float
    interrupted: bool = False
    work_seconds: float = 0.0


@dataclass(frozen=True)
class _Matrices:
    """minimize cost @ x, where matrix @ x <= rhs (equal in the first ``equalities`` rows), lower <= x <= upper."""

    cost: Vector
    matrix: Any  # scipy's csr_matrix
    rhs: Vector
    equalities: int
    lower: Vector
    upper: Vector
    integral: NDArray[np.bool_]

    def work_seconds(self, iterations: int) -> float:
        """About how long so many simplex iterations take."""
        nonzeros = self.matrix.nnz
        return float(iterations * (_ITERATION_SECONDS + _NONZERO_SECONDS * nonzeros) + _ENTRY_SECONDS * nonzeros)

    def iterations(self, work_seconds: float) -> float:
        """How many simplex iterations take so long."""
        return (work_seconds - self.work_seconds(0)) / (self.work_seconds(1) - self.work_seconds(0))


def minimize(
    problem: cp.Problem,
    solver: str = "scip",
    limits: Limits | None = None,
    start: dict[str, Vector] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Minimize a mixed-integer linear ``problem``, whose variables are named vectors.

    Args:
        problem: built with cvxpy; its objective must have no constant term.
        solver: ``"scip"`` or ``"highs"``.
        limits: when to stop.
        start: a value for every variable, by name, to start from; ignored by the solver where it is not feasible.
        progress: called with (objective, bound) at each new incumbent.

    Raises:
        UsageError: there is no such solver.
    """
    limits = limits or Limits()
    if solver not in ("scip", "highs"):
        raise UsageError(f"there is no solver {solver!r}", "use 'scip' or 'highs'")
    if not problem.variables():
        return Result("optimal", {}, 0.0, 0.0)
    data, _, _ = problem.get_problem_data(cp.SCIP if solver == "scip" else cp.HIGHS)
    size = len(data["c"])
    integral = np.zeros(size, dtype=bool)
    integral[sorted(data["bool_vars_idx"]) + sorted(data["int_vars_idx"])] = True
    lower = np.full(size, -np.inf) if data.get("lower_bounds") is None else np.array(data["lower_bounds"], float)
    upper = np.full(size, np.inf) if data.get("upper_bounds") is None else np.array(data["upper_bounds"], float)
    booleans = sorted(data["bool_vars_idx"])
    lower[booleans], upper[booleans] = np.maximum(lower[booleans], 0.0), np.minimum(upper[booleans], 1.0)
    matrices = _Matrices(
        np.asarray(data["c"], float), sp.csr_matrix(data["A"]), data["b"], data["dims"].zero, lower, upper, integral
    )
    columns = data["param_prob"].var_id_to_col
    spans = {v.name(): slice(columns[v.id], columns[v.id] + v.size) for v in problem.variables()}
    x0 = None
    if start is not None:
        x0 = np.zeros(size)
        for name, span in spans.items():
            x0[span] = start[name]
    run = _scip if solver == "scip" else _highs
    status, x, objective, bound, interrupted, iterations = run(matrices, limits, x0, progress)
    value = None if x is None else {name: x[span] for name, span in spans.items()}
    return Result(status, value, objective, bound, interrupted, matrices.work_seconds(iterations))


class Rows:
    """Constraints of one kind, written row by row: terms of (variable, column, coefficient), at most a right side.

    Attributes:
        impossible: a row without terms demands a negative left side.
    """

    def __init__(self) -> None:
        self.impossible = False
        self._entries: dict[str, tuple[list[int], list[int], list[float]]] = {}
        self._rhs: list[float] = []

    def add(self, terms: Iterable[tuple[str, int, float]], rhs: float) -> None:
        """One row: the terms' sum is at most ``rhs``."""
        row, empty = len(self._rhs), True
        for name, column, coefficient in terms:
            rows, columns, coefficients = self._entries.setdefault(name, ([], [], []))
            rows.append(row)
            columns.append(column)
            coefficients.append(coefficient)
            empty = False
        if not empty:
            self._rhs.append(rhs)
        elif rhs < 0:
            self.impossible = True

    def constraints(self, variables: dict[str, cp.Variable], equal: bool = False) -> list[cp.Constraint]:
        """The rows as one cvxpy constraint, or none where there are no rows."""
        if not self._rhs:
            return []
        total: cp.Expression = cp.Constant(np.zeros(len(self._rhs)))
        for name, (rows, columns, coefficients) in self._entries.items():
            shape = (len(self._rhs), variables[name].size)
            total += sp.csr_matrix((coefficients, (rows, columns)), shape=shape) @ variables[name]
        rhs = np.array(self._rhs)
        return [total == rhs if equal else total <= rhs]

    def excess(self, value: dict[str, Vector]) -> Vector:
        """By how much each row's left side is over its right side, or 0."""
        total = -np.array(self._rhs)
        for name, (rows, columns, coefficients) in self._entries.items():
            np.add.at(total, rows, np.array(coefficients) * value[name][columns])
        return np.asarray(np.maximum(total, 0.0))


_Raw = tuple[str, "Vector | None", float, float, bool, int]


class _Incumbents(pyscipopt.Eventhdlr):
    """Tells ``progress`` of SCIP's new incumbents."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def eventinit(self) -> None:
        self.model.catchEvent(PY_SCIP_EVENTTYPE.BESTSOLFOUND, self)

    def eventexit(self) -> None:
        self.model.dropEvent(PY_SCIP_EVENTTYPE.BESTSOLFOUND, self)

    def eventexec(self, event: object) -> None:
        self.progress(self.model.getPrimalbound(), self.model.getDualbound())


class _WorkLimit(pyscipopt.Eventhdlr):
    """Stops SCIP once it has done so many simplex iterations."""

    def __init__(self, iterations: float) -> None:
        self.iterations = iterations
        self.reached = False

    def eventinit(self) -> None:
        for kind in (PY_SCIP_EVENTTYPE.LPEVENT, PY_SCIP_EVENTTYPE.NODESOLVED):
            self.model.catchEvent(kind, self)

    def eventexit(self) -> None:
        for kind in (PY_SCIP_EVENTTYPE.LPEVENT, PY_SCIP_EVENTTYPE.NODESOLVED):
            self.model.dropEvent(kind, self)

    def eventexec(self, event: object) -> None:
        if not self.reached and self.model.getNLPIterations() >= self.iterations:
            self.reached = True
            self.model.interruptSolve()


def _scip(m: _Matrices, limits: Limits, x0: Vector | None, progress: Progress | None) -> _Raw:
    model = pyscipopt.Model()
    model.hideOutput()
    kinds = np.where(m.integral, "I", "C").tolist()
    bounds = zip(m.lower.tolist(), m.upper.tolist(), m.cost.tolist(), kinds, strict=True)
    x = [model.addVar(lb=lo, ub=up, obj=c, vtype=kind) for lo, up, c, kind in bounds]
    terms = [Term(v) for v in x]
    pointers, columns, values = m.matrix.indptr.tolist(), m.matrix.indices.tolist(), m.matrix.data.tolist()
    for row, rhs in enumerate(m.rhs.tolist()):
        span = slice(pointers[row], pointers[row + 1])
        lhs = rhs if row < m.equalities else None
        entries = {terms[j]: a for j, a in zip(columns[span], values[span], strict=True)}
        if entries:
            model.addCons(ExprCons(Expr(entries), lhs=lhs, rhs=rhs))
        elif rhs < 0 or (lhs is not None and rhs != 0):
            return "infeasible", None, np.inf, np.inf, False, 0
    # measured on windows and block programs of ResNet-50, MobileNetV2, GoogLeNet and a U-Net (SCIP 10, 2026-11): full
    # presolving takes longer than it saves, and heuristics find at the root what branching does not in seconds
    model.setPresolve(PY_SCIP_PARAMSETTING.FAST)
    model.setHeuristics(PY_SCIP_PARAMSETTING.AGGRESSIVE)
    model.setParams(
        {
            "limits/time": min(max(limits.seconds, 0.01), 1e9),
            "limits/gap": limits.gap,
            "randomization/randomseedshift": limits.seed,
            "misc/usesymmetry": 0,
        }
    )
    if limits.cutoff is not None:
        model.setObjlimit(limits.cutoff)
    if progress is not None:
        handler = _Incumbents(progress)
        model.includeEventhdlr(handler, "incumbents", "tells of new incumbents")
    clock = _WorkLimit(m.iterations(limits.work_seconds))
    model.includeEventhdlr(clock, "work", "stops after a number of simplex iterations")
    if x0 is not None:
        start = model.createSol()
        for v, value in zip(x, x0.tolist(), strict=True):
            model.setSolVal(start, v, value)
        model.addSol(start)
    model.optimize()
    status = model.getStatus()
    interrupted = status == "userinterrupt" and not clock.reached
    iterations = int(model.getNLPIterations()) if model.getStage() >= SCIP_STAGE.SOLVING else 0
    bound = max(model.getDualbound(), -1e20)
    if status == "infeasible":
        return (
            "infeasible",
            None,
            np.inf,
            limits.cutoff if limits.cutoff is not None else np.inf,
            interrupted,
            iterations,
        )
    if not model.getNSols():
        return "unknown", None, np.inf, bound, interrupted, iterations
    best = model.getBestSol()
    values_found = np.array([model.getSolVal(best, v) for v in x])
    objective = float(m.cost @ values_found)
    if limits.cutoff is not None and objective > limits.cutoff:
        return ("infeasible" if status == "optimal" else "unknown"), None, np.inf, bound, interrupted, iterations
    done = status in ("optimal", "gaplimit")
    return "optimal" if done else "feasible", values_found, objective, min(bound, objective), interrupted, iterations


def _highs(m: _Matrices, limits: Limits, x0: Vector | None, progress: Progress | None) -> _Raw:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(m.cost), len(m.rhs)
    model.col_cost_, model.col_lower_, model.col_upper_ = m.cost, m.lower, m.upper
    model.row_upper_ = m.rhs
    model.row_lower_ = np.where(np.arange(len(m.rhs)) < m.equalities, m.rhs, -highspy.kHighsInf)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_ = m.matrix.indptr, m.matrix.indices
    model.a_matrix_.value_ = m.matrix.data
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[int(i)] for i in m.integral] if m.integral.any() else []
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    options: dict[str, bool | int | float] = {
        "output_flag": False,
        "threads": 1,
        "time_limit": max(limits.seconds, 0.01),
        "mip_rel_gap": limits.gap,
        "random_seed": limits.seed,
    }
    if limits.work_seconds < np.inf:  # HiGHS counts nodes only while it runs; one takes a few dozen iterations
        options["mip_max_nodes"] = max(1, int(m.iterations(limits.work_seconds) / 40))
    if limits.cutoff is not None:
        options["objective_bound"] = limits.cutoff
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(model)
    if x0 is not None:
        start = highspy.HighsSolution()
        start.col_value = x0.tolist()
        highs.setSolution(start)
    pressed = threading.Event()
    if progress is not None:
        highs.cbMipImprovingSolution += lambda e: progress(
            e.data_out.objective_function_value, e.data_out.mip_dual_bound
        )

    def stop_if_pressed(event: Any) -> None:
        if pressed.is_set():
            event.interrupt()

    highs.cbMipInterrupt += stop_if_pressed
    with _noting_interrupts(pressed):
        highs.run()
    status = highs.getModelStatus()
    info = highs.getInfo()
    iterations = max(0, int(info.simplex_iteration_count))
    mixed = bool(m.integral.any())
    if status == highspy.HighsModelStatus.kInfeasible:
        return "infeasible", None, np.inf, np.inf, pressed.is_set(), iterations
    bound = float(info.mip_dual_bound) if mixed else -np.inf
    done = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kObjectiveBound)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return "unknown", None, np.inf, bound, pressed.is_set(), iterations
    x = np.array(highs.getSolution().col_value)
    objective = float(m.cost @ x)
    if not mixed and done:
        bound = objective
    return "optimal" if done else "feasible", x, objective, min(bound, objective), pressed.is_set(), iterations


@contextmanager
def _noting_interrupts(pressed: threading.Event) -> Iterator[None]:
    """While HiGHS runs, Ctrl-C sets ``pressed``: an exception would have to cross its C++ frames."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
