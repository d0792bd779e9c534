from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings

from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve.least import least_budget
from support.examples import examples
from support.exhaustive import cheapest_seconds
from support.random_graphs import joint_graphs
from support.small_graphs import chain, make

quick = settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(joint_graphs(max_forward=5, max_backward=4))
def test_the_least_feasible_budget_lies_between_the_bound_and_the_peak(problem):
    graph, costs = problem
    found = least_budget(graph, costs, Options(seconds=1.0, gap=0.0))
    assert simulate(graph, costs, found.schedule).peak_bytes == found.peak_bytes
    assert found.peak_bytes <= simulate(graph, costs, plain_schedule(graph)).peak_bytes
    feasible = cheapest_seconds(graph, costs, found.peak_bytes, any_order=True, max_states=60_000)
    assume(found.bound_bytes > 0)
    below = cheapest_seconds(graph, costs, found.bound_bytes - 1, any_order=True, max_states=60_000)
    assume(feasible is not None and below is not None)
    assert feasible < float("inf")
    assert below == float("inf")


def test_the_least_budget_of_a_chain_is_three_tensors_and_proven():
    graph, costs = chain(6)
    found = least_budget(graph, costs, Options(seconds=2.0, gap=0.0))
    assert (found.peak_bytes, found.bound_bytes) == (3, 3)


def test_other_implementations_lower_the_least_budget():
    # op5 reads 64 bytes, which op4 with its workspace has no room for, or the 2-byte mask that op2 makes of them
    graph, costs = make(
        "64 64 2 64 1 1", "f: > 0 r", "f: 0 > 1 r", "f: 1 > 2 o", "f: 1 > 3 r", "b: 3 > 4 w40", "b: 1 > 5 a2"
    )
    all_of_them = least_budget(graph, costs, Options(seconds=2.0))
    few = least_budget(graph, costs, Options(seconds=2.0, implementations=()))
    assert (all_of_them.peak_bytes, all_of_them.bound_bytes) == (130, 130)
    assert few.bound_bytes == few.peak_bytes > 130
