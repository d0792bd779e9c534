"""Running statistics may be written between a forward in evaluation mode and its backward, as eager lets them."""

import torch
import torch.nn.functional as F
from torch import nn

from support.sessions import opened_session


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(5):
        images = torch.randn(8, 3, 12, 12)
        frozen = 0.0
        if step % 2:
            frozen = F.relu(model.eval()(images)).mean()
        loss = model.train()(images).square().mean() + frozen
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    versions = [b._version for name, b in model.named_buffers() if "running" in name]
    return losses, versions, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_backward_in_evaluation_mode_may_follow_a_forward_in_training_mode():
    expected = train()
    with opened_session(budget="0.9x", solver_seconds=1.0, implementations="exact") as session:
        found = train()
        assert session.engine.plan is not None
        assert session.engine.meters.steps.steps == 4
    assert found[:2] == expected[:2]
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())
