"""SCIP and HiGHS: each is imported only when it is chosen, and both obey one set of rules."""

from __future__ import annotations

import signal
import subprocess
import sys

import cvxpy as cp
import numpy as np
import pytest

from monetrun.core.errors import UsageError
from monetrun.core.options import Options
from monetrun.solve import solver
from monetrun.solve.mip.canonical import StopRule
from monetrun.solve.mip.minimize import minimize
from monetrun.solve.mip.rows import Rows
from support.paths import ROOT
from support.small_graphs import chain

SOLVERS = ("scip", "highs")


def knapsack() -> cp.Problem:
    """Items of values 6, 5, 4 and weights 5, 4, 3 in a bag of 7: the last two are worth most."""
    x = cp.Variable(3, name="x", boolean=True)
    return cp.Problem(cp.Minimize(np.array([-6.0, -5.0, -4.0]) @ x), [np.array([5.0, 4.0, 3.0]) @ x <= 7.0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_optimum_and_its_bound_are_found(solver):
    result = minimize(knapsack(), solver)
    assert (result.status, result.objective) == ("optimal", pytest.approx(-9.0))
    assert result.bound == pytest.approx(-9.0)
    assert result.value["x"].round().tolist() == [0, 1, 1]
    assert result.work_seconds > 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_program_without_solution_is_infeasible(solver):
    x = cp.Variable(2, name="x", boolean=True)
    result = minimize(cp.Problem(cp.Minimize(cp.sum(x)), [cp.sum(x) >= 3]), solver)
    assert (result.status, result.value) == ("infeasible", None)


@pytest.mark.parametrize("solver", SOLVERS)
def test_new_incumbents_are_reported_with_a_bound_below_them(solver):
    reports: list[tuple[float, float]] = []
    minimize(knapsack(), solver, StopRule(), {"x": np.array([1.0, 0.0, 0.0])}, lambda *now: reports.append(now))
    assert reports
    assert all(max(-9.0, bound) <= objective + 1e-9 for objective, bound in reports)
    assert reports == sorted(reports, key=lambda pair: -pair[0])


def test_an_unknown_solver_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match=r"no solver 'glpk'\n  use 'scip' or 'highs'"):
        minimize(knapsack(), "glpk")


@pytest.mark.parametrize(("chosen", "package", "other"), [("scip", "pyscipopt", "highs"), ("highs", "highspy", "scip")])
def test_one_solver_is_enough_and_stands_in_for_the_missing_one(chosen, package, other):
    code = f"""
import sys
sys.modules[{package!r}] = None  # as if it were not installed
from monetrun.core.options import Options
from monetrun.core.simulate import simulate
from monetrun.solve import solver
from support.small_graphs import chain
graph, costs = chain(6)
for name in ({other!r}, {chosen!r}):
    found = solver("ilp")(graph, costs, 5, Options(mip_solver=name))
    assert simulate(graph, costs, found.schedule).peak_bytes == 5, found
"""
    env_path = f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
    result = subprocess.run(
        [sys.executable, "-c", env_path + code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"the package {package} cannot be imported") == 1
    assert f"--solver {other} is used (to mend it: pip install {package})" in result.stderr


def test_a_solver_that_fails_leaves_what_was_found_without_it(monkeypatch, caplog):
    def fail(*given):
        raise RuntimeError("SCIP: error in LP solver!")

    monkeypatch.setattr("monetrun.solve.mip.scip.minimize", fail)
    graph, costs = chain(40)
    found = solver("hierarchical")(graph, costs, 12, Options(seconds=2.0, gap=0.0))
    assert found.schedule is not None
    assert "the solver has failed (RuntimeError: SCIP: error in LP solver!)" in caplog.text


SIGNALLED = """
import os, signal, sys, threading, time
from monetrun.core.options import Options
from monetrun.launcher.process import exit_on_signals
from monetrun.solve import solver
import monetrun.solve.mip.scip as scip

def progress(*given):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)

started, minimize = time.monotonic(), scip.minimize
scip.minimize = lambda m, stop, x0, _: minimize(m, stop, x0, progress)
with exit_on_signals():
    from support.small_graphs import chain
    graph, costs = chain(30)
    solver("ilp")(graph, costs, 9, Options(seconds=60.0, gap=0.0))
print("not ended")
"""


def test_a_signal_during_a_solvers_run_ends_the_process_as_it_would_before_and_after():
    paths = f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
    result = subprocess.run(
        [sys.executable, "-c", paths + SIGNALLED], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, ""), result.stderr


def test_a_row_without_terms_is_impossible_only_where_its_right_side_is_negative():
    rows = Rows()
    rows.add([], 0.0)
    assert not rows.impossible
    rows.add([], -1.0)
    assert rows.impossible
    assert rows.constraints({}) == []


def test_the_excess_of_a_row_is_what_exceeds_its_right_side():
    rows = Rows()
    rows.add([("x", 0, 2.0), ("y", 1, 1.0)], 3.0)
    rows.add([("x", 1, 1.0)], 3.0)
    assert rows.excess({"x": np.array([2.0, 1.0]), "y": np.array([0.0, 1.0])}).tolist() == [2.0, 0.0]
