from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import bound, greedy, hierarchical, ilp, incumbent, windows
from monetrun.solve.ilp_program import build
from monetrun.solve.ilp_schedule import start_from
from support.examples import examples
from support.exhaustive import cheapest_seconds
from support.random_graphs import joint_graphs
from support.small_graphs import chain

quick = settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(joint_graphs(max_forward=5, max_backward=4), st.integers(2, 10), st.sampled_from(["scip", "highs"]))
def test_peak_is_within_the_budget_and_the_bound_below_the_cheapest(problem, tenths, solver):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    solution = hierarchical.solve(graph, costs, budget_bytes, Options(seconds=0.5, gap=0.0, mip_solver=solver))
    best = cheapest_seconds(graph, costs, budget_bytes, any_order=True, max_states=60_000)
    assume(best is not None)
    assert solution.bound_seconds <= best + 1e-9
    if solution.schedule is None:
        assert solution.status == "unknown" or best == float("inf")
        return
    timeline = simulate(graph, costs, solution.schedule)
    assert timeline.peak_bytes <= budget_bytes
    assert timeline.seconds >= best - 1e-9


@pytest.mark.parametrize("budget_bytes", [7, 6, 5, 4])
def test_hierarchical_equals_the_ilp_on_chains(budget_bytes):
    graph, costs = chain(6)
    exact = ilp.solve(graph, costs, budget_bytes, Options(seconds=30.0, gap=0.0)).schedule
    solution = hierarchical.solve(graph, costs, budget_bytes, Options(seconds=5.0, gap=0.0))
    found = simulate(graph, costs, solution.schedule)
    assert found.seconds == simulate(graph, costs, exact).seconds
    assert found.peak_bytes <= budget_bytes


def test_full_budget_costs_nothing_and_is_optimal():
    graph, costs = chain(20)
    solution = hierarchical.solve(graph, costs, 21, Options())
    assert (solution.schedule, solution.status) == (plain_schedule(graph), "optimal")
    assert solution.bound_seconds == 40.0


def test_an_impossible_budget_is_proven_infeasible():
    graph, costs = chain(6)
    solution = hierarchical.solve(graph, costs, 2, Options())
    assert (solution.schedule, solution.status) == (None, "infeasible")


def test_an_interrupt_returns_the_best_schedule_so_far(monkeypatch):
    graph, costs = chain(8)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bound, "relax", interrupted)
    solution = hierarchical.solve(graph, costs, 7, Options(seconds=5.0))
    assert simulate(graph, costs, solution.schedule).peak_bytes <= 7
    assert solution.status == "feasible"


def test_the_same_inputs_give_the_same_plan_when_the_gap_ends_the_search():
    graph, costs = chain(10)
    options = Options(seconds=60.0, gap=0.02)
    first, second = (hierarchical.solve(graph, costs, 8, options) for _ in range(2))
    assert first.status == "optimal"
    assert first.schedule == second.schedule


def test_progress_reports_only_better_schedules_and_bounds():
    graph, costs = chain(10)
    reports: list[tuple[float, float]] = []
    options = Options(seconds=3.0, gap=0.0, on_progress=lambda _, seconds, bound: reports.append((seconds, bound)))
    hierarchical.solve(graph, costs, 7, options)
    assert reports
    assert reports == sorted(reports, key=lambda pair: (-pair[0], pair[1]))


def test_a_window_can_express_its_schedule_even_out_of_the_graphs_order():
    graph, costs = chain(5)
    plain = plain_schedule(graph)
    again = (Step(0), Step(1), Step(2), Step(0), Step(1))
    schedule = Schedule(plain.forward, plain.backward[:2] + again + plain.backward[2:])
    slots = windows.window_slots(graph, schedule, {0, 1, 2}, Options())
    program = build(graph, costs, 10, slots)
    assert start_from(graph, program, schedule) is not None


def test_native_searches_of_one_solve_each_have_their_own_seed():
    graph, costs = chain(4)
    search = incumbent.Incumbent(graph, costs, 5, Options(seed=3))
    assert [search.native(1.0)[0].seed for _ in range(3)] == [3, 4, 5]


def test_an_unsuccessful_kind_of_search_keeps_a_small_share_of_the_work():
    fruitful, fruitless = windows._Effort(), windows._Effort()
    for _ in range(400):
        if fruitful.comes_before(fruitless):
            fruitful.book(1.0, True)
        else:
            fruitless.book(1.0, False)
    assert fruitful.work_seconds / fruitless.work_seconds == pytest.approx(1 / windows._LEAST_SUCCESS, rel=0.1)


def test_a_budget_that_one_seed_does_not_reach_is_tried_with_another(monkeypatch):
    graph, costs = chain(8)
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes - 2
    search = incumbent.Incumbent(graph, costs, budget_bytes, Options(seconds=4.0))
    frugal, seeds = greedy.most_frugal, []

    def unlucky_at_first(graph, costs, options, enough_bytes, allowance):
        seeds.append(options.seed)
        return plain_schedule(graph) if len(seeds) < 3 else frugal(graph, costs, options, enough_bytes, allowance)

    monkeypatch.setattr(greedy, "most_frugal", unlucky_at_first)
    hierarchical._search_frugally(search, 1.0)
    assert seeds == [0, 1, 2]
    assert search.best is not None
