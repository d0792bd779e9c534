from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import bound, cut, ilp
from monetrun.solve.incumbent import Incumbent
from monetrun.solve.mip.minimize import minimize
from monetrun.solve.places import Places, first_places
from monetrun.solve.relaxation import relax
from monetrun.solve.relaxed_schedule import _Writer, start_from
from support.examples import examples
from support.exhaustive import cheapest_seconds
from support.random_graphs import joint_graphs
from support.small_graphs import chain, make


def everywhere(graph, ordered):
    runs = frozenset(range(graph.forward_count))
    points = tuple(op.id for op in graph.operators if not op.optional)
    return Places(points, runs, runs if ordered else frozenset())


def bounded(graph, costs, budget_bytes, **options):
    """A search after its bound was raised, from the place of the plain schedule's peak."""
    search = Incumbent(graph, costs, budget_bytes, Options(seconds=60.0, gap=0.0, **options))
    bound.raise_bound(search, first_places(graph, costs, plain_schedule(graph)), 60.0)
    return search


quick = settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(
    joint_graphs(max_forward=5, max_backward=4), st.integers(1, 10), st.sampled_from(["scip", "highs"]), st.booleans()
)
def test_bound_is_never_above_the_cheapest_of_all_schedules(problem, tenths, solver, ordered):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    cheapest = cheapest_seconds(graph, costs, budget_bytes, any_order=True, max_states=60_000)
    assume(cheapest is not None)
    assert bounded(graph, costs, budget_bytes, mip_solver=solver).bound_seconds <= cheapest + 1e-9
    # with memory checked in every possible place, not only where a schedule was over
    places = everywhere(graph, ordered)
    program = relax(graph, costs, budget_bytes, places, Options())
    result = minimize(program.problem, solver)
    infeasible = program.infeasible or result.status == "infeasible"
    seconds = math.inf if infeasible else program.bound_seconds(result)
    assert seconds <= cheapest + 1e-9


def test_bound_of_a_chain_is_its_optimum():
    graph, costs = chain(6)
    assert bounded(graph, costs, 7).bound_seconds == pytest.approx(12)
    assert bounded(graph, costs, 6).bound_seconds == pytest.approx(13, rel=1e-5)
    assert bounded(graph, costs, 5).bound_seconds == pytest.approx(14, rel=1e-5)


def test_a_budget_below_any_schedule_is_proven_infeasible():
    graph, costs = chain(6)
    assert bounded(graph, costs, 2).bound_seconds == math.inf


def test_a_relaxed_schedule_within_the_budget_everywhere_is_a_cheapest_one():
    graph, costs = chain(6)
    found = bounded(graph, costs, 6)
    assert simulate(graph, costs, found.best).peak_bytes <= 6
    assert simulate(graph, costs, found.best).seconds == pytest.approx(found.bound_seconds, rel=1e-5)


@quick
@given(joint_graphs(max_forward=6, max_backward=6), st.integers(3, 10), st.booleans())
def test_a_schedule_within_the_budget_satisfies_the_relaxed_program(problem, tenths, ordered):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    schedule = ilp.solve(graph, costs, budget_bytes, Options(gap=0.0, mip_solver="highs")).schedule
    assume(schedule is not None)
    places = everywhere(graph, ordered)
    program = relax(graph, costs, budget_bytes, places, Options())
    start = start_from(graph, program, schedule)
    for variable in program.problem.variables():
        variable.value = start[variable.name()]
    assert not program.infeasible
    assert all(c.violation().max() <= 1e-9 for c in program.problem.constraints)


def test_a_rerun_needed_before_and_after_another_is_paid_twice():
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
    found = bounded(graph, costs, 9)
    assert found.bound_seconds == pytest.approx(cheapest, rel=1e-5)
    assert simulate(graph, costs, found.best).seconds == cheapest
    program = relax(graph, costs, 9, everywhere(graph, ordered=True), Options())
    schedule = Schedule(plain_schedule(graph).forward, tuple(Step(i) for i in (5, 0, 1, 2, 3, 0, 4, 6)))
    assert simulate(graph, costs, schedule).peak_bytes == 9
    start = start_from(graph, program, schedule)
    for variable in program.problem.variables():
        variable.value = start[variable.name()]
    assert all(c.violation().max() <= 1e-9 for c in program.problem.constraints)
    assert start["D"].sum() == 1


def test_memory_is_checked_first_where_the_schedule_has_its_peak():
    graph, costs = chain(6)
    plain = plain_schedule(graph)
    for schedule in (plain, cut.dropping(graph, plain, {0, 1, 2, 3, 4})):
        (point,) = first_places(graph, costs, schedule).points
        timeline = simulate(graph, costs, schedule)
        steps = schedule.forward + schedule.backward
        at = steps.index(Step(point))
        # the place of a rerun is that of the compulsory operator that follows it
        before = at
        while before > len(schedule.forward) and steps[before - 1].operator < graph.forward_count:
            before -= 1
        assert max(timeline.during_bytes[before : at + 1]) == timeline.peak_bytes


def test_a_chain_of_thousands_of_operators_is_run_again():
    graph, _ = chain(3000)
    writer = object.__new__(_Writer)
    writer.graph, writer.forward, writer.backward, writer.once_more = graph, [], [], set()
    writer.present = {tensor.id for tensor in graph.tensors if tensor.external}
    writer.columns, writer._choice = SimpleNamespace(picks_again={}), lambda operator, picks: 0
    (last,) = graph.operators[graph.forward_count - 1].outputs
    assert writer._room_of(last, set()) == (False, -1)
    assert writer._provide(last, 0)
    assert [step.operator for step in writer.backward] == list(range(3000))
