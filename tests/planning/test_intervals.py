"""Planned and measured bytes, paired stretch by stretch."""

from dataclasses import replace

import pytest

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.plan import plain_schedule
from monetrun.core.step import OUTSIDE, Event, replay
from monetrun.planning.intervals import Interval, RankIntervals, Stretch, intervals, optimizer_steps
from support.step_records import chain_record

RECORD = chain_record(100)
SCHEDULES = [plain_schedule(RECORD.graphs[0])]


def measured(kind, graph=-1, name="", start=0, peak=0):
    return Stretch(kind, graph, name, start, peak, start)


STEP = [
    measured(OUTSIDE, start=1, peak=2),  # before the first call
    measured(FORWARD, 0, start=10, peak=11),
    measured(OUTSIDE, start=20, peak=21),
    measured(BACKWARD, 0, start=30, peak=31),
    measured(OUTSIDE, start=40, peak=41),
    measured(OUTSIDE, name="SGD.step", start=50, peak=51),
]


def test_each_call_and_what_lies_between_has_its_planned_and_measured_bytes():
    found = intervals(RECORD, SCHEDULES, STEP)
    starts = replay(RECORD, SCHEDULES).start_bytes
    assert [(i.kind, i.name) for i in found] == [
        (FORWARD, "Chain"),
        (OUTSIDE, ""),
        (BACKWARD, "Chain"),
        (OUTSIDE, ""),
        (OUTSIDE, "SGD.step"),
    ]
    assert tuple(i.planned_start_bytes for i in found) == starts
    assert [i.measured_start_bytes for i in found] == [10, 20, 30, 40, 50]
    assert [i.measured_peak_bytes for i in found] == [11, 21, 31, 41, 51]
    assert max(i.planned_peak_bytes for i in found) == replay(RECORD, SCHEDULES).peak_bytes
    loss = RECORD.events[1]
    assert found[1].planned_peak_bytes == starts[1] + loss.peak_bytes
    assert found[4].planned_peak_bytes == starts[4] + 40


def test_bytes_that_are_added_between_two_calls_take_no_time():
    def with_last_outputs(record):
        held = 5000
        first, loss, *others = record.events
        events = (Event(OUTSIDE, -1, held, held), first, loss, Event(OUTSIDE, -1, -held, 0, "last step's outputs"))
        return replace(record, events=(*events, *others))

    plain, other = (intervals(r, SCHEDULES, STEP) for r in (RECORD, with_last_outputs(RECORD)))
    assert [i.kind for i in other] == [i.kind for i in plain]
    more = [i.planned_start_bytes - j.planned_start_bytes for i, j in zip(other, plain, strict=True)]
    assert more == [5000, 5000, 0, 0, 0]
    assert other[1].planned_peak_bytes - plain[1].planned_peak_bytes == 5000


@pytest.mark.parametrize(
    "other",
    [
        STEP[:-3],
        [*STEP[:3], measured(BACKWARD, -1), *STEP[4:]],  # a graph that is not in the record
        [*STEP, *STEP[1:]],
        [],
    ],
)
def test_a_step_with_other_calls_has_no_intervals(other):
    assert intervals(RECORD, SCHEDULES, other) == ()


def test_a_step_has_as_many_optimizer_steps_as_named_events():
    assert optimizer_steps(RECORD) == 1
    assert optimizer_steps(replace(RECORD, events=RECORD.events * 2)) == 2
    assert optimizer_steps(replace(RECORD, events=())) == 0


def test_the_largest_measured_peak_and_the_largest_difference_of_a_rank_are_found():
    rank = RankIntervals(
        0,
        (
            Interval(FORWARD, "Net", 100, 1000, 100, 1010),
            Interval(OUTSIDE, "", 100, 900, 100, 870),
            Interval(BACKWARD, "Net", 100, 1200, 100, 1200),
            Interval(OUTSIDE, "SGD.step", 0, 0, 0, 0),
        ),
    )
    assert [i.label for i in rank.intervals] == ["Net forward", "between calls", "Net backward", "SGD.step"]
    assert [i.difference_bytes for i in rank.intervals] == [10, -30, 0, 0]
    assert [i.difference for i in rank.intervals] == [0.01, -30 / 900, 0.0, 0.0]
    assert rank.largest_measured_peak == 2
    assert rank.largest_difference == 1
