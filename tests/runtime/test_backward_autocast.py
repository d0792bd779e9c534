"""A backward is traced for the autocast in which the script calls it: gradients are those of eager in either case."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import cpu_allocator, gradient_order
from monetrun.capture.backward_autocast import OFF, depends_on
from monetrun.core import codec
from monetrun.core.step import StepRecord
from monetrun.runtime.session import Session
from monetrun.runtime.settings import PROBE, RUN, Settings
from support.captured import captured

BFLOAT16 = (("cpu", "bfloat16"),)


class Float32Region(nn.Module):
    """Under autocast all of it runs in bfloat16, but for one product."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 8)
        self.middle = nn.Parameter(torch.randn(48, 48) / 7)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.middle
        return self.last(torch.tanh(x))


class Attention(nn.Module):
    """On a CPU, torch computes attention with dropout in float32."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 72), nn.Linear(24, 8)

    def forward(self, x):
        q, k, v = self.first(x).view(4, 8, 3, 24).permute(2, 0, 1, 3)
        return self.last(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)).view(-1, 8)


class AllInBfloat16(nn.Module):
    """No product is in float32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))

    def forward(self, x):
        return self.layers(x)


def train(make, within, parts=1, steps=4, held=True):
    """Losses of training under autocast, and the model; the backward is called ``within`` it, or outside.

    The script has ``held`` the model's input until the backward.
    """
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(parts):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                x = torch.randn(32, 24)
                loss = net(x).float().square().mean()
                if not held:
                    del x
                if not within:
                    stack.close()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, net


@pytest.fixture
def session():
    """Opens a session; it is closed at the end."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    with contextlib.ExitStack() as stack:

        def opened(mode=RUN, **settings):
            one = Session(Settings(mode=mode, solver_seconds=1.0, implementations="exact", **settings))
            stack.callback(torch._dynamo.reset)
            stack.callback(one.close)
            one.watch_process()
            return one

        yield opened


def assert_same(found, expected):
    assert found[0] == expected[0]
    for given, of_eager in zip(found[1].parameters(), expected[1].parameters(), strict=True):
        assert torch.equal(given, of_eager)


@pytest.mark.parametrize(
    ("make", "parts"),
    [(Float32Region, 1), pytest.param(Float32Region, 2, marks=pytest.mark.nightly), (Attention, 1), (AllInBfloat16, 1)],
    ids=["Float32Region", "accumulated", "Attention", "AllInBfloat16"],
)
@pytest.mark.parametrize("within", [False, True], ids=["outside", "within"])
def test_a_model_with_a_region_in_float32_trains_bitwise_as_eager(session, make, within, parts):
    expected = train(make, within, parts)
    one = session(budget="4GiB")
    assert_same(train(make, within, parts), expected)
    assert one.engine.autocast.state == (BFLOAT16 if within and make is not AllInBfloat16 else OFF)
    assert one.engine.running.record.backward_autocast == one.engine.autocast.state
    assert one.engine.peak_bytes > 0
    assert one.reporter.warned == set()


def test_where_the_input_is_gone_the_first_step_differs_by_rounding_and_a_warning_says_so(session):
    expected, _ = train(Float32Region, within=True)
    one = session(budget="4GiB")
    losses, _ = train(Float32Region, within=True, held=False)
    assert losses[0] == expected[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-2, atol=0)
    (warning,) = one.reporter.warned
    assert "this step's gradients may differ by rounding" in warning


class Normalized(nn.Module):
    """All in float32; some of it runs again in the backward where the budget is tight."""

    def __init__(self):
        super().__init__()
        kinds = (nn.Linear(24, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())
        self.layers = nn.Sequential(*kinds, nn.Linear(256, 8))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layers(x)


@pytest.mark.parametrize("by_turns", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_what_ran_outside_of_the_autocast_around_the_backward_runs_again_as_it_ran(session, by_turns, monkeypatch):
    monkeypatch.setattr(gradient_order, "communicates", lambda: by_turns)

    def trained():
        torch.manual_seed(0)
        net = Normalized()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        losses = []
        for _ in range(5):
            loss = net(torch.randn(512, 24)).square().mean()  # the input is there for its graph alone
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, net

    expected = trained()
    one = session(budget="0.6x")
    assert_same(trained(), expected)
    assert one.engine.autocast.state == BFLOAT16
    (graph,), (planned,) = one.engine.running.record.graphs, one.engine.plan.graphs
    assert any(step.operator < graph.forward_count for step in planned.schedule.backward)
    assert one.reporter.warned == set()


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.nightly), 2], ids=["", "accumulated"])
def test_a_trial_records_the_second_step_where_the_first_was_traced_for_another_autocast(
    session, parts, monkeypatch, tmp_path
):
    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", leave)
    expected = train(Float32Region, True, parts)
    file = tmp_path / "record.json"
    trial = session(PROBE, budget="4GiB", record_file=str(file))
    with pytest.raises(Ended):
        train(Float32Region, True, parts)
    trial.close()
    record = codec.loads(StepRecord, Path(file).read_text())
    assert record.backward_autocast == BFLOAT16
    assert sum(event.kind == "backward" for event in record.events) == parts
    assert record.events[-1].name == "SGD.step"

    monkeypatch.undo()
    one = session(budget="4GiB", plan_file=_planned(record, tmp_path), record_file=str(file))
    found = train(Float32Region, True, parts)
    assert_same(found, expected)
    assert one.engine.generation == 0  # compiled once
    assert one.engine.peak_bytes <= one.engine.plan.planned_peak_bytes


def _planned(record, folder):
    from monetrun.planning import planner

    file = folder / "plan.json"
    file.write_text(codec.dumps(planner.plan_step(record, planner.baseline(record).frugal.peak_bytes)))
    return str(file)


class WithHiddenState(AllInBfloat16):
    """Its hidden state is an output too, so that a gradient may come for it from outside."""

    def forward(self, x):
        hidden = self.layers[:2](x)
        return self.layers[2](hidden), hidden


@pytest.mark.parametrize(("make", "types"), [(WithHiddenState, set()), (AllInBfloat16, set()), (Attention, {"cpu"})])
def test_only_products_in_float32_depend_on_autocast(make, types):
    with torch.autocast("cpu", torch.bfloat16):
        joint = captured(make(), torch.randn(32, 24))
    assert make is not WithHiddenState or any("add_output_gradient" in op.target for op in joint.graph.operators)
    assert depends_on(joint) == types
