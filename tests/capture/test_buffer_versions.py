"""Running statistics may be written between a forward in evaluation mode and its backward, as eager lets them."""

import itertools

import pytest
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


class Changed(nn.Module):
    """Convolutions with batch norms, and a codebook that another call, or the script, changes before the backward."""

    def __init__(self):
        super().__init__()
        channels = (3, 8, 8, 8)
        pairs = itertools.pairwise(channels)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in self.convs)
        self.register_buffer("codes", torch.randn(16, 8))

    def forward(self, images, numbers):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            images = F.relu(norm(conv(images)))
        return F.gelu(images + F.embedding(numbers, self.codes)[:, :, None, None]) * images


def train_changed(write):
    torch.manual_seed(0)
    model = Changed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(5):
        images, numbers = torch.randn(8, 3, 16, 16), torch.randint(16, (8,))
        for norm in model.norms:
            norm.eval()
        first = model(images, numbers).square().mean()
        for norm in model.norms:
            norm.train()
        second = model(images + 1, numbers).square().mean()
        write(model.codes)
        optimizer.zero_grad()
        (first + second).backward()
        optimizer.step()
        losses.append(loss := first.item() + second.item())
    assert loss > 0
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def seen(codes):
    with torch.no_grad():
        codes.copy_(codes.flip(0))


@pytest.mark.parametrize(
    "write", [lambda codes: None, pytest.param(seen, marks=pytest.mark.nightly)], ids=["by a call", "by the script"]
)
def test_no_plan_reads_again_what_is_changed_before_the_backward(write):
    expected = train_changed(write)
    with opened_session(budget="0.62x", solver_seconds=1.0, implementations="exact") as session:
        train_changed(write)
        plan = session.engine.plan
    assert plan.planned_peak_bytes < 0.63 * plan.plain_peak_bytes
    with opened_session(plan=plan, budget="0.62x", solver_seconds=1.0, implementations="exact") as session:
        found = train_changed(write)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
