"""SCIP and HiGHS: each is imported only when it is chosen, and both obey one set of rules."""

from __future__ import annotations

import subprocess
import sys

import cvxpy as cp
import numpy as np
import pytest

from monetrun.core.errors import UsageError
from monetrun.solve.mip.canonical import StopRule
from monetrun.solve.mip.minimize import minimize
from monetrun.solve.mip.rows import Rows
from support.paths import ROOT

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


@pytest.mark.parametrize(
    ("chosen", "package", "other", "others_package"),
    [("scip", "pyscipopt", "highs", "highspy"), ("highs", "highspy", "scip", "pyscipopt")],
)
def test_one_solver_is_enough_and_the_missing_one_is_named_when_it_is_chosen(chosen, package, other, others_package):
    code = f"""
import sys
sys.modules[{package!r}] = None  # as if it were not installed
from monetrun.core.errors import UsageError
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import solver
from support.small_graphs import chain
graph, costs = chain(6)
found = solver("ilp")(graph, costs, 5, Options(mip_solver={other!r}))
assert simulate(graph, costs, found.schedule).peak_bytes == 5, found
try:
    solver("hierarchical")(graph, costs, 5, Options(mip_solver={chosen!r}))
except UsageError as error:
    print(error)
"""
    env_path = f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
    result = subprocess.run(
        [sys.executable, "-c", env_path + code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"--solver {chosen} needs the package {package}" in result.stdout
    assert f"use --solver {other}, or: pip install {package}" in result.stdout


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
