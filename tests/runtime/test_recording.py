"""What a recorded step has of the script, and of nothing else."""

import copy
import itertools

import pytest
import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core.step import OUTSIDE
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from support.sessions import opened_session


def test_what_capturing_a_graph_within_the_step_allocates_is_not_the_scripts():
    """The second model is captured after the first one's backward; its kernels allocate for a while in that."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    session = Session(Settings(mode=RUN, budget="1.0x", solver_seconds=1.0, implementations="exact"))
    session.watch_process()
    try:
        generator = nn.Sequential(
            nn.ConvTranspose2d(32, 64, 4),
            nn.BatchNorm2d(64),
            nn.ReLU(True),
            nn.ConvTranspose2d(64, 48, 4, 2, 1),
            nn.Tanh(),
        )
        critic = nn.Sequential(nn.Conv2d(48, 24, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(24, 1, 4))
        optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            critic(torch.rand(64, 48, 8, 8)).sum().backward()
            critic(generator(torch.rand(64, 32, 1, 1))).sum().backward()
            optimizer.step()
        record = session.engine.running.record
        peak = session.engine.findings()["measured_peak_bytes"]
    finally:
        session.close()
        torch._dynamo.reset()
    assert len(record.graphs) == 3
    assert max(e.peak_bytes for e in record.events if e.kind == OUTSIDE and not e.name) < peak // 50


def test_an_optimizers_step_is_planned_with_all_of_its_state():
    """The largest parameter is the second of four: in the first step it is updated before most of the state is there.

    With a weight decay the gradient of each parameter is added to another tensor for a while.
    """
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    session = Session(Settings(mode=RUN, budget="1.0x", solver_seconds=1.0))
    session.watch_process()
    try:
        sizes = (64, 256, 1024, 512, 512, 10)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-3)
        for _ in range(4):
            loss = model(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        plan, measured = session.engine.plan, session.engine.peak_bytes
    finally:
        session.close()
        torch._dynamo.reset()
    assert abs(measured / plan.planned_peak_bytes - 1) <= 0.005


def test_a_model_with_parametrizations_is_copied_while_it_is_trained():
    """``parametrize`` copies all of a module's ``__dict__``."""
    session = Session(Settings(mode=RUN, budget="1.0x", solver_seconds=1.0))
    session.watch_process()
    try:
        model = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        copies = [copy.deepcopy(model)]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 16)).square().mean().backward()
            optimizer.step()
            copies.append(copy.deepcopy(model))
        assert session.engine.plan is not None
    finally:
        session.close()
        torch._dynamo.reset()
    assert all(other._compiled_call_impl is None for other in copies)
    assert torch.equal(copies[-1].weight, model.weight)


@pytest.mark.parametrize(
    ("looks", "steps"), [([], False), ([1024, 512, 1024], False), ([1024, 512, 1024], True)], ids=str
)
def test_a_look_at_the_model_before_training_is_no_part_of_the_step(looks, steps):
    """``steps``: an optimizer's step follows each, of gradients that the script has computed otherwise."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
    model = nn.Sequential(*layers)
    with opened_session(budget="0.7x", solver_seconds=1.0, implementations="exact") as opened:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in looks:
            assert model(torch.randn(batch, 128)).shape == (batch, 128)
            if steps:
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
                optimizer.zero_grad()
        captured = opened.planned[0].captured if looks else 0
        assert captured == len({*looks})  # each size once
        waiting = []
        for _ in range(4):
            for _ in range(2):  # outputs themselves are gone before their backward
                waiting.append(model(torch.randn(1024, 128)).sum())
            sum(waiting).backward()
            waiting.clear()
            optimizer.step()
            optimizer.zero_grad()
        events = opened.engine.running.record.events
        assert opened.engine.plan.planned_peak_bytes <= opened.engine.plan.budget_bytes
        assert opened.engine.peak_bytes == opened.engine.plan.planned_peak_bytes
    assert [e.kind for e in events if e.kind != OUTSIDE] == ["forward"] * 2 + ["backward"] * 2
