"""What `monetrun explain` says adds up to the plan, and a plan without its trial run is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monetrun.core.errors import PlanMismatch, ScheduleError
from monetrun.core.graph import FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import replay
from monetrun.planning import explain as explaining
from monetrun.planning import planner
from monetrun.planning.explain import (
    GRADIENTS,
    PARAMETERS,
    SCRIPT,
    STATE,
    alive_before,
    explain,
    find_record,
    module_of,
)
from support.random_graphs import joint_graphs, schedules
from support.step_records import chain_record

RECORD = chain_record(64)


def plan_at(share):
    base = planner.baseline(RECORD)
    budget = int(base.frugal.peak_bytes + share * (base.plain.peak_bytes - base.frugal.peak_bytes))
    return planner.plan_step(RECORD, budget, "greedy", Options(seconds=1.0), base)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_parts_of_the_peak_add_up_to_it_and_the_modules_to_the_overhead(share):
    plan = plan_at(share)
    found = explain(plan, RECORD)
    assert sum(found.at_peak.values()) == found.planned_peak_bytes == plan.planned_peak_bytes
    assert found.at_peak[PARAMETERS] == found.at_peak[STATE] == 3000
    of_graph = {k: v for k, v in found.at_peak.items() if k not in (PARAMETERS, STATE, SCRIPT, GRADIENTS, "workspace")}
    assert sum(row.nbytes for row in found.alive) == sum(of_graph.values())
    assert sum(row.seconds for row in found.modules) == pytest.approx(plan.overhead * found.plain_seconds)
    assert max(found.planned_profile) == plan.planned_peak_bytes
    assert max(found.plain_profile) == plan.plain_peak_bytes


def test_a_module_that_runs_again_pays_and_what_is_no_longer_held_is_saved():
    plan = plan_at(0.3)
    (schedule,) = (g.schedule for g in plan.graphs)
    graph = RECORD.graphs[0]
    again = [graph.operators[s.operator] for s in schedule.backward if graph.operators[s.operator].phase == FORWARD]
    assert again
    found = explain(plan, RECORD)
    assert sum(row.again for row in found.modules) == len(again)
    assert {row.module for row in found.modules if row.again} == {module_of(op.name) for op in again}
    held = [
        sum(graph.tensors[t].nbytes for t in alive_before(graph, s, len(s.forward)))
        for s in (plain_schedule(graph), schedule)
    ]
    assert sum(row.saved_bytes for row in found.modules) == held[0] - held[1] > 0
    assert [row.seconds for row in found.modules] == sorted((row.seconds for row in found.modules), reverse=True)


def test_in_place_runs_are_counted_by_kind():
    plan = plan_at(1.0)
    found = explain(plan, RECORD)
    in_place = sum(s.implementation == 1 for g in plan.graphs for s in (*g.schedule.forward, *g.schedule.backward))
    assert [(u.implementation, u.target, u.count) for u in found.implementations] == [
        ("in-place", "aten.relu", in_place)
    ]


def test_runs_are_of_all_calls_and_what_is_saved_of_those_that_wait_for_their_backward_at_once():
    plan, (forward, loss, backward, *_) = plan_at(0.3), RECORD.events
    once = explain(plan, RECORD)
    accumulating = (forward, loss, backward, forward, loss, backward)
    both = (forward, forward, loss, backward, loss, backward)
    for events, waiting in ((accumulating, 1), (both, 2)):
        record = replace(RECORD, events=events)
        peak = replay(record, [g.schedule for g in plan.graphs]).peak_bytes
        twice = explain(replace(plan, planned_peak_bytes=peak, budget_bytes=10**9), record)
        assert [u.count for u in twice.implementations] == [2 * u.count for u in once.implementations] != []
        rows = {row.module: (2 * row.again, 2 * row.seconds, waiting * row.saved_bytes) for row in once.modules}
        assert {row.module: (row.again, row.seconds, row.saved_bytes) for row in twice.modules} == rows
    assert any(saved for _, _, saved in rows.values())


@given(st.data())
def test_the_tensors_alive_before_each_step_have_the_bytes_that_simulate_counts(data):
    graph, costs = data.draw(joint_graphs())
    schedule = data.draw(schedules(graph))
    try:
        before = simulate(graph, costs, schedule).before_bytes
    except ScheduleError:
        return
    for i, nbytes in enumerate(before):
        assert sum(graph.tensors[t].nbytes for t in alive_before(graph, schedule, i)) == nbytes


def test_the_record_of_a_plan_is_found_among_others_and_its_absence_is_an_error():
    plan = plan_at(0.5)
    others = [chain_record(32), chain_record(64, widths=(40, 30))]
    assert find_record(plan, [*others, RECORD], "p.json") is RECORD
    with pytest.raises(PlanMismatch, match=r"p.json") as refused:
        find_record(plan, others, "p.json")
    assert "monetrun plan --out p.json" in refused.value.hint
    with pytest.raises(PlanMismatch):
        explain(plan, others[0])


def test_calls_that_are_alike_are_replayed_once_for_the_profile(monkeypatch):
    one = chain_record(100)
    many = replace(one, events=one.events * 8)
    schedules, replays, simulate = [plain_schedule(g) for g in one.graphs], [], explaining.simulate
    monkeypatch.setattr(explaining, "simulate", lambda *given: replays.append(given) or simulate(*given))
    assert max(explaining._profile(many, schedules)) == replay(many, schedules).peak_bytes
    assert len(replays) == 2  # a forward and a backward
