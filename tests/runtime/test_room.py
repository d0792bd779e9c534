"""What counts as held before a step: also the last step's outputs, where a step frees them and they are not there."""

import pytest
import torch
from torch import nn

from monetrun.planning.forward_needs import ForwardNeed, forward_needs, needs_by_place
from monetrun.runtime.room import Room
from monetrun.runtime.step_outputs import StepOutputs, _missing
from support.sessions import opened_session

WIDTH = 96


class Held:
    """A meter: so much is held."""

    exact = True

    def __init__(self, nbytes=1100):
        self.nbytes = nbytes

    def current_bytes(self):
        return self.nbytes


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
        room.outputs.given([torch.ones(100)])  # which nobody holds
        room.optimizer_ended(0)
        room.call_begins()
        return room.shortage("graph")

    found = shortage()
    assert (found.held_bytes, found.missing_bytes, found.excess_bytes) == (1500, 400, 500)
    assert room.does_without(found)
    assert shortage() is None
    room.limit_bytes = 1900
    assert (found := shortage()).missing_bytes == 0
    assert not room.does_without(found)


def test_outputs_that_are_freed_during_a_step_are_missing_from_then_on_once():
    """Before each of three forwards 400 bytes of the last step's outputs are expected."""
    room = Room(Held())
    room.limit_bytes = 100
    need = ForwardNeed(held_bytes=1000, planned_bytes=900, plain_bytes=1100, last_outputs_bytes=400)
    room._needs["graph"] = (need,) * 3
    outputs = [torch.ones(25), torch.ones(75)]
    room.outputs.given(outputs)
    room.optimizer_ended(0)
    missing = []
    for _ in range(3):
        room.call_begins()
        missing.append(room.shortage("graph").missing_bytes)
        if outputs:
            outputs.pop()
    assert missing == [0, 300, 400]


@pytest.mark.parametrize("evaluated", [False, True])
def test_as_much_as_was_planned_is_there_under_another_name_unless_the_script_has_evaluated(evaluated):
    """The mean of a loss may keep the memory of all of its terms; so may what an evaluation has left."""
    room = Room(Held(1000))
    room.limit_bytes = 1950
    room._needs["graph"] = (ForwardNeed(held_bytes=1000, planned_bytes=900, plain_bytes=1100, last_outputs_bytes=400),)
    room.outputs.given([torch.ones(100)])  # which nobody holds
    room.optimizer_ended(0)
    if evaluated:
        room.evaluates()
    room.call_begins()
    found = room.shortage("graph")
    assert (found is not None and found.missing_bytes == 400) == evaluated


def test_a_loss_that_keeps_the_memory_of_its_terms_is_held_as_outputs_are():
    outputs = StepOutputs()
    y = torch.randn(64, requires_grad=True) * 1
    loss = torch.nn.functional.mse_loss(y, torch.zeros(64))
    outputs.given([y])
    outputs.differentiated([loss, y])  # an output is no other loss
    assert outputs.last() == {}
    outputs.step_ended()
    assert sorted(outputs.last().values()) == [256, loss.untyped_storage().nbytes()]
    del y
    loss = loss.detach()
    assert list(outputs.last().values()) == [loss.untyped_storage().nbytes()]
    del loss
    assert outputs.last() == {}


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
    room.optimizer_ended(0)
    assert not call()


def test_a_forward_that_has_room_after_all_counts_as_a_call():
    """A share of the plain peak grows with what is held, and the forward goes on: one that is repeated counts once."""

    room = Room(Held(1000))
    room.limit_bytes = 1500
    room._needs["graph"] = (ForwardNeed(held_bytes=700, planned_bytes=900, plain_bytes=1100, last_outputs_bytes=0),)
    room.call_begins()
    assert room.shortage("graph").excess_bytes == room.excess_bytes == 300
    assert room.calls() == {"graph": 1}
    room.call_repeats("graph")
    assert room.calls() == {"graph": 0}


def test_lengths_of_an_accumulation_may_come_in_any_order(capsys):
    """Gradients that earlier passes have left are no more than what the recorded step holds in that place."""

    def script():
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses = []
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0), (0, 0, 2)):
            optimizer.zero_grad()
            for k in order:
                loss = model(torch.randn((64, 128, 192)[k], WIDTH)).square().mean() / 3
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        return losses

    plain = script()
    with opened_session(budget="0.9x", solver_seconds=0.5, implementations="exact") as opened:
        assert script() == plain
        budget = opened.engine.running.plan.budget_bytes
        assert opened.engine.running.room.limit_bytes == budget
    assert "more are held" not in capsys.readouterr().err


def accumulated(lengths):
    """The record and the schedules of a step whose passes have these lengths."""
    with opened_session(budget="1GiB", solver_seconds=0.5) as opened:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            for length in lengths:
                model(torch.randn(length, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        running = opened.engine.running
        return running.record, [running.schedules[graph.fingerprint] for graph in running.record.graphs]


def test_needs_in_a_step_of_several_graphs_are_by_the_place_of_a_pass():
    record, schedules = accumulated((64, 192))
    (small, large) = (needs_by_place(record, schedules)[k] for k in range(2))
    of_calls = forward_needs(record, schedules)
    assert [n.held_bytes for n in small] == [n.held_bytes for n in large]  # what earlier passes have left
    assert small[1].held_bytes - small[0].held_bytes >= WIDTH * WIDTH * 4 + WIDTH * 4  # gradients
    assert (small[0], large[1]) == (of_calls[0][0], of_calls[1][0])
    assert large[0].held_bytes + large[0].planned_bytes >= small[0].held_bytes + small[0].planned_bytes
    assert large[0].held_bytes + large[0].planned_bytes <= large[1].held_bytes + large[1].planned_bytes
    assert needs_by_place(*accumulated((64, 64))) is None  # one graph: in any order they are the same
