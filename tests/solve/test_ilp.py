from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.options import Options
from monetrun.core.plan import Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import cut, ilp
from monetrun.solve.ilp_program import build
from monetrun.solve.ilp_schedule import read_schedule, start_from
from monetrun.solve.slot import all_slots, without_useless
from support.examples import examples
from support.exhaustive import cheapest_seconds
from support.random_graphs import joint_graphs
from support.small_graphs import chain

quick = settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(joint_graphs(max_forward=5, max_backward=4), st.integers(2, 10), st.sampled_from(["scip", "highs"]))
def test_ilp_equals_exhaustive_search_of_its_class(problem, tenths, solver):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    expected = cheapest_seconds(graph, costs, budget_bytes, any_order=False)
    assume(expected is not None)
    solution = ilp.solve(graph, costs, budget_bytes, Options(seconds=60.0, gap=0.0, mip_solver=solver))
    if expected == float("inf"):
        assert (solution.schedule, solution.status) == (None, "infeasible")
        return
    timeline = simulate(graph, costs, solution.schedule)
    assert timeline.peak_bytes <= budget_bytes
    assert timeline.seconds == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert solution.status == "optimal"


@quick
@given(joint_graphs(max_forward=4, max_backward=4), st.integers(4, 10), st.booleans(), st.booleans())
def test_ablations_equal_exhaustive_search_without_what_they_leave_out(problem, tenths, recompute, all_implementations):
    graph, costs = problem
    names = None if all_implementations else ()
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    expected = cheapest_seconds(graph, costs, budget_bytes, any_order=False, implementations=names, recompute=recompute)
    assume(expected is not None)
    options = Options(seconds=60.0, gap=0.0, recompute=recompute, implementations=names, mip_solver="highs")
    solution = ilp.solve(graph, costs, budget_bytes, options)
    if solution.schedule is None:
        assert expected == float("inf")
    else:
        assert simulate(graph, costs, solution.schedule).seconds == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("budget_bytes", "again"), [(7, 0), (6, 1), (5, 2), (4, 3)])
def test_a_chain_is_recomputed_no_more_than_its_budget_requires(budget_bytes, again):
    graph, costs = chain(6)
    assert simulate(graph, costs, plain_schedule(graph)).peak_bytes == 7
    solution = ilp.solve(graph, costs, budget_bytes, Options(seconds=60.0, gap=0.0))
    assert len(solution.schedule.backward) == 6 + again
    assert solution.bound_seconds == pytest.approx(12 + again)


def test_progress_is_reported_in_seconds_of_the_schedule():
    graph, costs = chain(8)
    reports = []
    options = Options(seconds=60.0, gap=0.0, mip_solver="highs", on_progress=lambda *now: reports.append(now))
    solution = ilp.solve(graph, costs, 5, options)
    assert reports[-1][1] == pytest.approx(simulate(graph, costs, solution.schedule).seconds)
    assert all(bound <= seconds + 1e-9 for _, seconds, bound in reports)


def test_a_start_is_returned_when_no_time_is_left():
    graph, costs = chain(30)
    start = cut.dropping(graph, plain_schedule(graph), range(0, 29, 2))
    budget_bytes = simulate(graph, costs, start).peak_bytes
    solution = ilp.solve(graph, costs, budget_bytes, Options(seconds=1e-6), [start])
    assert simulate(graph, costs, solution.schedule).seconds <= simulate(graph, costs, start).seconds
    assert solution.status in ("feasible", "optimal")
    assert 0 < solution.bound_seconds <= simulate(graph, costs, solution.schedule).seconds


def test_useless_slots_are_removed():
    graph, _ = chain(6)
    slots = all_slots(graph, Options())
    left = without_useless(graph, slots)
    # before the backward operator of x[k] only x[0..k] can still be wanted
    assert len(slots) == 12 + 6 * 6
    assert len(left) == 12 + 6 + 5 + 4 + 3 + 2 + 1


def test_a_schedule_survives_the_way_through_the_variables():
    graph, costs = chain(4)
    program = build(graph, costs, 4, all_slots(graph, Options()))
    schedule = ilp.solve(graph, costs, 4, Options(gap=0.0)).schedule
    start = start_from(graph, program, schedule)
    assert read_schedule(program, start) == schedule
    assert program.memory.excess(start).max() == pytest.approx(0.0, abs=1e-9)


def test_an_in_place_implementation_is_used_where_the_budget_needs_it():
    tensors = (Tensor(0, 4), Tensor(1, 4), Tensor(2, 4, kept=True))
    in_place = Implementation("in_place", (0,), in_place_of=0)
    operators = (
        Operator(0, "a", "t", FORWARD, (0,), (Implementation("default", ()),)),
        Operator(1, "b", "t", FORWARD, (1,), (Implementation("default", (0,)), in_place), replayable=False),
        Operator(2, "c", "t", BACKWARD, (2,), (Implementation("default", (1,)),)),
    )
    graph = Graph("in place", tensors, operators)
    costs = Costs("unit", ((1.0,), (1.0, 1.0), (1.0,)), ((0,), (1, 0), (0,)))
    assert ilp.solve(graph, costs, 8, Options()).schedule.forward == (Step(0), Step(1, 1))
    assert ilp.solve(graph, costs, 8, Options(implementations=())).status == "infeasible"
