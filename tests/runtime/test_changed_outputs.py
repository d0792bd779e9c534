"""Scripts that change a model's outputs in place before the backward, as eager lets them: it has not saved them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import cpu_allocator
from support import zoo
from support.sessions import opened_session


@pytest.fixture(autouse=True)
def _counted():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()


class Residual(nn.Module):
    """Its output is added over the result of a linear layer, of which it is a view then."""

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(layer(F.gelu(layer(x))), 0.1)
        return x


class Normalized(nn.Module):
    """Its output is a layer norm's, whose backward can be computed from it."""

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + F.gelu(layer(x)))
        return x


class InParts(nn.Module):
    """What is between its parts changes the output of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Normalized(), Residual()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        x += 1
        torch._dynamo.graph_break()
        return self.second(x)


def train(make):
    torch.manual_seed(0)
    model = make()
    optimizer = zoo.sgd(model, 0.01)
    losses, based = [], []
    for n in (8, 4, 8, 6):
        optimizer.zero_grad()
        y = model(torch.randn(n, 24, 32))
        based.append(y._base is not None)
        y += 1
        y.mul_(0.5)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, based, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "make", [Residual, *(pytest.param(m, marks=pytest.mark.nightly) for m in (Normalized, InParts))]
)
def test_outputs_may_be_changed_in_place_between_forward_and_backward(make):
    expected = train(make)
    with opened_session(budget="0.7x", solver_seconds=1.0) as session:
        found = train(make)
        plan = session.engine.plan
    assert plan is not None
    assert any(step.implementation for g in plan.graphs for step in g.schedule.forward)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == expected[1]
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-6)
