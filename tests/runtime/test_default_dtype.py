"""A default dtype that is set for the forward alone, as by Lightning's ``bf16-true``, and not for the backward."""

import contextlib

import pytest
import torch
from torch import nn

from support.sessions import opened_session


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Filling(nn.Module):
    """Makes tensors without a dtype: a state of zeros, and a quotient of integers."""

    def __init__(self):
        super().__init__()
        self.layers, self.state = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 64)

    def forward(self, x):
        for layer in self.layers:
            state = torch.zeros(len(x), 64, device=x.device) + 1
            x = torch.tanh(layer(x) * (torch.arange(64, device=x.device) / 7) + self.state(state))
        return x


def trained(dtype):
    torch.manual_seed(0)
    with default(dtype):
        model = Filling()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with default(dtype):
            loss = model(torch.ones(512, 64, dtype=dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.nightly)], ids=str)
def test_what_runs_again_in_the_backward_has_the_forwards_default_dtype(dtype):
    expected = trained(dtype)
    with opened_session(budget="1.0x", solver_seconds=1.0, implementations="exact") as opened:  # records the least peak
        assert trained(dtype) == expected
        record = opened.engine.running.record
        operators = {op.name: op.replayable for graph in record.graphs for op in graph.operators}
        assert opened.reporter.warned == set()
    assert (operators["zeros"], operators["div"]) == (True, False)
