"""The step of a graph that the record has at other shapes: what the script takes there is scaled from the record."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.last_gradients import are_freed, are_there
from monetrun.core.last_outputs import last_outputs_bytes
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.step import LAST_OUTPUTS, OUTSIDE, Event, StepRecord, replay
from monetrun.planning import planner
from monetrun.runtime import adaptation, new_step, recorder
from monetrun.solve import greedy
from support.captured import captured

WIDTH = 128
OUTPUT = 64 * WIDTH * 4  # bytes of the recorded batch's


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x):
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = x + F.gelu(linear(norm(x)))
        return x


def joint(batch):
    return captured(Net(), torch.randn(batch, WIDTH, requires_grad=True))


class Remembers(Net):
    """Gives its result, and one to remember, which no gradient comes for."""

    def forward(self, x):
        result = super().forward(x)
        return result.mean(1), result.detach()


def record_with(*events):
    small = joint(64)
    return StepRecord((small.graph,), (recorder.estimated(small),), events, 0, {}, "cpu", torch.__version__)


def events_at(batch, record, *there):
    return new_step.events_of(joint(batch), record, [plain_schedule(g) for g in record.graphs], *there)


def test_a_new_shape_leaves_room_for_what_a_loss_takes_and_frees_before_the_backward():
    large = joint(256)
    events = (
        Event(FORWARD, 0),
        Event(OUTSIDE, -1, OUTPUT, 3 * OUTPUT, "loss"),
        Event(BACKWARD, 0),
        Event(OUTSIDE, -1, -OUTPUT, 0),
    )
    record = record_with(*events)
    plain = [plain_schedule(record.graphs[0])]
    plan = planner.plan_step(record, replay(record, plain).peak_bytes, "greedy", Options())
    step_events = new_step.events_of(large, record, [g.schedule for g in plan.graphs])
    loss = step_events[1]
    assert (loss.delta_bytes, loss.peak_bytes) == (4 * OUTPUT, 12 * OUTPUT)
    step = new_step.step_of(large.graph, recorder.estimated(large), 0, step_events, exact=True)
    frugal = replay(step, [greedy.most_frugal(step.graphs[0], step.costs[0])]).peak_bytes
    during_the_loss = replay(step, [plain_schedule(large.graph)]).high_bytes[1]
    limit = (during_the_loss + frugal) // 2
    assert frugal < limit < during_the_loss
    schedule = adaptation.adapted_schedule(step, plan, limit, Options())
    assert replay(step, [schedule]).high_bytes[1] <= limit


def test_requests_between_forward_and_backward_are_scaled_one_by_one_and_numbered_anew():
    before = Event(OUTSIDE, -1, 512, 512, "batch", requests=(512, 4, -2))
    output = next(t.id for t in joint(64).graph.tensors if t.kept)
    loss = Event(OUTSIDE, -1, OUTPUT, 2 * OUTPUT, "", dropped=((0, output),), dropped_after=(2,), freed=())
    loss = dataclasses.replace(loss, requests=(OUTPUT, OUTPUT, -4))
    backward = Event(BACKWARD, 0, released=(output,))
    record = record_with(before, Event(FORWARD, 0), loss, backward, Event(OUTSIDE, -1, -OUTPUT, 0, requests=(-3,)))
    forward, scaled, own_backward, end = events_at(256, record)
    assert (forward, own_backward) == (Event(FORWARD, 0), backward)
    assert scaled == dataclasses.replace(
        loss, delta_bytes=4 * OUTPUT, peak_bytes=8 * OUTPUT, requests=(4 * OUTPUT, 4 * OUTPUT, -2)
    )
    assert end.delta_bytes == -4 * OUTPUT
    assert events_at(32, record)[1] == dataclasses.replace(loss, requests=(OUTPUT, OUTPUT, -2))


def test_what_the_backward_is_given_has_its_size_of_the_new_graph_also_where_that_is_smaller():
    tangent = next(t.id for t in joint(64).graph.tensors if t.external and t.nbytes == OUTPUT)
    loss = Event(OUTSIDE, -1, OUTPUT, OUTPUT, requests=(OUTPUT, 2 * OUTPUT, -2))
    record = record_with(Event(FORWARD, 0), loss, Event(BACKWARD, 0, released=(tangent,)))
    assert events_at(63, record)[1].requests == (OUTPUT * 63 // 64, 2 * OUTPUT, -2)
    # 100 of 64 is no number that floating point has exactly
    assert events_at(100, record)[1].requests == (OUTPUT * 100 // 64, 2 * OUTPUT * 100 // 64, -2)


def test_last_outputs_are_dropped_as_far_as_they_are_there():
    there = Event(OUTSIDE, -1, 2 * OUTPUT, 2 * OUTPUT, LAST_OUTPUTS)
    dropped = Event(OUTSIDE, -1, -2 * OUTPUT, 0, LAST_OUTPUTS)
    loss = Event(OUTSIDE, -1, OUTPUT, OUTPUT)
    record = record_with(there, Event(FORWARD, 0), loss, dropped, Event(BACKWARD, 0))
    large = joint(256)
    for now in (0, OUTPUT, 2 * OUTPUT, 3 * OUTPUT):
        events = events_at(256, record, 0, now)
        step = new_step.step_of(large.graph, recorder.estimated(large), 5 * OUTPUT, events, exact=True)
        assert last_outputs_bytes(step) == min(now, 2 * OUTPUT)
        timeline = replay(step, [plain_schedule(large.graph)])
        backward = [e.kind for e in events].index(BACKWARD)
        first = [e.kind for e in events].index(FORWARD)
        assert timeline.start_bytes[first] == 5 * OUTPUT
        saved = timeline.start_bytes[first + 1] - 5 * OUTPUT
        assert timeline.start_bytes[backward] == 5 * OUTPUT + saved + 4 * OUTPUT - min(now, 2 * OUTPUT)


def test_what_was_requested_before_the_forward_and_another_call_are_not_taken_for_the_losss():
    freed = Event(OUTSIDE, -1, OUTPUT, 2 * OUTPUT, requests=(OUTPUT, -1))
    given = (Event(OUTSIDE, -1, 512, 512, "batch", requests=(512,)), Event(FORWARD, 0), freed, Event(BACKWARD, 0))
    assert [e.requests for e in events_at(256, record_with(*given))] == [()] * 4
    twice = (Event(FORWARD, 0), Event(FORWARD, 0), Event(OUTSIDE, -1, OUTPUT, OUTPUT), *[Event(BACKWARD, 0)] * 2)
    kinds = [e.kind for e in events_at(256, record_with(*twice))]
    assert kinds == [FORWARD, OUTSIDE, BACKWARD, OUTSIDE]


def test_gradients_that_the_loss_is_followed_by_the_freeing_of_are_not_scaled():
    loss = Event(OUTSIDE, -1, OUTPUT, OUTPUT)
    record = record_with(are_there(640), Event(FORWARD, 0), loss, are_freed(640), Event(BACKWARD, 0))
    found = events_at(256, record, 640)
    assert found[0] == are_there(640)
    assert found[3] == are_freed(640)
    assert found[2].delta_bytes == 4 * OUTPUT
    assert all(e.delta_bytes != -640 for e in events_at(256, record, 512))


def test_no_loss_is_of_an_output_without_a_gradient():
    """A module that keeps its last result: three times that was taken for what a loss holds."""
    remembers = captured(Remembers(), torch.randn(64, WIDTH, requires_grad=True))
    (loss,) = [e.peak_bytes for e in new_step.events_of(remembers, None, []) if e.kind == OUTSIDE and e.delta_bytes > 0]
    assert loss < OUTPUT // 16
    assert loss >= 64 * 4
