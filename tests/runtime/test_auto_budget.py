"""``auto`` is no amount that the user has stated: what it has no plan for trains as under torchrun, with a warning."""

import gc

import pytest
import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core.errors import InfeasibleBudget
from monetrun.machine.device import MemoryInfo
from monetrun.runtime import budget_here
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

MIB = 1 << 20
WIDTH = 128


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def trained(batches):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, held = [], []
    for batch in batches:
        if batch < 0:
            held.append(torch.randn(-batch))  # and stays
            continue
        optimizer.zero_grad()
        loss = model(torch.randn(batch, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(p.detach().sum().item() for p in model.parameters())]


@pytest.fixture
def free(monkeypatch):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    gc.collect()

    def set_free(nbytes):
        info = MemoryInfo("cpu", "CPU", nbytes, nbytes, "test")
        monkeypatch.setattr(budget_here, "query", lambda *args: [info])

    return set_free


@pytest.mark.parametrize(
    ("free_bytes", "batches", "calls", "ends"),
    [
        # no schedule of the recorded step fits
        pytest.param(MIB, [512] * 4, 0, True, marks=pytest.mark.nightly),
        pytest.param(
            8 * MIB, [512, 512, 512, 8192, 512], 1, False, marks=pytest.mark.nightly
        ),  # none of a larger batch
        (8 * MIB, [512, 512, 512, -(2 << 20), *[512] * 5], 3, True),  # none beside what is held later, and stays
    ],
    ids=["first", "larger", "held"],
)
def test_what_auto_has_no_plan_for_trains_plainly_and_strict_refuses_it(free, free_bytes, batches, calls, ends, capsys):
    plain = trained(batches)
    for strict in (False, True):
        gc.collect()
        free(free_bytes)
        how = {"solver_seconds": 0.5, "implementations": "exact", "strict": strict}
        session = Session(Settings(mode=RUN, budget="auto", **how))
        session.watch_process()
        try:
            if strict:
                with pytest.raises((InfeasibleBudget, torch.OutOfMemoryError)):
                    trained(batches)
            else:
                assert trained(batches) == plain
                assert (session.engine is None) == ends
        finally:
            session.close()
            torch._dynamo.reset()
        said = capsys.readouterr().err
        assert said.count("a step runs as it is: what is free has no plan (") == (0 if strict else calls)
        assert said.count("models run without a plan from now on") == (ends and not strict)
