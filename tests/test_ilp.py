from __future__ import annotations

import pytest
from exhaustive import cheapest_seconds
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_graphs import joint_graphs

from monetrun.plan import Options, plain_schedule
from monetrun.simulate import simulate
from monetrun.solve import ilp

EXACT = Options(seconds=60.0, gap=0.0)
quick = settings(max_examples=int(__import__("os").environ.get("NEX","60")), deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(joint_graphs(max_forward=5, max_backward=4), st.integers(2, 10), st.sampled_from(["scip", "highs"]))
def test_ilp_equals_exhaustive_search_of_its_class(problem, tenths, solver):
    graph, costs = problem
    plain = simulate(graph, costs, plain_schedule(graph))
    budget_bytes = plain.peak_bytes * tenths // 10
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
