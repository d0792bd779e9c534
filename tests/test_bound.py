from __future__ import annotations

import os

from exhaustive import cheapest_seconds
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_graphs import joint_graphs

from monetrun.plan import Options, plain_schedule
from monetrun.simulate import simulate
from monetrun.solve import bound

quick = settings(
    max_examples=int(os.environ.get("NEX", "60")), deadline=None, suppress_health_check=list(HealthCheck)
)


@quick
@given(joint_graphs(max_forward=5, max_backward=4), st.integers(1, 10), st.sampled_from(["scip", "highs"]))
def test_bound_is_never_above_the_cheapest_of_all_schedules(problem, tenths, solver):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    cheapest = cheapest_seconds(graph, costs, budget_bytes, any_order=True)
    assume(cheapest is not None)
    options = Options(seconds=60.0, mip_solver=solver)
    assert bound.lower_bound(graph, costs, budget_bytes, options) <= cheapest + 1e-9
