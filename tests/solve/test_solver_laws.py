"""Laws of the solvers on random graphs, whatever the search does."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monetrun.core import codec
from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import GraphPlan, Plan, Schedule, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.planning import planner
from monetrun.planning.frontier import frontier
from monetrun.solve import hierarchical, ilp, timing
from monetrun.solve.places import Places
from monetrun.solve.relaxation import relax
from monetrun.solve.relaxed_schedule import start_from
from support.examples import examples
from support.random_graphs import joint_graphs, schedules
from support.small_graphs import chain, conv_norm_relu
from support.step_records import graph_record

quick = settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
EXACT = Options(seconds=60.0, gap=0.0)


def share_of_plain_peak(graph: Graph, costs: Costs, tenths: int) -> int:
    return simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10


def seconds_of(graph: Graph, costs: Costs, schedule: Schedule | None) -> float:
    return float("inf") if schedule is None else simulate(graph, costs, schedule).seconds


@quick
@given(joint_graphs(max_forward=8, max_backward=7), st.integers(3, 10))
def test_hierarchical_equals_the_exact_ilp_within_a_percent(problem, tenths):
    graph, costs = problem
    budget_bytes = share_of_plain_peak(graph, costs, tenths)
    exact = ilp.solve(graph, costs, budget_bytes, EXACT)
    found = hierarchical.solve(graph, costs, budget_bytes, Options(seconds=2.0, gap=0.0))
    # other orders than the integer program's class may be cheaper
    assert seconds_of(graph, costs, found.schedule) <= 1.01 * seconds_of(graph, costs, exact.schedule)


@pytest.mark.parametrize(
    ("blocks", "tenths"),
    [(4, 6), pytest.param(5, 5, marks=pytest.mark.nightly), pytest.param(6, 7, marks=pytest.mark.nightly)],
)
def test_hierarchical_equals_the_exact_ilp_on_networks_with_other_implementations(blocks, tenths):
    graph, costs = conv_norm_relu(blocks, (16, 8, 24))
    budget_bytes = share_of_plain_peak(graph, costs, tenths)
    exact = ilp.solve(graph, costs, budget_bytes, dataclasses.replace(EXACT, gap=0.002))
    found = hierarchical.solve(graph, costs, budget_bytes, Options(seconds=4.0, gap=0.005))
    assert exact.status == "optimal"
    assert seconds_of(graph, costs, found.schedule) <= 1.01 * seconds_of(graph, costs, exact.schedule)


def test_recomputation_and_other_implementations_are_used_together():
    graph, costs = conv_norm_relu(16)
    budget_bytes = share_of_plain_peak(graph, costs, 5)
    options = Options(seconds=3.0)
    found = hierarchical.solve(graph, costs, budget_bytes, options).schedule
    without = hierarchical.solve(graph, costs, budget_bytes, dataclasses.replace(options, implementations=())).schedule
    steps = found.forward + found.backward
    names = {graph.operators[s.operator].implementations[s.implementation].name for s in steps}
    assert names == {"default", "fused", "intermediate"}
    plain_seconds = seconds_of(graph, costs, plain_schedule(graph))
    assert seconds_of(graph, costs, found) - plain_seconds < 0.6 * (seconds_of(graph, costs, without) - plain_seconds)


@quick
@given(joint_graphs(max_forward=8, max_backward=8), st.integers(5, 10))
def test_without_recomputation_the_whole_program_is_solved(problem, tenths):
    graph, costs = problem
    budget_bytes = share_of_plain_peak(graph, costs, tenths)
    exact = ilp.solve(graph, costs, budget_bytes, dataclasses.replace(EXACT, recompute=False))
    found = hierarchical.solve(graph, costs, budget_bytes, Options(seconds=2.0, gap=0.0, recompute=False))
    assert seconds_of(graph, costs, found.schedule) == pytest.approx(seconds_of(graph, costs, exact.schedule))


@quick
@given(joint_graphs(max_forward=6, max_backward=5))
def test_more_budget_never_costs_more_and_the_full_budget_nothing(problem):
    record = graph_record(*problem)
    base = planner.baseline(record)
    budgets = [max(base.frugal.peak_bytes, base.plain.peak_bytes * tenths // 10) for tenths in (10, 4, 8, 6)]
    points = frontier(record, budgets, options=Options(seconds=2.0, gap=0.0), known=base).points
    overheads, bounds = [p.overhead for p in points], [p.bound for p in points]
    assert overheads == sorted(overheads)
    assert bounds == sorted(bounds)
    assert all(p.bound <= p.overhead + 1e-9 and p.planned_peak_bytes <= p.budget_bytes for p in points)
    assert points[0].overhead <= 0.0


@quick
@given(joint_graphs(max_forward=6, max_backward=5), st.integers(3, 10))
def test_adding_implementations_never_costs_more(problem, tenths):
    graph, costs = problem
    budget_bytes = share_of_plain_peak(graph, costs, tenths)
    few, all_of_them = (
        hierarchical.solve(graph, costs, budget_bytes, Options(seconds=2.0, gap=0.0, implementations=names)).schedule
        for names in ((), None)
    )
    assert seconds_of(graph, costs, all_of_them) <= seconds_of(graph, costs, few) * (1 + 1e-9)


@quick
@given(joint_graphs(max_forward=6, max_backward=5), st.integers(3, 10))
def test_scip_and_highs_agree(problem, tenths):
    graph, costs = problem
    budget_bytes = share_of_plain_peak(graph, costs, tenths)
    one, other = (
        ilp.solve(graph, costs, budget_bytes, dataclasses.replace(EXACT, mip_solver=name)) for name in ("scip", "highs")
    )
    assert one.status == other.status
    if one.schedule is not None:
        seconds = [seconds_of(graph, costs, found.schedule) for found in (one, other)]
        assert seconds[0] == pytest.approx(seconds[1]), (one, other)


def test_the_same_inputs_give_the_same_plan_when_the_work_ends_the_search():
    graph, costs = conv_norm_relu(90, (16, 8, 24, 12, 20, 7, 13))
    budget_bytes = share_of_plain_peak(graph, costs, 2)
    options = Options(seconds=1.0, gap=0.0)
    backwards = itertools.count(0.0, -1e6)  # so that the clock ends no search, however slow the machine is
    with timing.override(clock=lambda: next(backwards), patience=1e6):
        first, second, other = (
            hierarchical.solve(graph, costs, budget_bytes, dataclasses.replace(options, seed=seed))
            for seed in (0, 0, 1)
        )
    assert first.status == "feasible"
    assert first.schedule != other.schedule  # so that it is not the only one that there is to find
    assert (first.schedule, first.bound_seconds) == (second.schedule, second.bound_seconds)


def test_on_progress_gets_the_best_and_the_bound_and_is_not_compared():
    graph, costs = chain(10)
    reports: list[tuple[float, float, float]] = []
    options = Options(seconds=3.0, gap=0.0, on_progress=lambda *now: reports.append(now))
    solution = hierarchical.solve(graph, costs, 7, options)
    assert options == Options(seconds=3.0, gap=0.0)
    assert reports[-1][1:] == (simulate(graph, costs, solution.schedule).seconds, solution.bound_seconds)
    assert [t for t, _, _ in reports] == sorted(t for t, _, _ in reports)


@quick
@given(st.data())
def test_a_plan_is_the_same_after_json(data):
    graph, _ = data.draw(joint_graphs())
    parts = tuple(GraphPlan.of(graph, data.draw(schedules(graph))) for _ in range(2))
    numbers = st.floats(0, 10)
    plan = Plan(parts, 5, 9, 4, data.draw(numbers), data.draw(numbers), "feasible", "ilp", "cpu", "2", {"weights": 1})
    assert codec.loads(Plan, codec.dumps(plan)) == plan


def test_a_rerun_may_use_another_implementation_in_the_relaxed_program():
    graph, costs = conv_norm_relu(3)
    schedule = hierarchical.solve(graph, costs, share_of_plain_peak(graph, costs, 6), Options(seconds=2.0)).schedule
    places = Places(tuple(op.id for op in graph.operators if not op.optional))
    program = relax(graph, costs, simulate(graph, costs, schedule).peak_bytes, places, Options())
    start = start_from(graph, program, schedule)
    for variable in program.problem.variables():
        variable.value = start[variable.name()]
    assert all(c.violation().max() <= 1e-9 for c in program.problem.constraints)
    relaxed_seconds = program.fixed_seconds + program.problem.objective.value * program.unit_seconds
    assert relaxed_seconds <= simulate(graph, costs, schedule).seconds + 1e-9
