"""What counts as held before a step: also the last step's outputs, where a step frees them and they are not there."""

import pytest
import torch

from monetrun.planning.forward_needs import ForwardNeed
from monetrun.runtime.room import Room, _missing


class Held:
    """A meter: so much is held."""

    exact = True

    def current_bytes(self):
        return 1000


@pytest.mark.parametrize(
    ("planned", "gone", "there", "missing"),
    [
        (400, [], [400], 0),  # as in the recorded step
        (400, [400], [], 400),  # an epoch's first step
        (400, [250], [], 400),  # after a smaller batch
        (400, [400, 90], [], 400),  # 90 bytes are never held
        (400, [90], [400], 0),
        (400, [300], [100], 300),
        (400, [30], [], 30),  # what else is planned is none of them
        (8, [400], [], 0),  # a loss is held, and no output
        (0, [400], [], 0),
        (0, [], [70], 0),  # more than planned is held: that counts by itself
        (400, [], [], 0),  # another model's step came between
    ],
)
def test_outputs_that_are_not_there_are_told_from_those_that_are_never_held(planned, gone, there, missing):
    assert _missing(planned, sorted(gone), sum(there)) == missing


def test_outputs_that_may_be_missing_end_no_training():
    room = Room(Held())
    room.limit_bytes = 2000
    room._needs["graph"] = (ForwardNeed(held_bytes=1000, planned_bytes=900, plain_bytes=1100, last_outputs_bytes=400),)

    def shortage():
        room.outputs_given([torch.ones(100)])  # which nobody holds
        room.optimizer_ended()
        room.call_begins()
        return room.shortage("graph")

    found = shortage()
    assert (found.held_bytes, found.missing_bytes, found.excess_bytes) == (1400, 400, 400)
    assert room.does_without(found)
    assert shortage() is None
    room.limit_bytes = 1800
    assert (found := shortage()).missing_bytes == 0
    assert not room.does_without(found)


def test_outputs_that_are_freed_during_a_step_are_missing_from_then_on_once():
    """Before each of three forwards 400 bytes of the last step's outputs are expected."""
    room = Room(Held())
    room.limit_bytes = 100
    need = ForwardNeed(held_bytes=1000, planned_bytes=900, plain_bytes=1100, last_outputs_bytes=400)
    room._needs["graph"] = (need,) * 3
    outputs = [torch.ones(25), torch.ones(75)]
    room.outputs_given(outputs)
    room.optimizer_ended()
    missing = []
    for _ in range(3):
        room.call_begins()
        missing.append(room.shortage("graph").missing_bytes)
        if outputs:
            outputs.pop()
    assert missing == [0, 300, 400]


def test_a_step_that_the_optimizer_skips_is_no_other_way_through_the_forward():
    room = Room(None)
    room._in_python = True
    room._needs["graph"] = (ForwardNeed(held_bytes=0, planned_bytes=1, plain_bytes=1, last_outputs_bytes=0),)

    def call():
        room.call_begins()
        other = room.takes_another_way("graph")
        room._calls["graph"] += 1
        return other

    assert not call()
    room.gradients_dropped()  # as by ``zero_grad``, without an optimizer's step
    assert not call()
    assert call()  # a second forward before any backward
    room.optimizer_ended()
    assert not call()


def test_a_forward_that_has_room_after_all_counts_as_a_call():
    """A share of the plain peak grows with what is held, and the forward goes on: one that is repeated counts once."""

    room = Room(Held())
    room.limit_bytes = 1500
    room._needs["graph"] = (ForwardNeed(held_bytes=700, planned_bytes=900, plain_bytes=1100, last_outputs_bytes=0),)
    room.call_begins()
    assert room.shortage("graph").excess_bytes == room.excess_bytes == 300
    assert room.calls() == {"graph": 1}
    room.call_repeats("graph")
    assert room.calls() == {"graph": 0}
