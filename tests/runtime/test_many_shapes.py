"""Shapes without end, each of which is traced anew: what was compiled before is dropped, and training goes on."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.runtime import planned_calls
from support.sessions import opened_session


class Stepped(nn.Module):
    """Has another probability in each step, of which torch traces each anew."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rate = 0.0

    def forward(self, x):
        return self.second(F.dropout(torch.tanh(self.first(x)), self.rate))


def trained(steps=24):
    torch.manual_seed(0)
    model = Stepped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        model.rate = step % 12 / 20
        optimizer.zero_grad()
        loss = model(torch.ones(64, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.nightly
@pytest.mark.parametrize("most", [100, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_what_was_compiled_is_dropped_once_it_is_too_much(monkeypatch, most):
    expected = trained()
    monkeypatch.setattr(planned_calls, "MOST_TRACED_NODES", most)
    backends, compile_ = [], planned_calls.PlannedCall._compile

    def seen(call):
        compile_(call)
        backends.append(weakref.ref(call.backend))

    monkeypatch.setattr(planned_calls.PlannedCall, "_compile", seen)
    with opened_session(budget="1.0x", solver_seconds=1.0, implementations="exact") as opened:
        assert trained() == expected
        assert opened.reporter.warned == set()
        gc.collect()
        left = sum(backend() is not None for backend in backends)
    assert (len(backends) > 4) == (most == 100)
    assert left <= 3
