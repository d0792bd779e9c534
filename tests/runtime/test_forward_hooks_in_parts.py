"""What a forward does with the gradients of its own tensors is done where it cannot be captured whole."""

import torch
import torch.nn.functional as F
from torch import nn

from support.sessions import opened_session


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)


class Retains(Pair):
    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        y.retain_grad()
        self.kept = y
        return self.second(F.gelu(y))


class RemovesItsHook(Pair):
    def forward(self, x):
        y = self.first(x)
        hook = y.register_hook(lambda gradient: gradient * 2)
        z = self.second(F.gelu(y))
        hook.remove()  # Dynamo has an assertion for that
        return z


def trained(build):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(4):
        loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
        kept = getattr(model, "kept", None)
        found.append((loss.item(), None if kept is None else kept.grad.sum().item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_gradient_that_a_forward_in_parts_retains_is_there():
    expected = trained(Retains)
    with opened_session(budget="1.5x", solver_seconds=0.5, quiet=True) as opened:
        assert trained(Retains) == expected
        assert opened.engine.breaks


def test_a_forward_that_removes_its_own_hook_trains_as_in_eager():
    expected = trained(RemovesItsHook)
    with opened_session(budget="1.5x", solver_seconds=0.5, quiet=True) as opened:
        assert trained(RemovesItsHook) == expected
        assert opened.reporter.warned or opened.engine.breaks
