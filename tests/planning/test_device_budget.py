"""Plans within a budget of reserved bytes: the solver's target follows what its schedules reserve."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.options import Options
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import plain_schedule
from monetrun.core.reserved import Reserved, reserved, reserved_under
from monetrun.core.step import DeviceMemory, Segment
from monetrun.core.step_changes import with_excess
from monetrun.planning import device_budget, planner
from support.step_records import chain_record

MIB = 1 << 20
OPTIONS = Options(seconds=1.0)


def device_record(batch=1_000_000):
    """A chain whose tensors have 20 to 50 MB, on a device."""
    record = chain_record(batch)
    base = (Segment(False, (record.base_bytes,)),)
    return replace(record, memory=DeviceMemory(AllocatorSettings(expandable=True), AllocatorSettings(), 80 << 30, base))


@pytest.fixture(scope="module")
def record():
    return device_record()


@pytest.fixture(scope="module")
def base(record):
    return planner.baseline(record)


@pytest.mark.parametrize("share", [0.95, 0.85])
def test_what_a_plan_reserves_is_within_the_budget(record, base, share):
    budget = int(share * planner.plain_bytes(record, base))
    plan = planner.plan_step(record, budget, "hierarchical", OPTIONS, base)
    schedules = [g.schedule for g in plan.graphs]
    assert plan.pool.planned_bytes == reserved(record, schedules).peak_bytes <= budget
    assert plan.pool.planned_bytes >= plan.planned_peak_bytes
    assert sum(plan.ledger.values()) == plan.pool.planned_bytes


def test_a_refusal_names_the_smallest_budget_in_reserved_bytes_and_that_one_is_kept(record, base):
    with pytest.raises(planner.BudgetBelowSmallest) as refused:
        planner.plan_step(record, 100 * MIB, "hierarchical", OPTIONS, base)
    assert refused.value.plain_bytes == planner.plain_bytes(record, base)
    plan = planner.plan_step(record, refused.value.smallest_bytes, "hierarchical", OPTIONS, base)
    assert plan.pool.planned_bytes <= refused.value.smallest_bytes


def test_what_was_seen_beyond_a_plan_leaves_less_for_the_next(record, base):
    budget = int(0.95 * planner.plain_bytes(record, base))
    seen = with_excess(record, 20 * MIB)
    plan = planner.plan_step(seen, budget, "hierarchical", OPTIONS, base)
    assert plan.pool.planned_bytes <= budget
    assert reserved(record, [g.schedule for g in plan.graphs]).peak_bytes <= budget - 20 * MIB


def test_a_measured_plain_run_is_what_shares_are_of(record, base):
    measured = replace(record, memory=replace(record.memory, plain_reserved_bytes=123 * MIB))
    assert planner.plain_bytes(measured, base) == 123 * MIB


def test_an_unmeasured_plain_peak_has_what_the_allocator_does_not_split(record, base):
    """A rest of up to 1 MiB stays with its block, and counts as allocated; expandable segments split it off."""
    schedules = [plain_schedule(g) for g in record.graphs]
    plan = planner.plan_step(record, planner.plain_bytes(record, base), "hierarchical", OPTIONS, base)
    of_blocks = reserved_under(record, schedules, AllocatorSettings()).allocated_peak_bytes
    assert plan.plain_peak_bytes == of_blocks > 1.005 * base.plain.peak_bytes
    assert reserved_under(record, schedules, record.memory.settings).allocated_peak_bytes < of_blocks
    measured = replace(record, memory=replace(record.memory, plain_allocated_bytes=123 * MIB))
    assert device_budget.plain_allocated_bytes(measured) == 123 * MIB


def test_a_plain_run_fits_with_room():
    peaks = PlainPeaks(allocated_bytes=90 * MIB, reserved_bytes=95 * MIB, retries=0, steps=3)
    assert peaks.fits(100 * MIB)
    assert not peaks.fits(99 * MIB)


def test_what_the_first_target_leaves_of_budget_and_time_goes_to_another_one(monkeypatch, record):
    """As much is reserved as is allocated; by what the plain step wastes, the first target is 2% below the budget."""
    tried = []

    def within(target, options, starts):
        tried.append((target / MIB, options.seconds, [schedules[0] / MIB for schedules in starts]))
        return device_budget.Found((target,), 0.0, "feasible")

    monkeypatch.setattr(device_budget, "plain_step", lambda record: (record, (300 * MIB,)))
    monkeypatch.setattr(
        device_budget, "reserved", lambda record, of, *_: Reserved(of[0], 0, of[0] + 9 * MIB * (of[0] == 300 * MIB))
    )
    monkeypatch.setattr(
        device_budget, "replay", lambda record, of: SimpleNamespace(peak_bytes=of[0], seconds=-of[0] / MIB)
    )
    monkeypatch.setattr(device_budget.placement, "placed", lambda record, schedules, seconds: schedules)
    found, reserve = device_budget.found_within(record, 200 * MIB, Options(seconds=8.0), within, 100 * MIB)
    assert tried == [(196, 4.0, []), (200, 4.0, [196])]
    assert found.schedules == (reserve.peak_bytes,) == (200 * MIB,)


def test_targets_go_down_until_fewer_pages_are_reserved(monkeypatch, record):
    """Schedules that allocate up to 240 MiB reserve 270, and 20 more for each 20 of them; the budget is 287."""
    tried = []

    def within(target, options, starts):
        tried.append(target / MIB)
        return device_budget.Found((target - 2 * MIB,), 0.0, "feasible")

    def taken(record, schedules, *_):
        (allocated,) = schedules
        return Reserved(allocated, 0, (-(-allocated // (20 * MIB)) * 20 + 30) * MIB)

    monkeypatch.setattr(device_budget, "plain_step", lambda record: (record, (300 * MIB,)))
    monkeypatch.setattr(device_budget, "reserved", taken)
    monkeypatch.setattr(
        device_budget,
        "replay",
        lambda record, schedules: SimpleNamespace(peak_bytes=schedules[0], seconds=-schedules[0]),
    )
    monkeypatch.setattr(device_budget.placement, "placed", lambda record, schedules, seconds: schedules)
    found, reserve = device_budget.found_within(record, 287 * MIB, OPTIONS, within, 100 * MIB)
    assert 225 * MIB < found.schedules[0] <= 240 * MIB, tried
    assert reserve.peak_bytes == 270 * MIB
