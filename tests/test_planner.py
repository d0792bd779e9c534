"""A plan keeps to what the options allow."""

import dataclasses

import pytest
from step_records import chain_record

from monetrun import planner
from monetrun.errors import NoPlanInTime, UsageError
from monetrun.graph import Implementation
from monetrun.plan import Options, parse_kinds


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


def test_exact_among_the_kinds_leaves_those_with_the_defaults_bits():
    ways = [
        Implementation("output:x", (0,), exact=False),
        Implementation("output", (0,)),
        Implementation("conv:a", (0,)),
    ]

    def left(text):
        return [way.allowed_by(parse_kinds(text)) for way in ways]

    assert left("all") == [True, True, True]
    assert left("exact") == [False, True, True]
    assert left("output") == [True, True, False]
    assert left("output,exact") == [False, True, False]
    assert left("none") == [False, False, False]
    assert not dataclasses.replace(ways[1], usable=False).allowed_by(None)
    with pytest.raises(UsageError, match=r"odd is not one of .*exact"):
        parse_kinds("exact,odd")
