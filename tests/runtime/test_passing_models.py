"""Copies of a model that are trained for a few steps each: after some of them the others run as they are."""

import copy

import pytest
import torch
from torch import nn

from monetrun.runtime import session
from monetrun.runtime.passing_models import PassingModels
from support.sessions import opened_session


def learnt(tasks=14):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    losses = []
    for task in range(tasks):
        own = copy.deepcopy(model)
        inner = torch.optim.SGD(own.parameters(), 0.05)
        for _ in range(2):
            inner.zero_grad()
            loss = own(torch.full((64, 16), task / tasks)).square().mean()
            loss.backward()
            inner.step()
            losses.append(loss.item())
        with torch.no_grad():
            for p, q in zip(model.parameters(), own.parameters(), strict=True):
                p += 0.3 * (q - p)
    return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.nightly
def test_copies_that_come_and_go_are_planned_no_more(monkeypatch):
    monkeypatch.setattr(session, "_launched", True)  # what a script applies is planned
    expected = learnt()
    with opened_session(budget="1.5x", solver_seconds=0.5, implementations="exact") as opened:
        assert learnt() == expected
        (warning,) = opened.reporter.warned
        assert "models come and go" in warning
        assert len(opened.planned) <= 2
        assert 8 <= next(opened._numbers) <= 11


def test_models_that_are_trained_for_long_one_after_the_other_are_planned():
    passing = PassingModels()
    assert [passing.reason(1, 200 * k) for k in range(20)] == [""] * 20
    assert [bool(passing.reason(1, 4000 + 2 * k)) for k in range(8)] == [False] * 6 + [True] * 2
    assert passing.reason(0, 4400) == ""
