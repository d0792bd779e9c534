"""A plan keeps to what the options allow."""

import pytest
from step_records import chain_record

from monetrun import planner
from monetrun.errors import NoPlanInTime
from monetrun.plan import Options


def budget_of(record, share):
    base = planner.baseline(record)
    return base.frugal.peak_bytes + int(share * (base.plain.peak_bytes - base.frugal.peak_bytes))


@pytest.mark.parametrize("algorithm", ["hierarchical", "greedy"])
def test_without_recomputation_nothing_runs_again_or_there_is_no_plan(algorithm):
    record = chain_record(400)
    with pytest.raises(NoPlanInTime, match="without recomputation"):
        planner.plan_step(record, budget_of(record, 0.2), algorithm, Options(seconds=1.0, recompute=False))


def test_without_implementations_every_step_runs_as_eager_does():
    record = chain_record(400)
    plan = planner.plan_step(record, budget_of(record, 0.5), options=Options(seconds=1.0, implementations=()))
    assert plan.planned_peak_bytes <= plan.budget_bytes
    assert {s.implementation for g in plan.graphs for s in (*g.schedule.forward, *g.schedule.backward)} == {0}
    assert any(s.operator < record.graphs[0].forward_count for s in plan.graphs[0].schedule.backward)
