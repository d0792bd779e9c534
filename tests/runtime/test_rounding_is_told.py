"""What may differ from eager by rounding is said: code that is told that it is compiled, and plans of other shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.runtime import adaptation
from support import zoo
from support.sessions import opened_session


class Asks(nn.Module):
    """Captured whole only where it is told that it is compiled."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        h = self.a(x).relu()
        if not torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return self.b(h)


@pytest.mark.parametrize("implementations", ["all", "exact"])
def test_code_that_has_to_be_told_that_it_is_compiled_is_named_or_in_parts(implementations):
    torch.manual_seed(0)
    with opened_session(budget="1.0x", solver_seconds=0.5, implementations=implementations) as session:
        model = Asks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        warned, (planned,) = session.reporter.warned, session.planned
    told = [line for line in warned if "asks whether it is being compiled" in line]
    assert [line.startswith("Asks asks") for line in told] == [True] * (implementations == "all")
    assert (planned.broken is None) == (implementations == "all")


def test_implementations_within_rounding_at_another_batch_size_are_named(monkeypatch, capfd):
    monkeypatch.setattr(adaptation, "inexact", lambda graph, schedule: ["conv1 (parts)"])
    torch.manual_seed(0)
    with opened_session(budget="0.8x", solver_seconds=0.5):
        model = zoo.SmallResNet(channels=8, blocks=2)
        optimizer = zoo.sgd(model)
        for batch in (8, 8, 12):
            x, y = zoo.images(batch, 32)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    err = capfd.readouterr().err
    (line,) = [line for line in err.splitlines() if "conv1 (parts) differ from eager by rounding" in line]
    assert "inputs of 12x3x32x32" in line, err
