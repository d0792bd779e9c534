"""HiGHS."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import highspy
import numpy as np

from monetrun.solve.mip.canonical import Matrices, Outcome, Progress, StopRule, Vector


def minimize(m: Matrices, stop: StopRule, x0: Vector | None, progress: Progress | None) -> Outcome:
    """Minimize ``m`` from the solution ``x0``; see ``mip.minimize.minimize``."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in _options(m, stop).items():
        highs.setOptionValue(name, value)
    highs.passModel(_model(m))
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
        if x0 is not None and not pressed.is_set() and not _has_its_objective(highs, m):
            highs.clearSolver()  # without the start
            highs.run()
    return _outcome(highs, m, pressed.is_set())


def _options(m: Matrices, stop: StopRule) -> dict[str, bool | int | float]:
    options: dict[str, bool | int | float] = {
        "output_flag": False,
        "threads": 1,
        "time_limit": max(stop.seconds, 0.01),
        "mip_rel_gap": stop.gap,
        "random_seed": stop.seed,
    }
    if stop.work_seconds < np.inf:  # while it runs, HiGHS counts nodes only; one takes a few dozen iterations
        options["mip_max_nodes"] = max(1, int(m.iterations(stop.work_seconds) / 40))
    return options


def _model(m: Matrices) -> highspy.HighsLp:
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
    return model


def _has_its_objective(highs: highspy.Highs, m: Matrices) -> bool:
    """Whether the solution that HiGHS gives has the objective that it says.

    HiGHS 1.16 has reductions of its presolve improve a start, says that it is optimal, and gives the start as it was.
    """
    x, objective = np.array(highs.getSolution().col_value), highs.getInfo().objective_function_value
    return len(x) != len(m.cost) or not np.isfinite(objective) or bool(np.isclose(m.cost @ x, objective, rtol=1e-6))


def _outcome(highs: highspy.Highs, m: Matrices, interrupted: bool) -> Outcome:
    """Read the result of a solved model."""
    status = highs.getModelStatus()
    info = highs.getInfo()
    iterations = max(0, int(info.simplex_iteration_count))
    mixed = bool(m.integral.any())
    if status == highspy.HighsModelStatus.kInfeasible:
        return Outcome("infeasible", None, np.inf, np.inf, interrupted, iterations)
    bound = float(info.mip_dual_bound) if mixed else -np.inf
    done = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kObjectiveBound)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Outcome("unknown", None, np.inf, bound, interrupted, iterations)
    x = np.array(highs.getSolution().col_value)
    objective = float(m.cost @ x)
    if not mixed and done:
        bound = objective
    return Outcome("optimal" if done else "feasible", x, objective, min(bound, objective), interrupted, iterations)


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
