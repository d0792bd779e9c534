"""Which step is recorded, and that nothing goes on recording."""

import pytest
import torch
from torch import nn

from support.sessions import opened_session


def train(steps, critic_steps=1):
    """Two optimizers: of the head in each step, of the body only from the twentieth on, or after each critic step."""
    torch.manual_seed(0)
    body = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    model = nn.Sequential(body, nn.Linear(64, 64))
    head, whole = torch.optim.SGD(model[1].parameters(), 0.1), torch.optim.SGD(body.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        head.step()
        if (step % critic_steps == critic_steps - 1) if critic_steps > 1 else step >= 20:
            whole.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("steps", "critic_steps", "planned_from"), [(24, 1, 9), (15, 5, 5)], ids=["late", "critic"])
def test_an_optimizer_that_begins_much_later_is_not_waited_for(steps, critic_steps, planned_from):
    expected = train(steps, critic_steps)
    with opened_session(budget="0.8x", solver_seconds=1.0, implementations="exact") as session:
        found = train(steps, critic_steps)
        engine = session.engine
        assert engine.plan is not None
        assert len(engine.running.record.events) < 40 * critic_steps
        assert engine.meters.steps.steps >= steps - planned_from - 1
    assert found == expected


def test_an_engine_that_ends_while_it_records_records_no_more():
    with opened_session(budget="0.8x", solver_seconds=1.0) as session:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(4, 8)).sum().backward()
        recorder, stopped = session.engine.recorder, []
        recorder.sharding.stop = lambda: stopped.append(1)
        session.run_as_it_is("for a reason")
        assert stopped
        optimizer.step()
