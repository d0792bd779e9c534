"""Holds: less is reserved for the same steps, also where the pool was reserved before them."""

import time
from dataclasses import replace

import pytest

from monetrun.core import codec
from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.options import Options
from monetrun.core.plan import GraphPlan, Hold, Schedule, plain_schedule
from monetrun.core.replayed_blocks import load_base
from monetrun.core.requests import StepReplay
from monetrun.core.reserved import reserved, spare_beside_holds
from monetrun.core.simulate import simulate
from monetrun.core.step import DeviceMemory, Segment, replay
from monetrun.planning import placement, planner
from monetrun.planning.large_requests import large_requests, otherwise
from monetrun.planning.pool_replay import PoolReplay
from monetrun.solve import greedy, native_search
from support.step_records import chain_record

MIB = 1 << 20
WIDTHS = {
    "narrow": (40, 30, 50, 20, 40, 30),
    "deep": (64, 32, 128, 16, 64, 256, 8),
}


def device_record(widths, settings=None):
    """A chain whose tensors have 80 MB to 2.5 GB, on a device."""
    record = chain_record(10_000_000, widths)
    base = (Segment(False, (record.base_bytes,)),)
    settings = settings or AllocatorSettings(expandable=True)
    return replace(record, memory=DeviceMemory(settings, AllocatorSettings(), 80 << 30, base))


def frugal(record):
    return [greedy.most_frugal(record.graphs[0], record.costs[0], Options(seconds=1.0))]


@pytest.fixture(scope="module", params=WIDTHS)
def record(request):
    return device_record(WIDTHS[request.param])


def test_holds_reserve_less_and_change_nothing_else(record):
    schedules = frugal(record)
    before = reserved(record, schedules)
    found = placement.placed(record, schedules, 30.0)
    after = reserved(record, found)
    waste = [r.peak_bytes - r.allocated_peak_bytes for r in (before, after)]
    assert waste[1] < 0.8 * waste[0]
    assert after.allocated_peak_bytes <= before.allocated_peak_bytes
    assert (replay(record, found).peak_bytes, replay(record, found).seconds) == (
        replay(record, schedules).peak_bytes,
        replay(record, schedules).seconds,
    )
    assert [(s.forward, s.backward) for s in found] == [(s.forward, s.backward) for s in schedules]
    assert 0 < len(found[0].holds) < 20
    assert placement.placed(record, schedules, 30.0) == found


def test_a_pool_that_is_reserved_before_the_first_step_is_enough(record):
    found = placement.placed(record, frugal(record), 30.0)
    assert found[0].holds
    needed = reserved(record, found).large_bytes - spare_beside_holds(record.memory.settings)
    allocator = CachingAllocator(record.memory.settings, record.memory.device_bytes)
    steps = StepReplay(record, found, allocator)
    load_base(record.memory, allocator)
    allocator.free(allocator.allocate(needed - allocator.large_bytes))
    for number in range(5):
        steps.step(first=number == 0)
    assert allocator.large_bytes == needed


def test_variants_of_the_step_need_no_more_than_is_planned(record):
    found = placement.placed(record, frugal(record), 30.0)
    assert found[0].holds
    planned = reserved(record, found).large_bytes
    holds = {(0, i): given for i, given in found[0].holds_by_step().items()}
    events = large_requests(record, frugal(record), 3)
    for seed in range(placement._OTHERS):
        assert PoolReplay(record.memory, [otherwise(events, seed)], 0).replay(holds)[0] <= planned


@pytest.mark.parametrize(("of_variants", "found"), [(3, False), pytest.param(2, True, marks=pytest.mark.nightly)])
def test_holds_with_which_a_variant_needs_more_than_would_be_planned_are_not_taken(record, of_variants, found):
    """Anything that is held has the step reserve 2 in place of 4 times its bytes; a variant of it 3 times, or 2."""
    schedules = frugal(record)
    search = placement._Search(record.memory, large_requests(record, schedules, 3), placement._room(record, schedules))

    class Replay(PoolReplay):
        def replay(self, holds):
            super().replay(holds)
            return (2 if holds else 4) * search.allocated_bytes, 0

        def most_of_variants(self, holds, most):
            return of_variants * search.allocated_bytes

    replay = Replay(record.memory, search.traces, search.large_bytes)
    holds, reserved_bytes = search._best(replay, time.monotonic() + 5.0)
    assert (bool(holds), reserved_bytes) == (found, (2 if found else 4) * search.allocated_bytes)


def test_without_a_compiler_the_same_holds_are_found(record, monkeypatch):
    monkeypatch.setattr(placement, "_STARTS", 3)
    monkeypatch.setattr(placement, "_DRAWS", 150)
    schedules = frugal(record)
    native = placement.placed(record, schedules, 1000.0)
    monkeypatch.setattr(native_search, "available", lambda: False)
    assert placement.placed(record, schedules, 1000.0) == native
    assert native[0].holds


def test_without_gains_schedules_stay_as_they_are(record):
    schedules = frugal(record)
    assert placement.placed(record, schedules, 0.0) == tuple(schedules)
    segments = device_record(WIDTHS["narrow"], AllocatorSettings())
    plain = [plain_schedule(g) for g in segments.graphs]
    assert placement.placed(segments, plain, 30.0) == tuple(plain)


def test_a_plan_has_the_holds_and_a_refusal_counts_with_them():
    record = device_record(WIDTHS["narrow"])
    with pytest.raises(planner.BudgetBelowSmallest) as refused:
        planner.plan_step(record, 100 * MIB, "greedy", Options(seconds=8.0))
    assert refused.value.smallest_bytes < reserved(record, frugal(record)).peak_bytes
    (kept,) = refused.value.smallest_schedules.schedules_for(record.graphs)
    assert kept.holds
    assert reserved(record, [kept]).peak_bytes == refused.value.smallest_bytes
    plan = planner.plan_step(record, int(1.05 * refused.value.smallest_bytes), "greedy", Options(seconds=8.0))
    (graph,) = plan.graphs
    assert graph.schedule.holds
    assert plan.pool.planned_bytes == reserved(record, [graph.schedule]).peak_bytes <= plan.budget_bytes


def test_holds_are_kept_with_the_plan_and_are_of_its_shapes_alone():
    record = device_record(WIDTHS["narrow"])
    graph = record.graphs[0]
    schedule = replace(plain_schedule(graph), holds=(Hold(3, 5 * MIB), Hold(3, 7 * MIB), Hold(9, MIB)))
    plan = codec.loads(GraphPlan, codec.dumps(GraphPlan.of(graph, schedule)))
    assert plan.schedule_for(graph).holds_by_step() == {3: (5 * MIB, 7 * MIB), 9: (MIB,)}
    (other,) = chain_record(10, WIDTHS["narrow"]).graphs
    assert plan.schedule_for(other).holds == ()


@pytest.mark.parametrize("hold", [Hold(-1, 5), Hold(10**6, 5), Hold(0, 0), Hold(0, 10**20)])
def test_what_cannot_be_held_is_not_read(hold):
    text = codec.dumps(replace(plain_schedule(chain_record(10).graphs[0]), holds=(hold,)))
    with pytest.raises(ValueError, match=r"held|range"):
        codec.loads(Schedule, text)


def test_what_is_held_beside_a_step_counts_while_it_runs():
    record = chain_record(10)
    graph, costs, plain = record.graphs[0], record.costs[0], plain_schedule(record.graphs[0])
    before = simulate(graph, costs, plain)
    after = simulate(graph, costs, replace(plain, holds=(Hold(2, 7 * MIB), Hold(2, MIB))))
    assert after.during_bytes[2] == before.during_bytes[2] + 8 * MIB == after.peak_bytes
    assert after.peak_step == 2
    assert after.during_bytes[:2] + after.during_bytes[3:] == before.during_bytes[:2] + before.during_bytes[3:]
    assert (after.before_bytes, after.after_bytes, after.seconds) == (
        before.before_bytes,
        before.after_bytes,
        before.seconds,
    )
