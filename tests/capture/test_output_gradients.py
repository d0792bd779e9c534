"""Outputs that nothing uses: without a gradient, as in eager, or freed before the backward; and those that are used."""

import gc

import pytest
import torch
import torch._dynamo  # before what it imports itself
import torch.nn.functional as F
from torch import fx, nn

from monetrun.capture import cpu_allocator, gradient_forms, output_gradients
from monetrun.runtime.backend import Backend
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from support.captured import Chooser

VOCABULARY = 2000


class Model(nn.Module):
    """Gives a loss, the logits it comes from, and a hidden state in another layout than its gradient's."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.token(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        hidden = x.transpose(1, 2).contiguous()
        logits = self.head(hidden.transpose(1, 2))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits, hidden


def trained(used_from, steps=5):
    """Weights, losses, peaks, and what was held before; from step ``used_from`` on the loss has all outputs in it."""
    gc.collect()
    held = cpu_allocator.allocated_bytes()
    torch.manual_seed(9)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, peaks = [], []
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(VOCABULARY, (4, 64))
        optimizer.zero_grad()
        cpu_allocator.reset_peak()
        loss, logits, hidden = model(tokens)
        if step >= used_from:
            loss = loss + 1e-3 * logits.square().mean() + 1e-3 * hidden.abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        peaks.append(cpu_allocator.peak_bytes() - held)
    state = {k: v.numpy().tobytes() for k, v in model.state_dict().items()}  # no tensors: they would count
    return state, losses, peaks, held


@pytest.mark.parametrize("used_from", [99, 3, pytest.param(0, marks=pytest.mark.nightly)])
def test_an_output_without_a_gradient_costs_nothing_and_may_get_one_later(used_from):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    plain_state, losses, peaks, _ = trained(used_from)
    session = Session(Settings(mode=RUN, budget="2x", solver_seconds=0.5, implementations="none"))
    session.watch_process()
    try:
        state, found, _, held = trained(used_from)
        plan = session.engine.plan
        assert session.reporter.warned == set()
    finally:
        session.close()
        torch._dynamo.reset()
    assert found == losses
    assert state == plain_state
    if used_from == 99:
        assert plan.plain_peak_bytes - held == pytest.approx(peaks[2], rel=0.005)


def test_an_output_that_the_script_drops_is_freed_before_the_backward():
    def steps(peaks):
        gc.collect()
        held = cpu_allocator.allocated_bytes()
        torch.manual_seed(9)
        model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            tokens = torch.randint(VOCABULARY, (256,))
            optimizer.zero_grad()
            cpu_allocator.reset_peak()
            F.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            peaks.append(cpu_allocator.peak_bytes() - held)
        return held

    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    plain = []
    steps(plain)
    session = Session(Settings(mode=RUN, budget="2x", solver_seconds=0.5, implementations="none"))
    session.watch_process()
    try:
        held = steps([])
        plan, measured = session.engine.plan, session.engine.peak_bytes
    finally:
        session.close()
        torch._dynamo.reset()
    assert plan.plain_peak_bytes - held == pytest.approx(plain[2], rel=0.005)
    assert plan.planned_peak_bytes == pytest.approx(measured, rel=0.005)


@pytest.mark.skipif(not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="autograd itself holds it there")
def test_the_gradient_of_an_output_is_freed_once_it_was_read():
    session = Session(Settings(mode=RUN, budget="2x", solver_seconds=0.5, implementations="none"))
    session.watch_process()
    try:
        model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            tokens = torch.randint(VOCABULARY, (256,))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
        record = session.engine.running.record
        plan, measured = session.engine.plan, session.engine.peak_bytes
    finally:
        session.close()
        torch._dynamo.reset()
    (tangent,) = (t.id for t in record.graphs[0].tensors if t.name.startswith("tangents"))
    assert [tangent in event.released for event in record.events if event.kind == "backward"] == [True]
    assert plan.planned_peak_bytes == pytest.approx(measured, rel=0.005)


def test_what_compiling_leaves_behind_does_not_hold_outputs_in_the_recorded_step():
    """Dynamo's trace of a frame that it leaves alone holds that call's tensors, in a cycle, in the first call."""
    first = [True]

    @torch._dynamo.disable
    def leave_a_trace(logits):
        if first:
            cycle = [logits]
            cycle.append(cycle)
            gc.collect(1)  # it is old by now, so that what Dynamo itself collects does not find it

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, VOCABULARY)

        def forward(self, x, labels):
            logits = self.outer(torch.tanh(self.inner(x)))
            loss = F.cross_entropy(logits, labels)
            leave_a_trace(logits)
            return loss

    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    session = Session(Settings(mode=RUN, budget="2x", solver_seconds=0.5, implementations="none"))
    session.watch_process()
    gc.disable()
    try:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(256, 32), torch.randint(VOCABULARY, (256,))).backward()
                first.clear()
            optimizer.step()
            optimizer.zero_grad()
        plan, measured = session.engine.plan, session.engine.peak_bytes
        events = session.engine.running.record.events
    finally:
        gc.enable()
        session.close()
        torch._dynamo.reset()
    dropped = [event.dropped for event in events if event.dropped]
    assert len(dropped) == 2  # the logits, in each forward
    assert dropped[0] == dropped[1]
    assert plan.planned_peak_bytes == pytest.approx(measured, rel=0.005)


def test_a_parameter_without_a_gradient_in_eager_has_none():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 4)

        def forward(self, x):
            x = torch.tanh(self.trunk(x))
            return self.used(x), self.unused(x)

    def trained():
        torch.manual_seed(4)
        model = Heads()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(4):
            optimizer.zero_grad()
            used, unused = model(torch.randn(16, 8))
            (used.square().mean() + (unused.mean() if step == 3 else 0)).backward()
            if step < 3:
                assert model.unused.weight.grad is None
            optimizer.step()
        return model.state_dict()

    plain = trained()
    session = Session(Settings(mode=RUN, budget="2x", solver_seconds=0.5, implementations="none"))
    session.watch_process()
    try:
        state = trained()
        assert session.engine.plan is not None
    finally:
        session.close()
        torch._dynamo.reset()
    assert [k for k in state if not torch.equal(state[k], plain[k])] == []


class TransposedNorm(nn.Module):
    """Gives the transposed result of a batch norm, and one that is made of it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y, torch.roll(y, 1, 1).contiguous() * 2


def test_a_sum_with_an_outputs_gradient_has_the_strides_with_which_that_arrives():
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = TransposedNorm(), torch.randn(8, 64, 16, requires_grad=True)

    def gradients(run):  # of a transposed output's mean square they are not transposed
        return torch.autograd.grad(sum(y.square().mean() for y in run(x)), [x, *module.parameters()])

    expected = gradients(module)
    assert all(map(torch.equal, expected, gradients(torch.compile(module, backend=Backend(Chooser(), "net")))))


def test_a_gradient_is_copied_where_its_strides_have_no_view_that_the_backward_takes():
    graph = fx.Graph()
    negative = graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("tangents_1"),))
    graph.output((graph.call_function(torch.ops.aten.view.default, (negative, [512, 16])),))
    given = []
    module, traced = fx.GraphModule({}, graph), torch.empty(8, 64, 16)
    run = gradient_forms.fitting(lambda arguments: given.extend(arguments), module, [traced])
    gradient = torch.randn(8, 16, 64).transpose(1, 2)
    run([gradient])
    assert given[0].stride() == traced.stride()
    assert torch.equal(given[0], gradient)


def test_a_parameter_behind_a_view_of_an_earlier_graphs_output_has_no_gradient_where_eager_has_none():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.used, self.unused, self.last = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            hidden = torch.tanh(self.trunk(x))
            torch._dynamo.graph_break()
            flat = hidden.view(-1, 8)
            used, unused = self.used(flat), torch.tanh(self.unused(flat))
            torch._dynamo.graph_break()
            return self.last(flat) + used, unused

    torch._dynamo.reset()
    model, x = Parts(), torch.randn(4, 2, 8)
    results = torch.compile(model, backend=Backend(Chooser(), "case"))(x)
    again = [output_gradients.autograd_node(r) for r in results]
    assert again == [None, None]  # each call has its own by now
    results[0].sum().backward()
    assert model.unused.weight.grad is None
    assert model.used.weight.grad is not None
    torch._dynamo.reset()
