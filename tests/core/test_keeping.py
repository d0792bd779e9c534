"""Records of steps under other choices of which sharded modules keep their parameters, and their clocks."""

import pytest

from monetrun.core import codec
from monetrun.core.clocks import step_clocks
from monetrun.core.event import FREE, GATHER, REDUCE, WAIT, Action
from monetrun.core.keeping import as_planned, as_scripted, choice_of, keeping, over_link, with_events
from monetrun.core.link import Link
from monetrun.core.plan import each_once
from monetrun.core.step import OUTSIDE, Event, StepRecord, replay
from support.sharded_steps import SIZE
from support.sharded_steps import sharded_record as record


def seconds(own, link=None):
    own = own if link is None else over_link(own, link)
    return step_clocks(own, [each_once(own.graphs[0])], Link(1.0, 0.0), 2)


def test_what_is_kept_is_held_from_the_forward_to_the_backward_and_not_gathered_again():
    own = record()
    schedules = [each_once(own.graphs[0])]
    kept = keeping(own, (0,))
    held = [a - b for a, b in zip(replay(kept, schedules).start_bytes, replay(own, schedules).start_bytes, strict=True)]
    freed = next(i for i, e in enumerate(own.events) if e.action and (e.action.kind, e.action.module) == (FREE, 0))
    gathered = next(i for i, e in enumerate(own.events) if e.action == Action(GATHER, 0, unless_kept=True))
    assert [i for i, more in enumerate(held) if more] == list(range(freed + 1, gathered + 1))
    assert set(held) == {0, SIZE}
    assert replay(kept, schedules).start_bytes[-1] == replay(own, schedules).start_bytes[-1]


def test_a_choice_can_be_taken_back_and_is_named_in_the_plan():
    own = record(3)
    kept = keeping(own, (2, 1))
    assert kept.sharding.kept == (1, 2)
    assert keeping(kept, ()) == own
    assert choice_of(kept) == {"0:net.0": False, "0:net.1": True, "0:net.2": True}
    assert as_planned(own, choice_of(kept)) == kept
    assert as_planned(own, {}) == own
    assert codec.loads(StepRecord, codec.dumps(kept)) == kept


def test_without_a_choice_a_module_does_as_the_script_says():
    own = record(kept=True)
    assert as_scripted(own) == keeping(own, (0, 1))
    assert as_planned(own, {"0:net.1": False}) == keeping(own, (0,))


def test_changed_events_are_changed_under_every_choice():
    own = keeping(record(), (1,))
    more = with_events(own, lambda events: [Event(OUTSIDE, -1, 7, 7), *events])
    assert [e.delta_bytes for e in more.events[:1]] == [7]
    assert more.events[1:] == own.events
    assert keeping(more, ()).events[1:] == keeping(own, ()).events


def test_requests_are_numbered_anew_and_the_kept_block_is_freed_after_the_backward():
    own = keeping(record(requests=True), (0,))
    found = [(e.action and e.action.kind, e.requests) for e in own.events if e.requests]
    # module 0's gather, its parameters (2), no free; module 1's; the backward of 1; then 2 is freed
    assert found == [
        (GATHER, (SIZE + 1,)),
        (WAIT, (SIZE, -1)),
        (GATHER, (SIZE + 1,)),
        (WAIT, (SIZE, -3)),
        (FREE, (-4,)),
        (GATHER, (SIZE + 1,)),
        (WAIT, (SIZE, -5)),
        (REDUCE, (-6,)),
        (REDUCE, (-2,)),
    ]
    alive = set()
    number = 0
    for event in own.events:
        for n in event.requests:
            if n > 0:
                number += 1
                alive.add(number)
            else:
                alive.remove(-n)
    assert not alive


def test_all_gathers_are_hidden_behind_the_call_before_and_the_first_of_the_backward_is_not():
    link = Link(bytes_per_second=SIZE / 2, latency_seconds=0.0)  # of two ranks: 1 s a collective
    own = record()
    clocks = seconds(own, link)
    # 1 s for the first gather; the second one within the first forward; 1 s for the last module's second gather,
    # the other one's behind its backward; the last reduce-scatter behind nothing
    assert clocks.compute_seconds == 6.0
    assert clocks.buckets == 6
    assert clocks.communication_seconds == pytest.approx(6.0)
    assert clocks.step_seconds == pytest.approx(1 + 1 + 1 + 1 + 2 + 2 + 1)
    assert seconds(keeping(own, (1,)), link).step_seconds == pytest.approx(clocks.step_seconds - 1)
    hidden = seconds(keeping(own, (0,)), link)  # was hidden already
    assert (hidden.step_seconds, hidden.buckets) == (pytest.approx(clocks.step_seconds), 5)
    assert seconds(own).step_seconds == 6.0  # seconds that are not known are none


def test_each_module_frees_its_own_blocks():
    """Those of all modules have one size; the last module's are freed first."""
    own = keeping(record(3, requests=True), (0, 1, 2))
    parameters = [event.requests.index(SIZE) + 1 for event in own.events if SIZE in event.requests]
    assert parameters == [1, 1, 1]
    freed = [event.requests for event in own.events if event.action and event.action.kind == REDUCE]
    assert freed == [(-6,), (-4,), (-2,)]
