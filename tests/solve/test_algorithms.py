"""The table of algorithms: one signature, and every capability is what the algorithm does."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monetrun.core.errors import NoPlanInTime, UsageError
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.launcher.parser import help_text, launch_parser
from monetrun.planning import planner
from monetrun.solve import ALGORITHMS, Algorithm, algorithm, cut, descriptions, solver
from support.examples import examples
from support.paths import ROOT
from support.random_graphs import joint_graphs
from support.small_graphs import chain, conv_norm_relu
from support.step_records import graph_record

USE_STARTS = [name for name, algorithm in ALGORITHMS.items() if algorithm.uses_starts]
IGNORE_STARTS = [name for name in ALGORITHMS if name not in USE_STARTS]


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_names_of_the_algorithms_are_stable():
    assert tuple(ALGORITHMS) == ("hierarchical", "greedy", "ilp", "hong-dp", "hong-linear", "sqrt", "none")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_one_signature(name):
    parameters = inspect.signature(solver(name)).parameters
    assert list(parameters) == ["graph", "costs", "budget_bytes", "options", "starts"]
    assert parameters["starts"].default == ()


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(UsageError, match=r"no algorithm 'chen'(.|\n)*hierarchical, greedy, ilp"):
        solver("chen")


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
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
    with contextlib.suppress(NoPlanInTime):  # what recomputes nothing has none: no other algorithm's plan has its name
        planner.plan_step(record, budget_bytes, name, Options(seconds=0.5, mip_solver="highs"), base)
    assert (base.frugal_schedules[0] in passed) == ALGORITHMS[name].uses_starts


def test_importing_the_table_imports_neither_torch_nor_a_solver():
    heavy = ("torch", "cvxpy", "numpy", "scipy", "pyscipopt", "highspy")
    code = f"import sys, monetrun.solve, monetrun.solve.mip; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_the_default_solver_does_not_import_cvxpy_where_the_plain_schedule_fits():
    code = """
import sys
sys.path.insert(0, 'tests')
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import solver
from support.step_records import chain_record
record = chain_record(10)
graph, costs = record.graphs[0], record.costs[0]
plain = simulate(graph, costs, plain_schedule(graph)).peak_bytes
print(solver("hierarchical")(graph, costs, plain, Options(seconds=1.0)).status, "cvxpy" in sys.modules)
"""
    assert run_python(code).split() == ["optimal", "False"]


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


MODULE = """
from monetrun.solve import Algorithm
ALGORITHM = Algorithm(__name__, "solve", "a description", uses_starts=True)
ELSEWHERE = Algorithm("mine.missing", "solve", "a description")
NO_FUNCTION = Algorithm(__name__, "solver", "a description")
def solve(graph, costs, budget_bytes, options, starts=()):
    return "solved"
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package that names the given lines in the entry point group of the solvers."""

    def install(*lines: str, name: str = "mine") -> None:
        folder = tmp_path / name
        for path, text in {
            f"{name}/__init__.py": MODULE,
            f"{name}/broken.py": "1 / 0",
            f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            f"{name}-1.0.dist-info/entry_points.txt": "\n".join(["[monetrun.solvers]", *lines, ""]),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        monkeypatch.syspath_prepend(str(folder))

    before = set(sys.modules)
    yield install
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in ("mine", "other"):
            del sys.modules[module]


def test_an_installed_package_adds_an_algorithm(installed):
    installed("chen = mine:ALGORITHM", "aaa = mine:ALGORITHM")
    assert tuple(descriptions()) == (*ALGORITHMS, "aaa", "chen")
    assert descriptions()["chen"] == "from mine:ALGORITHM"
    assert "chen: from mine:ALGORITHM" in " ".join(help_text().split())
    assert "mine" not in sys.modules
    assert algorithm("chen") == Algorithm("mine", "solve", "a description", uses_starts=True)
    assert solver("chen")(None, None, 0, None) == "solved"


def test_monetruns_own_algorithm_comes_before_a_packages_of_the_same_name(installed):
    installed("greedy = mine.broken:ALGORITHM")
    assert tuple(descriptions()) == tuple(ALGORITHMS)
    assert descriptions()["greedy"] == ALGORITHMS["greedy"].description
    assert solver("greedy").__module__ == "monetrun.solve.greedy"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("mine.missing:ALGORITHM", "ModuleNotFoundError: No module named 'mine.missing'"),
        ("mine:MISSING", "AttributeError: module 'mine' has no attribute 'MISSING'"),
        ("mine.broken:ALGORITHM", "ZeroDivisionError: division by zero"),
        ("mine:solve", "mine:solve is <function solve at .*>, not a monetrun.solve.Algorithm"),
        ("mine:ELSEWHERE", "No module named 'mine.missing'"),
        ("mine:NO_FUNCTION", "module 'mine' has no attribute 'solver'"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_named_before_anything_runs(installed, value, why):
    installed(f"chen = {value}")
    with pytest.raises(UsageError, match=rf"the entry point 'chen' in the group monetrun\.solvers(.|\n)*{why}"):
        solver("chen")
    with pytest.raises(UsageError, match="the entry point 'chen'"):
        launch_parser().parse_launch(["--algorithm", "chen", "train.py"])
    assert launch_parser().parse_launch(["train.py"])[0].algorithm == "hierarchical"


def test_a_name_that_two_packages_give_is_refused(installed):
    installed("chen = mine:ALGORITHM")
    installed("chen = other:ALGORITHM", name="other")
    with pytest.raises(UsageError, match=r"several packages have one: mine:ALGORITHM, other:ALGORITHM"):
        solver("chen")
