"""Scripts that catch the errors of their own forwards and go on: plan and budget stay."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from monetrun.runtime import enforcement, with_room
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from support.sessions import opened_session


class Net(nn.Module):
    """``refuses``: by its own code, else by a convolution that has too little to read."""

    def __init__(self, refuses):
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 5), nn.Conv1d(16, 16, 5)
        self.last = nn.Linear(16, 4)
        self.refuses = refuses

    def forward(self, x):
        if self.refuses and x.shape[2] < 9:
            raise ValueError(f"{x.shape[2]} samples are too few")
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(x.mean(2))


def train(refuses, passes=1):
    """``passes``: forwards and backwards for each step; the script's loop goes on where one fails."""
    torch.manual_seed(0)
    model = Net(refuses)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(8 * passes):
        x = torch.randn(64, 4, 3 if step == 4 * passes + passes - 1 else 64)
        if step % passes == 0:
            optimizer.zero_grad()
        try:
            loss = model(x).square().mean()
        except (RuntimeError, ValueError) as error:
            losses.append(str(error).splitlines()[0])
            continue
        loss.backward()
        if step % passes == passes - 1:
            optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("refuses", "passes"), [(False, 1), pytest.param(True, 1, marks=pytest.mark.nightly), (True, 2)]
)
def test_a_batch_that_the_model_cannot_take_leaves_the_plan_as_it_is(refuses, passes, capsys):
    torch._dynamo.reset()
    expected, weights = train(refuses, passes)
    session = Session(Settings(mode=RUN, budget="0.9x", solver_seconds=0.5, implementations="exact"))
    session.watch_process()
    try:
        found, planned = train(refuses, passes)
        (call,), engine = session.planned, session.engine
    finally:
        session.close()
        torch._dynamo.reset()
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, planned, strict=True))
    assert call.broken is None
    assert call.parts == []
    assert engine.breaks == {}
    assert len(engine.running.schedules) == 1
    assert not engine.running.enforcement.share_is_estimate
    assert engine.meters.steps.steps == 6
    said = capsys.readouterr().err
    assert "parts" not in said
    assert "more are held" not in said


def stepping(model, run, passes):
    """Training steps, after each of which it stops."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(passes):
        optimizer.zero_grad()
        run(torch.randn(64, 4, 64)).square().mean().backward()
        optimizer.step()
        yield


def test_an_interrupted_forward_leaves_no_limit_behind(monkeypatch):
    """Of a notebook's cell."""
    limits = []
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: limits.append(nbytes))
    with opened_session(budget="0.7x", solver_seconds=1.0):
        torch.manual_seed(0)
        model = Net(False)
        list(stepping(model, model, 3))
        assert limits[-2] is not None
        hook = model.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(64, 4, 64))
        hook.remove()
        assert limits[-1] is None


def test_a_checkpoint_around_a_planned_model_is_no_failed_call(monkeypatch):
    with opened_session(budget="0.95x", solver_seconds=1.0):
        torch.manual_seed(0)
        model, collections = Net(False), []
        monkeypatch.setattr(with_room.gc, "collect", lambda *_: collections.append(1))
        steps = stepping(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=False), 5)
        found = [len(collections) for _ in steps]
        assert found[-1] == found[-3]
