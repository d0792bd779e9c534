"""Schedules that are known of a network before it is planned: found by structure, judged, and only a beginning."""

import types

import pytest

from monetrun.core.graph import Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, StepSchedules, plain_schedule
from monetrun.core.step import replay
from monetrun.machine.store import Store
from monetrun.planning import planner
from monetrun.planning.known import KnownSchedules, known_key, known_schedules
from monetrun.runtime.settings import Settings
from support.step_records import chain_record

RECORD = chain_record(64)
(GRAPH,) = RECORD.graphs
BASE = planner.baseline(RECORD)


def planned(share: float) -> tuple[Schedule, ...]:
    low, high = BASE.frugal.peak_bytes, BASE.plain.peak_bytes
    plan = planner.plan_step(RECORD, low + int(share * (high - low)), options=Options(seconds=1.0), known=BASE)
    return tuple(g.schedule for g in plan.graphs)


def keep(store: Store, *schedules: tuple[Schedule, ...], graph: Graph = GRAPH) -> None:
    steps = tuple(StepSchedules.of([graph], one) for one in schedules)
    store.put("plan", known_key([graph.structural_fingerprint]), KnownSchedules(steps))


def recomputations(schedules: tuple[Schedule, ...]) -> int:
    return sum(step.operator < GRAPH.forward_count for step in schedules[0].backward)


def test_a_network_finds_its_schedules_at_every_batch_size(tmp_path):
    store, tight = Store(tmp_path), planned(0.0)
    keep(store, tight, planned(0.5))
    assert tight in known_schedules(store, [GRAPH], Options())
    larger = chain_record(96)
    assert larger.graphs[0].fingerprint != GRAPH.fingerprint
    found = known_schedules(store, larger.graphs, Options())
    assert len(found) == 2
    assert min(recomputations(one) for one in found) < max(recomputations(one) for one in found)
    plain = replay(larger, [plain_schedule(g) for g in larger.graphs]).peak_bytes
    assert all(replay(larger, one).peak_bytes < plain for one in found)


def test_another_network_finds_none(tmp_path):
    store = Store(tmp_path)
    keep(store, planned(0.5))
    assert known_schedules(store, chain_record(64, (40, 30, 50)).graphs, Options()) == []
    assert known_schedules(store, [GRAPH, GRAPH], Options()) == []
    assert known_schedules(None, [GRAPH], Options()) == []


def test_what_a_hand_has_changed_is_a_miss(tmp_path, caplog):
    (tight,) = planned(0.0)
    without_an_operator = Schedule(tight.forward[1:], tight.backward)
    out_of_order = Schedule(tight.forward, tight.backward[::-1])
    beyond = Schedule(tight.forward, (*tight.backward, Step(len(GRAPH.operators) + 5)))
    for k, wrong in enumerate((without_an_operator, out_of_order, beyond)):
        store = Store(tmp_path / str(k))
        keep(store, (tight,), (wrong,))
        caplog.clear()
        assert known_schedules(store, [GRAPH], Options()) == []
        (warning,) = [r.getMessage() for r in caplog.records]
        assert "is not used" in warning


def test_a_changed_byte_is_a_miss(tmp_path, caplog):
    store = Store(tmp_path)
    keep(store, planned(0.0))
    (entry,) = store.entries()
    content = entry.path.read_bytes()
    at = content.index(b'"operator":1')
    entry.path.write_bytes(content[: at + 11] + b"2" + content[at + 12 :])
    assert known_schedules(store, [GRAPH], Options()) == []
    assert "the checksum does not match" in caplog.text


def test_schedules_of_other_graphs_under_the_same_key_are_a_miss(tmp_path, caplog):
    other = chain_record(64, (40, 30, 50)).graphs[0]
    store = Store(tmp_path)
    steps = (StepSchedules.of([other], [plain_schedule(other)]),)
    store.put("plan", known_key([GRAPH.structural_fingerprint]), KnownSchedules(steps))
    assert known_schedules(store, [GRAPH], Options()) == []
    assert "its graphs are not those of the recorded step" in caplog.text


def test_implementations_that_the_options_forbid_are_left_out(tmp_path):
    store, tight = Store(tmp_path), planned(0.0)
    keep(store, tight)
    assert any(step.implementation for step in tight[0].forward)
    (found,) = known_schedules(store, [GRAPH], Options(implementations=()))
    assert not any(step.implementation for step in (*found[0].forward, *found[0].backward))


def test_known_schedules_make_a_budget_feasible_that_the_search_does_not_reach(monkeypatch):
    tight = planned(0.0)
    poor = planner.baseline(RECORD, [plain_schedule(GRAPH)])
    monkeypatch.setattr(planner, "more_frugal", lambda record, base, options: base)
    with pytest.raises(planner.BudgetBelowSmallest):
        planner.plan_step(RECORD, BASE.frugal.peak_bytes, "greedy", Options(seconds=0.1), poor)
    plan = planner.plan_step(RECORD, BASE.frugal.peak_bytes, "greedy", Options(seconds=0.1), poor, [tight])
    assert plan.planned_peak_bytes <= BASE.frugal.peak_bytes


def test_rank_0_begins_with_them_too_where_it_plans_at_its_first_step(tmp_path, monkeypatch):
    engine = pytest.importorskip("monetrun.runtime.engine")
    store, tight, begun = Store(tmp_path), planned(0.0), []
    keep(store, tight)
    monkeypatch.setattr(planner, "plan_step", lambda *arguments: begun.append(arguments[-1]))
    within = types.SimpleNamespace(settings=Settings(solver_seconds=0.1), store=store)
    engine._planned(within, RECORD, ["0.9x", "0.8x"])
    assert begun == [[tight]]


def test_what_is_cheaper_than_known_schedules_takes_their_place():
    wasteful, budget_bytes = planned(0.0), BASE.plain.peak_bytes
    plan = planner.plan_step(RECORD, budget_bytes, "hierarchical", Options(seconds=1.0), BASE, [wasteful])
    assert replay(RECORD, [plan.graphs[0].schedule]).seconds < replay(RECORD, wasteful).seconds
