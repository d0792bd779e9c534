"""What callbacks do around a training: under the launcher, within another one's, and where planning has ended."""

import re

import pytest
import torch
import torch.nn.functional as F

import monetrun
from monetrun.capture import cpu_allocator
from monetrun.integrations.applied_budget import AppliedBudget
from monetrun.runtime import session as process
from support import zoo
from support.launches import without_settings
from support.paths import DOCS

OPTIONS = {"solver_seconds": 0.5, "algorithm": "greedy"}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    without_settings(monkeypatch)
    yield
    monetrun.close()
    torch._dynamo.reset()


def net():
    model = zoo.SmallResNet(channels=8, blocks=1)
    return model, zoo.sgd(model)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = zoo.images(4, 64)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("package", ["transformers", "Lightning"])
@pytest.mark.parametrize("measured", [{}, {"measured_peak_bytes": None}, {"measured_peak_bytes": 3 << 20}])
def test_what_the_page_prints_at_the_end_needs_no_measurement(package, measured, capsys):
    (lines,) = re.findall(
        rf"^## {package}\n.*?```python\n(.*?)```", (DOCS / "integrations.md").read_text(), re.S | re.M
    )
    budget = AppliedBudget("0.9x")
    budget.measured = measured
    exec(lines[re.search(r"^trainer\.\w+\(.*\n", lines, re.M).end() :], {"budget": budget})
    said = "at most 3.0 MiB in a training step\n" if measured.get("measured_peak_bytes") else ""
    assert capsys.readouterr().out == said


def test_under_the_launcher_nothing_is_begun_or_ended(monkeypatch):
    model, _ = net()
    launched = object()
    monkeypatch.setattr(process, "_launched", True)
    monkeypatch.setattr(process, "_session", launched)
    budget = AppliedBudget("0.9x")
    budget.begin(model)
    budget.end()
    assert budget.measured == {}
    assert process._session is launched


@pytest.mark.nightly
def test_a_training_within_another_one_shares_its_budget_and_does_not_end_it(capsys):
    outer, inner = AppliedBudget("0.9x", **OPTIONS), AppliedBudget("0.9x", **OPTIONS)
    model, optimizer = net()
    outer.begin(model)
    train(model, optimizer)
    began = process._session
    other, its = net()
    inner.begin(other)
    train(other, its)
    inner.end()
    assert process._session is began
    assert inner.measured["steps"] > 2
    assert outer.measured == {}
    train(model, optimizer)
    outer.end()
    assert process._session is None
    assert outer.measured["steps"] > inner.measured["steps"]
    assert "was active" not in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_another_budget_ends_the_one_that_is_active_after_a_warning(quiet, capsys):
    outer, inner = AppliedBudget("0.9x", **OPTIONS), AppliedBudget("0.8x", quiet=quiet, **OPTIONS)
    model, optimizer = net()
    outer.begin(model)
    train(model, optimizer, steps=1)
    inner.begin(model)
    said = "monetrun: warning: the budget 0.9x was active and has ended: all models are planned anew under 0.8x"
    assert said in capsys.readouterr().err
    train(model, optimizer)
    inner.end()
    assert inner.measured["budget_bytes"] == pytest.approx(0.8 * inner.measured["plain_peak_bytes"], abs=1)
    last = AppliedBudget("0.7x", **OPTIONS)
    last.begin(model)
    outer.end()
    assert process._session is not None  # it is not the one that ``outer`` began
    assert outer.measured == {}
    last.end()


def test_a_budget_that_begins_twice_ends_once():
    budget = AppliedBudget("0.9x", **OPTIONS)
    model, optimizer = net()
    budget.begin(model)
    budget.begin(model)
    train(model, optimizer)
    budget.end()
    assert budget.measured["steps"] == 2
    assert process._session is None
    budget.end()
    assert budget.measured["steps"] == 2


def test_what_was_measured_before_planning_ended_is_given(capsys):
    budget = AppliedBudget("0.9x", **OPTIONS)
    model, optimizer = net()
    budget.begin(model)
    train(model, optimizer)
    process._session.run_as_it_is("models run without a plan from now on, for a reason")
    train(model, optimizer)
    budget.end()
    assert budget.measured["steps"] == 2
    assert 0 < budget.measured["measured_peak_bytes"] <= budget.measured["budget_bytes"]
    assert "nothing was planned" not in capsys.readouterr().err
