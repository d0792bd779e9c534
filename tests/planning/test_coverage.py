"""What is said of a step whose model is captured in parts: where its floor is, and how much of it is planned."""

import dataclasses

import pytest

from monetrun.core.budget import parse, resolve
from monetrun.core.plan import plain_schedule
from monetrun.core.step import OUTSIDE, Break, Event, replay
from monetrun.planning import planner
from monetrun.planning.coverage import coverage, planned_share
from support.step_records import chained_graphs_record


def with_eager_part(nbytes, workspace_bytes=0):
    """Between its two graphs the step runs what is not captured, and saves ``nbytes`` of it for the backward."""
    record = chained_graphs_record()
    events = list(record.events)
    events[1] = Event(OUTSIDE, -1, nbytes, nbytes + workspace_bytes)
    events[-1] = Event(OUTSIDE, -1, -nbytes, 0)
    return dataclasses.replace(record, events=tuple(events))


def test_the_share_that_is_planned_is_what_captured_graphs_allocate_of_the_plain_peak():
    assert planned_share(with_eager_part(0)) > 0.8  # the rest is the loss
    record = with_eager_part(20_000)
    timeline = replay(record, [plain_schedule(g) for g in record.graphs])
    assert record.events[timeline.peak_event].kind != OUTSIDE
    loss_bytes = 20 * 100
    assert planned_share(record) == pytest.approx(1 - (20_000 + loss_bytes) / (timeline.peak_bytes - 1000))
    assert planned_share(with_eager_part(10**6)) < 0.03


def test_a_floor_outside_of_all_graphs_is_named_by_the_calls_around_it():
    record = with_eager_part(10**6, workspace_bytes=10**6)
    with pytest.raises(planner.BudgetBelowSmallest) as refused:
        planner.plan_step(record, 1_900_000)
    assert (
        "at its peak: what the script runs outside the captured graphs, between Chain's forward and Chain's forward"
        in str(refused.value)
    )


@pytest.mark.parametrize("nbytes", [0, 50, 10_000, 10**6])
def test_a_suggested_budget_is_feasible_and_never_over_the_plain_peak(nbytes):
    record = with_eager_part(nbytes)
    with pytest.raises(planner.BudgetBelowSmallest) as refused:
        planner.plan_step(record, 5000)
    suggested = resolve(parse(refused.value.hint.split("--budget ")[1].split(" ")[0]))
    assert refused.value.smallest_bytes <= suggested <= refused.value.plain_bytes
    assert planner.plan_step(record, suggested).planned_peak_bytes <= suggested


def test_a_model_in_parts_is_named_once_with_its_outermost_break():
    record = with_eager_part(20_000)
    assert coverage(record) == ""
    breaks = (Break("0:Net", "Net", "a.py:1, x[x > 0]", "why", True), Break("0:Net.b", "B", "b.py:2", "too", True))
    said = coverage(dataclasses.replace(record, breaks=breaks))
    share = planned_share(record)
    assert said == f"Net is planned in parts: why (a.py:1, x[x > 0]); {share:.0%} of the step's peak is planned, " + (
        "the budget holds for all of a step like the recorded one"
    )
