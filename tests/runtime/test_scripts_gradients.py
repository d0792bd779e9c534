"""What a script does with gradients beside a backward of its loss, and what else it gives a model, is as in eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from support.sessions import opened_session

WIDTH = 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(self.norm(layer(x)))
        return self.head(x)


def trained(steps, make=Net, before=lambda step, model: None, call=lambda model, x, step: model(x)):
    """Losses, and what is left of the weights, of so many steps."""
    torch.manual_seed(0)
    model, found = make(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        found += [before(step, model)]
        optimizer.zero_grad()
        loss = call(model, torch.randn(256, WIDTH), step).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, *(p.detach().clone().sum().item() for p in model.parameters())]


def as_eager(run, budget="8MiB"):
    """The session in which ``run`` gives what it gives in eager."""
    expected = run()
    with opened_session(budget=budget, implementations="exact", solver_seconds=0.5) as opened:
        assert run() == expected
        assert opened.engine is not None or opened.reporter.warned  # it was planned, until the warning
        return opened


@pytest.mark.parametrize("since", [0, 3])
def test_hooks_on_parameters_run_in_the_order_of_eager(since):
    """Each draws noise, so that order decides what the weights become."""

    def noise(step, model):
        if step != since:
            return
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))

    as_eager(lambda: trained(6, before=noise))


def test_per_sample_gradients_between_steps_are_no_step():
    def noise_scale(step, model):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        x = torch.randn(8, WIDTH)
        gradient = grad(lambda w, x: functional_call(model, w, (x,)).square().mean())
        found = (*gradient(weights, x).values(), *vmap(gradient, (None, 0))(weights, x[:, None]).values())
        return sum(g.square().sum() for g in found).item()

    as_eager(lambda: trained(5, before=lambda step, model: noise_scale(step, model) if step > 1 else None))


class Scaled(Net):
    def forward(self, x, rate):
        return super().forward(x) * (rate * 0.1 * 3) + x * torch.tensor(rate * 0.7 * 0.1)


def test_numbers_that_vary_as_torch_cannot_leave_them_open_are_traced_one_by_one():
    as_eager(lambda: trained(6, Scaled, call=lambda model, x, step: model(x, 0.3 + 0.1 * step)))


class Tagged(torch.Tensor):
    """A tensor of the script's own class."""


@pytest.mark.parametrize("since", [0, 3])
def test_a_model_that_is_given_tensors_of_the_scripts_own_class_runs_as_it_is(since):
    def call(model, x, step):
        return model(x.as_subclass(Tagged) if step >= since else x).as_subclass(torch.Tensor)

    opened = as_eager(lambda: trained(6, call=call))
    (warning,) = opened.reporter.warned
    assert "Net runs without a plan" in warning
    assert "it is given a Tagged, a subclass of torch.Tensor that torch does not capture" in warning


class ForceField(nn.Module):
    """Gives energies, and from then on forces, too."""

    def __init__(self):
        super().__init__()
        self.net, self.gives_forces = Net(), False

    def forward(self, x):
        if not self.gives_forces:
            return self.net(x).square().sum(-1), None
        x.requires_grad_(True)
        energies = self.net(x).square().sum(-1)
        return energies, torch.autograd.grad(energies.sum(), x, create_graph=self.training)[0]


def test_a_forward_that_differentiates_itself_first_under_a_plan_goes_on_without_one():
    def run():
        torch.manual_seed(0)
        model, losses = ForceField(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            model.gives_forces = step >= 3
            optimizer.zero_grad()
            energies, forces = model(torch.randn(256, WIDTH))
            loss = energies.mean() + (0.0 if forces is None else F.mse_loss(forces, torch.zeros_like(forces)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = run()
    with opened_session(budget="8MiB", implementations="exact", solver_seconds=0.5) as opened:
        found = run()
        assert any("create_graph=True" in warning for warning in opened.reporter.warned)
    assert found[:4] == expected[:4]
    assert found == pytest.approx(expected, rel=1e-5)  # gradients of that step differ by rounding
