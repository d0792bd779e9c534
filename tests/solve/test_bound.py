from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import bound, cut, ilp, mip, relaxation
from monetrun.solve.places import Places, first_places
from support.exhaustive import cheapest_seconds
from support.random_graphs import joint_graphs
from support.small_graphs import chain, make


def everywhere(graph, ordered):
    runs = frozenset(range(graph.forward_count))
    points = tuple(op.id for op in graph.operators if not op.optional)
    return Places(points, runs, runs if ordered else frozenset())


quick = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(
    joint_graphs(max_forward=5, max_backward=4), st.integers(1, 10), st.sampled_from(["scip", "highs"]), st.booleans()
)
def test_bound_is_never_above_the_cheapest_of_all_schedules(problem, tenths, solver, ordered):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    cheapest = cheapest_seconds(graph, costs, budget_bytes, any_order=True, max_states=60_000)
    assume(cheapest is not None)
    options = Options(seconds=60.0, mip_solver=solver)
    assert bound.lower_bound(graph, costs, budget_bytes, options) <= cheapest + 1e-9
    # with memory looked at in every place that there is, not only where it was found to be over
    places = everywhere(graph, ordered)
    program = relaxation.relax(graph, costs, budget_bytes, places, options)
    result = mip.minimize(program.problem, solver)
    infeasible = program.infeasible or result.status == "infeasible"
    seconds = math.inf if infeasible else relaxation.bound_of(program, result)
    assert seconds <= cheapest + 1e-9


def test_bound_of_a_chain_is_its_optimum():
    graph, costs = chain(6)
    assert bound.lower_bound(graph, costs, 7, Options()) == pytest.approx(12)
    assert bound.lower_bound(graph, costs, 6, Options()) == pytest.approx(13, rel=1e-5)
    assert bound.lower_bound(graph, costs, 5, Options()) == pytest.approx(14, rel=1e-5)


def test_a_budget_below_any_schedule_is_proven_infeasible():
    graph, costs = chain(6)
    assert bound.lower_bound(graph, costs, 2, Options()) == math.inf


def test_a_relaxed_schedule_within_the_budget_everywhere_is_a_cheapest_one():
    graph, costs = chain(6)
    found = bound.improve(graph, costs, 6, Options())
    assert simulate(graph, costs, found.schedule).peak_bytes <= 6
    assert simulate(graph, costs, found.schedule).seconds == pytest.approx(found.seconds, rel=1e-5)


@quick
@given(joint_graphs(max_forward=6, max_backward=6), st.integers(3, 10), st.booleans())
def test_a_schedule_within_the_budget_satisfies_the_relaxed_program(problem, tenths, ordered):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    schedule = ilp.solve(graph, costs, budget_bytes, Options(gap=0.0, mip_solver="highs")).schedule
    assume(schedule is not None)
    places = everywhere(graph, ordered)
    program = relaxation.relax(graph, costs, budget_bytes, places, Options())
    start = relaxation.start_from(graph, program, schedule)
    for variable in program.problem.variables():
        variable.value = start[variable.name()]
    assert not program.infeasible
    assert all(c.violation().max() <= 1e-9 for c in program.problem.constraints)


def test_a_run_that_is_needed_before_and_after_another_is_paid_twice():
    """Beside the gradient, tensor 6, there is no room for tensor 1 while operator 2 runs, but both sides read it.

    The forward pass has that room; at operator 5 nothing can be kept.
    """
    graph, costs = make(
        "1x 3 1 3 1 1 3 1k",
        *("f: 0 > 1", "f: 1 > 2", "f: 2 > 3", "f: 3 > 4", "f: 1 4 > 5"),
        *("b: 0 > 6 w6", "b: 6 5 > 7"),
    )
    cheapest = cheapest_seconds(graph, costs, 9, any_order=True, max_states=60_000)
    assert cheapest == sum(range(1, 8)) + sum((1, 2, 3, 4, 1, 5))
    found = bound.improve(graph, costs, 9, Options())
    assert found.seconds == pytest.approx(cheapest, rel=1e-5)
    assert simulate(graph, costs, found.schedule).seconds == cheapest
    program = relaxation.relax(graph, costs, 9, everywhere(graph, ordered=True), Options())
    schedule = Schedule(plain_schedule(graph).forward, tuple(Step(i) for i in (5, 0, 1, 2, 3, 0, 4, 6)))
    assert simulate(graph, costs, schedule).peak_bytes == 9
    start = relaxation.start_from(graph, program, schedule)
    for variable in program.problem.variables():
        variable.value = start[variable.name()]
    assert all(c.violation().max() <= 1e-9 for c in program.problem.constraints)
    assert start["D"].sum() == 1


def test_memory_is_looked_at_first_where_the_schedule_has_its_peak():
    graph, costs = chain(6)
    plain = plain_schedule(graph)
    for schedule in (plain, cut.dropping(graph, plain, {0, 1, 2, 3, 4})):
        (point,) = first_places(graph, costs, schedule).points
        timeline = simulate(graph, costs, schedule)
        steps = schedule.forward + schedule.backward
        at = steps.index(Step(point))
        # a run again has its place before the compulsory operator that follows it
        before = at
        while before > len(schedule.forward) and steps[before - 1].operator < graph.forward_count:
            before -= 1
        assert max(timeline.during_bytes[before : at + 1]) == timeline.peak_bytes
