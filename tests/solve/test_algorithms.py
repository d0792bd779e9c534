"""The table of algorithms: one signature, and every capability is what the algorithm does."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monetrun.core.errors import UsageError
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.planning import planner
from monetrun.solve import ALGORITHMS, cut, solver
from support.paths import ROOT
from support.random_graphs import joint_graphs
from support.small_graphs import chain, conv_norm_relu
from support.step_records import graph_record

USE_STARTS = [a.name for a in ALGORITHMS.values() if a.uses_starts]
IGNORE_STARTS = [a.name for a in ALGORITHMS.values() if not a.uses_starts]


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_names_of_the_algorithms_are_stable():
    assert tuple(ALGORITHMS) == ("hierarchical", "greedy", "ilp", "hong-dp", "hong-linear", "sqrt", "none")
    assert [a.name for a in ALGORITHMS.values()] == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_one_signature(name):
    parameters = inspect.signature(solver(name)).parameters
    assert list(parameters) == ["graph", "costs", "budget_bytes", "options", "starts"]
    assert parameters["starts"].default == ()


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(UsageError, match=r"no algorithm 'chen'(.|\n)*hierarchical, greedy, ilp"):
        solver("chen")


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(joint_graphs(max_forward=6, max_backward=5, in_place=False), st.integers(3, 9), st.sampled_from(USE_STARTS))
def test_a_result_is_never_dearer_than_a_start_that_fits(problem, tenths, name):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    starts = cut.schedules(graph, costs, budget_bytes, Options(), rounds=4)
    fitting = [t.seconds for t in (simulate(graph, costs, s) for s in starts) if t.peak_bytes <= budget_bytes]
    solution = solver(name)(graph, costs, budget_bytes, Options(seconds=0.2, mip_solver="highs"), starts)
    if fitting:
        assert solution.schedule is not None
        timeline = simulate(graph, costs, solution.schedule)
        assert timeline.peak_bytes <= budget_bytes
        assert timeline.seconds <= min(fitting) + 1e-9
        assert solution.bound_seconds <= timeline.seconds + 1e-9
        assert solution.status in ("optimal", "feasible")


@pytest.mark.parametrize("name", IGNORE_STARTS)
def test_a_checkpoint_selection_ignores_the_starts(name):
    graph, costs = chain(9)
    start = cut.dropping(graph, plain_schedule(graph), range(8))
    budget_bytes = simulate(graph, costs, start).peak_bytes
    schedule = solver(name)(graph, costs, budget_bytes, Options()).schedule
    assert solver(name)(graph, costs, budget_bytes, Options(), [start]).schedule == schedule
    assert schedule != start


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_algorithms_that_choose_implementations_use_alternatives(name):
    graph, costs = conv_norm_relu(6)
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * 8 // 10
    schedule = solver(name)(graph, costs, budget_bytes, Options(seconds=3.0, mip_solver="highs")).schedule
    if schedule is None:  # the checkpoint selections may not reach the budget, others must
        assert not ALGORITHMS[name].chooses_implementations
        return
    others = any(step.implementation for step in schedule.forward + schedule.backward)
    assert others == ALGORITHMS[name].chooses_implementations


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_planner_passes_starts_to_the_algorithms_that_use_them(name, monkeypatch):
    record = graph_record(*chain(6))
    base = planner.baseline(record)
    passed = []

    def solve(graph, costs, budget_bytes, options, starts=()):
        passed.extend(starts)
        return solver(name)(graph, costs, budget_bytes, options, starts)

    monkeypatch.setattr(planner.solve, "solver", lambda _: solve)
    budget_bytes = (base.frugal.peak_bytes + base.plain.peak_bytes) // 2
    planner.plan_step(record, budget_bytes, name, Options(seconds=0.5, mip_solver="highs"), base)
    assert (base.frugal_schedules[0] in passed) == ALGORITHMS[name].uses_starts


def test_importing_the_table_imports_neither_torch_nor_a_solver():
    heavy = ("torch", "cvxpy", "numpy", "scipy", "pyscipopt", "highspy")
    code = f"import sys, monetrun.solve, monetrun.solve.mip; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_without_cvxpy_the_error_names_the_algorithms_that_do_not_need_it():
    code = """
import sys
sys.modules["cvxpy"] = None
from monetrun.core.errors import UsageError
from monetrun.solve import ALGORITHMS, solver
for name, algorithm in ALGORITHMS.items():
    try:
        solver(name)
    except UsageError as error:
        assert "cvxpy" in error.message and "greedy, hong-dp, hong-linear, sqrt, none" in error.hint, error
        assert algorithm.needs_cvxpy, name
    else:
        assert not algorithm.needs_cvxpy, name
print("done")
"""
    assert run_python(code).strip() == "done"
