"""What a session notices of training: in evaluation mode, under another dispatch mode, by a copied optimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

STEPS = 7


def network():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(64, 4))


def train(how):
    torch._dynamo.reset()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    if how == "validation first":
        losses.append(model.eval()(torch.ones(4, 64)).square().mean().item())
        model.train()
    for step in range(STEPS):
        if how == "start" or (how == "middle" and step == 3):
            model.eval()
        if how == "copies" and step == 1:
            model, optimizer = copy.deepcopy((model, optimizer))
        x = torch.randn(1024, 64)
        if how == "flops" and step == 0:
            with FlopCounterMode(display=False) as counter:
                loss = model(x).square().mean()
                loss.backward()
            losses.append(counter.get_total_flops())
        else:
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if how.startswith("validation"):  # without torch.no_grad()
            losses.append(model.eval()(x).square().mean().item())
            model.train()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("how", "steps", "said"),
    [
        ("start", STEPS - 3, "is trained in evaluation mode"),
        pytest.param("middle", STEPS - 2, "is trained in evaluation mode", marks=pytest.mark.nightly),
        ("validation", STEPS - 1, ""),
        pytest.param("validation first", STEPS - 1, "", marks=pytest.mark.nightly),
        ("flops", STEPS - 2, "has made no training forward before"),
        pytest.param("copies", STEPS - 1, "", marks=pytest.mark.nightly),
    ],
)
def test_what_trains_is_planned_and_the_bits_are_eagers(how, steps, said, capsys):
    losses, weights = train(how)
    session = Session(Settings(mode=RUN, budget="0.7x", solver_seconds=0.5, implementations="exact"))
    session.watch_process()
    try:
        found, planned = train(how)
        counted = session.engine.meters.steps.steps
    finally:
        session.close()
        torch._dynamo.reset()
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, planned, strict=True))
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert [said in line for line in warned] == [True] * bool(said), warned
    assert counted >= steps - 1


def test_a_first_call_that_needs_no_gradients_is_no_failed_capture(capsys):
    """As under Lightning, which freezes a generator in its critic's turn."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    session = Session(Settings(mode=RUN, budget="0.9x", solver_seconds=0.5, strict=True))
    session.watch_process()
    try:
        maker, critic = network(), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (maker, critic)]
        for _ in range(3):
            for trained, optimizer in zip((critic, maker), reversed(optimizers), strict=True):
                maker.requires_grad_(trained is maker)
                critic.requires_grad_(trained is critic)
                critic(maker(torch.randn(512, 64))).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert session.engine.plan is not None
    finally:
        session.close()
        torch._dynamo.reset()
    assert "nothing of its forward was captured" not in capsys.readouterr().err
