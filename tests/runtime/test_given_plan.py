"""A plan that the user gives: refused for another model, and gone on from where the same one changes."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.core import codec
from monetrun.core.errors import PlanMismatch
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings


def network(blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(blocks)))


def train(model, steps=6, unfrozen_at=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(not unfrozen_at)
    losses = []
    for step in range(steps):
        if unfrozen_at and step == unfrozen_at:
            model[0].requires_grad_(True)
        x = torch.randn(256, 64)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def under(script, **options):
    session = Session(Settings(mode=RUN, solver_seconds=0.5, implementations="exact", **options))
    session.watch_process()
    try:
        return script(), session.engine.plan
    finally:
        session.close()
        torch._dynamo.reset()
        gc.collect()


@pytest.fixture
def plan_file(tmp_path):
    _, plan = under(lambda: train(network(), steps=3, unfrozen_at=9), budget="0.9x")
    path = tmp_path / "plan.json"
    path.write_text(codec.dumps(plan))
    return str(path)


@pytest.mark.nightly
def test_weights_that_are_trained_later_are_planned_for_on_the_spot(plan_file):
    expected = train(network(), unfrozen_at=3)
    found, plan = under(lambda: train(network(), unfrozen_at=3), plan_file=plan_file, plan_given=True)
    assert found == expected
    assert len(plan.graphs) == 1


def test_another_models_plan_is_refused_at_once(plan_file):
    with pytest.raises(PlanMismatch, match="of another model"):
        under(lambda: train(network(5)), plan_file=plan_file, plan_given=True)
