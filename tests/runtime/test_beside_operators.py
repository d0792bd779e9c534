"""A loss that is a sum: its gradient is one number for all elements, which a kernel may make whole for itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.runtime.running_plan import intervals_of
from support.sessions import opened_session


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def trained():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(256, 32)).sum().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("budget", ["1.0x", pytest.param("0.9x", marks=pytest.mark.nightly)])
def test_what_a_kernel_copies_of_an_expanded_gradient_is_planned(budget):
    expected = trained()
    with opened_session(budget=budget, solver_seconds=1.0, implementations="exact") as opened:
        assert trained() == expected
        intervals = intervals_of(opened.engine.running)
    assert [i.measured_peak_bytes - i.planned_peak_bytes for i in intervals] == [0] * 5
