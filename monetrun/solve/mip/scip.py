"""SCIP."""

from __future__ import annotations

import numpy as np
import pyscipopt
from pyscipopt import SCIP_STAGE
from pyscipopt.scip import PY_SCIP_EVENTTYPE, PY_SCIP_PARAMSETTING, Expr, ExprCons, Term

from monetrun.solve.mip.canonical import Matrices, Outcome, Progress, StopRule, Vector


class _Incumbents(pyscipopt.Eventhdlr):
    """Calls ``progress`` at each new incumbent."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def eventinit(self) -> None:
        self.model.catchEvent(PY_SCIP_EVENTTYPE.BESTSOLFOUND, self)

    def eventexit(self) -> None:
        self.model.dropEvent(PY_SCIP_EVENTTYPE.BESTSOLFOUND, self)

    def eventexec(self, event: object) -> None:
        self.progress(self.model.getPrimalbound(), self.model.getDualbound())


class _WorkLimit(pyscipopt.Eventhdlr):
    """Stops SCIP after a number of simplex iterations."""

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


def minimize(m: Matrices, stop: StopRule, x0: Vector | None, progress: Progress | None) -> Outcome:
    """Minimize ``m`` from the solution ``x0``; see ``mip.minimize.minimize``."""
    model = pyscipopt.Model()
    model.hideOutput()
    variables = _add_variables(model, m)
    if not _add_rows(model, m, variables):
        return Outcome("infeasible")
    # measured on windows and block programs of ResNet-50, MobileNetV2, GoogLeNet and a U-Net (SCIP 10, 2026-11): full
    # presolving takes longer than it saves, and heuristics find at the root what branching does not in seconds
    model.setPresolve(PY_SCIP_PARAMSETTING.FAST)
    model.setHeuristics(PY_SCIP_PARAMSETTING.AGGRESSIVE)
    model.setParams(
        {
            "limits/time": min(max(stop.seconds, 0.01), 1e9),
            "limits/gap": stop.gap,
            "randomization/randomseedshift": stop.seed,
            "misc/usesymmetry": 0,
        }
    )
    if progress is not None:
        model.includeEventhdlr(_Incumbents(progress), "incumbents", "reports new incumbents")
    limit = _WorkLimit(m.iterations(stop.work_seconds))
    model.includeEventhdlr(limit, "work", "stops after a number of simplex iterations")
    if x0 is not None:
        start = model.createSol()
        for variable, value in zip(variables, x0.tolist(), strict=True):
            model.setSolVal(start, variable, value)
        model.addSol(start)
    model.optimize()
    return _outcome(model, m, variables, limit)


def _add_variables(model: pyscipopt.Model, m: Matrices) -> list[pyscipopt.Variable]:
    kinds = np.where(m.integral, "I", "C").tolist()
    bounds = zip(m.lower.tolist(), m.upper.tolist(), m.cost.tolist(), kinds, strict=True)
    return [model.addVar(lb=lo, ub=up, obj=c, vtype=kind) for lo, up, c, kind in bounds]


def _add_rows(model: pyscipopt.Model, m: Matrices, variables: list[pyscipopt.Variable]) -> bool:
    """Add the constraints; False if a row without entries cannot hold."""
    terms = [Term(v) for v in variables]
    pointers, columns, values = m.matrix.indptr.tolist(), m.matrix.indices.tolist(), m.matrix.data.tolist()
    for row, rhs in enumerate(m.rhs.tolist()):
        span = slice(pointers[row], pointers[row + 1])
        lhs = rhs if row < m.equalities else None
        entries = {terms[j]: a for j, a in zip(columns[span], values[span], strict=True)}
        if entries:
            model.addCons(ExprCons(Expr(entries), lhs=lhs, rhs=rhs))
        elif rhs < 0 or (lhs is not None and rhs != 0):
            return False
    return True


def _outcome(model: pyscipopt.Model, m: Matrices, variables: list[pyscipopt.Variable], limit: _WorkLimit) -> Outcome:
    """Read the result of a solved ``model``."""
    status = model.getStatus()
    interrupted = status == "userinterrupt" and not limit.reached
    iterations = int(model.getNLPIterations()) if model.getStage() >= SCIP_STAGE.SOLVING else 0
    bound = max(model.getDualbound(), -1e20)
    if status == "infeasible":
        return Outcome("infeasible", None, np.inf, np.inf, interrupted, iterations)
    if not model.getNSols():
        return Outcome("unknown", None, np.inf, bound, interrupted, iterations)
    best = model.getBestSol()
    x = np.array([model.getSolVal(best, v) for v in variables])
    objective = float(m.cost @ x)
    done = status in ("optimal", "gaplimit")
    return Outcome("optimal" if done else "feasible", x, objective, min(bound, objective), interrupted, iterations)
