"""Steps whose memory lies in other pieces than planned: found before they begin, and planned again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.errors import MemoryShort
from monetrun.core.options import Options
from monetrun.core.reserved import Reserved
from monetrun.core.step import DeviceMemory, Segment
from monetrun.planning import planner
from monetrun.runtime import layout, pieces
from monetrun.runtime.layout import Layout, Scattered
from support.on_stand_in import needs_stand_in, printed_by
from support.step_records import chain_record

MIB = 1 << 20
LARGE = chain_record(1_000_000)
MEMORY = DeviceMemory(
    AllocatorSettings(expandable=True), AllocatorSettings(), 80 << 30, (Segment(False, (LARGE.base_bytes,)),)
)
RECORD = replace(LARGE, memory=MEMORY)
BUDGET = planner.plain_bytes(RECORD, planner.baseline(RECORD)) * 4 // 5
PLAN = planner.plan_step(RECORD, BUDGET, "greedy", Options(seconds=0.5))


@pytest.fixture
def looked(monkeypatch):
    """A layout whose requests, blocks, reserved bytes and clock are given."""
    found = Layout(torch.device("cuda"))
    found.requests, found.blocks, found.taken, found.clock = 0, 0, 0, 0.0
    found.looks = 0

    def reserved(*_):
        found.looks += 1
        found.clock += 0.5
        return found.taken

    monkeypatch.setattr(found, "_large_requests", lambda: found.requests)
    monkeypatch.setattr(found, "_reserved", reserved)
    monkeypatch.setattr(layout.allocator_history, "large_blocks", lambda device: found.blocks)
    monkeypatch.setattr(layout.time, "monotonic", lambda: found.clock)
    return found


def test_steps_before_which_as_much_is_requested_as_before_the_last_one_are_not_looked_at(looked):
    assert looked.may_have_moved()  # the first one
    moved = []
    for requests in (1, 1, 600, 1, 1):
        looked.step_ended()
        looked.requests += requests
        moved.append(looked.may_have_moved())
        looked.requests += 50  # the step's own
    assert moved == [True, False, True, True, False]
    looked.plan_is()
    looked.step_ended()
    looked.requests += 1
    assert looked.may_have_moved()
    assert not Layout(torch.device("cpu")).may_have_moved()


def test_looks_take_a_small_share_of_the_time(looked):
    looked.step_ended()
    looks = []
    for number in range(200):
        looked.blocks = number
        looks.append(looked.may_have_moved())
        if looks[-1]:
            looked.beyond(RECORD, (), 1, ())
        looked.clock += 1.0
        looked.step_ended()
        looked.requests += number + 1  # others before each step
    assert 2.0 <= looked._seconds <= 2.0 + 0.02 * looked.clock + 0.5
    assert any(looks[100:])


def test_a_layout_in_which_the_step_fits_is_looked_at_once_under_a_plan(looked):
    assert [looked.beyond(RECORD, (), 5, ()) for _ in range(3)] == [0, 0, 0]
    assert looked.looks == 1
    looked.plan_is()
    looked.taken = 7
    assert looked.beyond(RECORD, (), 5, ()) == 2
    assert looked.looks == 2


def test_where_several_plans_do_not_fit_the_last_one_runs(looked):
    looked.taken = 7
    found = []
    for _ in range(5):
        found.append(looked.beyond(RECORD, (), 5, ()))
        looked.plan_is()
    assert found == [2, 2, 2, 0, 0]


def running():
    """A plan that runs, within a budget that it fills."""
    settings = SimpleNamespace(algorithm="greedy", solver_seconds=0.5, solver_options=lambda s: Options(seconds=s))
    there = SimpleNamespace(kept=[])
    there.stays_as_it_is = lambda: there.kept.append(True)
    made = SimpleNamespace(settings=settings, layout=there, record=RECORD, plan=PLAN, _frugal=None)
    made.followed, made.notes, made.excess_bytes = [], [], 0
    made.follow, made.note = made.followed.append, made.notes.append
    return made


def test_a_step_that_would_reserve_more_than_the_budget_is_planned_again_before_it_runs(looked):
    room = SimpleNamespace(repeated=[], last_outputs=set)
    room.call_is_repeated = room.repeated.append
    looked.taken = BUDGET
    looked.check(RECORD, PLAN, room, "a")
    looked.taken, looked.blocks = BUDGET + 30 * MIB, 1
    with pytest.raises(MemoryShort) as failure:
        looked.check(RECORD, PLAN, room, "b")
    assert room.repeated == ["b"]
    found = running()
    pieces.plan_again(found, failure.value.shortage)
    (plan,) = found.followed
    assert (found.excess_bytes, found.record.memory.excess_bytes) == (40 * MIB, 40 * MIB)  # whole pages
    assert (plan.budget_bytes, plan.plain_peak_bytes) == (PLAN.budget_bytes, PLAN.plain_peak_bytes)
    assert plan.planned_peak_bytes < PLAN.planned_peak_bytes
    assert "planned again within" in found.notes[0]


def test_steps_that_no_allocator_serves_are_not_looked_at(looked):
    looked.check(LARGE, PLAN, None, "a")
    looked.check(RECORD, replace(PLAN, graphs=()), None, "a")
    assert looked.looks == 0


def test_a_first_step_in_front_of_which_the_trials_blocks_lie_is_not_run_on_them(monkeypatch):
    """Pages that are held for it meanwhile fill part of a gap."""
    before = replace(MEMORY, base=(Segment(False, (30, -10)), Segment(True, (2,)), Segment(False, (20,), gap_bytes=60)))
    held = replace(MEMORY, base=(Segment(False, (30, -50)), Segment(True, (2,)), Segment(False, (20,), gap_bytes=20)))
    moved = replace(MEMORY, base=(Segment(False, (30, -50)), Segment(False, (20,), gap_bytes=40)))
    runs = []
    monkeypatch.setattr(layout, "settled", lambda *_, begun: runs.append(begun) or Reserved(0, 0, 7 * MIB))
    monkeypatch.setattr(layout.allocator_history, "blocks", lambda device: {})
    record = replace(LARGE, memory=replace(before, excess_bytes=60 * MIB))
    for now, expected in ((held, 0), (moved, 1)):
        monkeypatch.setattr(layout, "memory_now", lambda *_, now=now: now)
        found = Layout(torch.device("cuda"))._reserved(record, [g.schedule for g in PLAN.graphs], ())
        assert (len(runs), found) == (expected, 9 * MIB * expected)  # what was seen beyond plans does not count
    assert runs == [False]


def test_where_no_other_plan_is_known_the_present_one_runs():
    found = running()
    pieces.plan_again(found, Scattered(BUDGET))
    assert (found.followed, found.notes, found.record) == ([], [], RECORD)
    assert found.layout.kept == [True]


GAPS = """
import json
import os
import torch
from monetrun.capture import allocator_history
from monetrun.core.caching_allocator import CachingAllocator

MIB = 1 << 20
device = torch.device("cuda")


def take(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)


kept = [take(mib) for mib in (31, 75, 33, 90, 20)]
kept[1] = kept[3] = None
torch.cuda.empty_cache()  # two gaps, with parts of pages on both sides
model = CachingAllocator(allocator_history.settings_from_environment(), 4 << 30)
segments = allocator_history.segments(device)
for segment in segments:
    model.load(segment.small, segment.blocks, gap_bytes=segment.gap_bytes)
found = [[model.reserved_bytes, torch.cuda.memory_reserved()]]
for mib in (70, 30, 85, 12, 200):
    kept.append(take(mib))
    model.allocate(mib * MIB)
    found.append([model.reserved_bytes, torch.cuda.memory_reserved()])
print(json.dumps([[s.gap_bytes // MIB for s in segments], found]))
"""


@needs_stand_in
def test_gaps_between_segments_are_filled_as_torchs_allocator_fills_them(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    gaps, reserved = printed_by(GAPS)
    assert gaps[0] == 0
    assert [gap > 0 for gap in gaps[1:]] == [True, True]
    assert [modelled for modelled, _ in reserved] == [real for _, real in reserved]
