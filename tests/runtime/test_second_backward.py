"""Backward passes through outputs of one model that have nothing in common: each is eager's; the model is in parts."""

import contextlib

import pytest
import torch
from torch import nn

from monetrun.capture import gradient_order
from monetrun.core.errors import CaptureFailed
from support.sessions import opened_session


class ActorCritic(nn.Module):
    """The critic reads the input, or what the trunk gives, detached or not."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.actor = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 4))
        self.critic = nn.Sequential(nn.Linear(16 if reads == "input" else 64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))

    def forward(self, x):
        features = self.trunk(x)
        read = {"input": x, "detached": features.detach(), "features": features}[self.reads]
        return self.actor(features), self.critic(read)


def made(reads):
    torch.manual_seed(0)
    return ActorCritic(reads)


def trained(model, steps=4, optimizers=1, first=0, drop=False, retain=False):
    """Losses; from step ``first`` on each loss has a backward of its own."""
    parts = [[model.trunk, model.actor], [model.critic]] if optimizers == 2 else [[model]]
    own = [torch.optim.Adam([p for m in modules for p in m.parameters()], 0.01) for modules in parts]
    losses = []
    for step in range(steps):
        x = torch.randn(256, 16)
        action, value = model(x)
        if drop:
            del x
        pair = action.square().mean(), (value - 1).square().mean()
        for optimizer in own:
            optimizer.zero_grad()
        if step < first:
            sum(pair).backward()
        for k, loss in enumerate(pair if step >= first else ()):
            loss.backward(retain_graph=retain and not k)
            if optimizers == 2:
                own[k].step()
        for optimizer in own if optimizers == 1 or step < first else ():
            optimizer.step()
        losses.append([loss.item() for loss in pair])
    return losses, [p.detach().clone() for p in model.state_dict().values()]


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("reads", "options", "by_turns"),
    [
        ("input", {}, False),
        nightly("input", {"optimizers": 2}, False),
        nightly("detached", {}, False),
        ("detached", {"first": 2}, False),
        nightly("detached", {"retain": True}, False),
        ("features", {"retain": True}, False),
        ("input", {}, True),
        nightly("features", {"retain": True}, True),
    ],
    ids=str,
)
def test_each_is_eagers(reads, options, by_turns, capsys, monkeypatch):
    monkeypatch.setattr(gradient_order, "communicates", lambda: by_turns)
    plain = trained(made(reads), **options)
    budget = "1.5x" if options.get("retain") else "0.9x"  # what is kept for the second is not planned
    with opened_session(budget=budget, solver_seconds=0.5, implementations="exact") as opened:
        losses, state = trained(made(reads), **options)
        assert opened.engine.running is not None
    assert losses == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(state, plain[1], strict=True))
    in_parts = "ActorCritic is planned in parts: several backward passes run through it" in capsys.readouterr().err
    assert in_parts != bool(options.get("retain"))


@pytest.mark.parametrize("steps", [1, 2])
def test_what_eager_has_freed_is_freed(steps):
    twice = pytest.raises(RuntimeError, match="backward through the graph a second time")
    with opened_session(budget="1GiB", solver_seconds=0.5), twice:
        trained(made("features"), steps=steps, first=steps - 1)


def test_one_that_has_run_does_not_run_again():
    with opened_session(budget="1GiB", solver_seconds=0.5):
        action, value = made("input")(torch.randn(8, 16))
        for loss in (action.sum(), value.sum()):
            loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            value.sum().backward()


@pytest.mark.parametrize("options", [{"optimizers": 2}, {"drop": True}], ids=str)
def test_without_what_it_takes_to_run_again_it_ends_with_the_reason(options):
    reason = pytest.raises(CaptureFailed, match="changed or dropped since the forward")
    with opened_session(budget="1GiB", solver_seconds=0.5), reason:
        trained(made("detached"), **options)


def test_a_graph_that_the_second_one_keeps_is_there_for_a_third():
    found = []
    for planned in (False, True):
        model = made("input")
        model.actor[2].p = 0.0
        with opened_session(budget="1GiB", solver_seconds=0.5) if planned else contextlib.nullcontext():
            torch.optim.SGD(model.parameters(), 0.1)
            torch.manual_seed(1)
            x = torch.randn(8, 16)
            action, value = model(x)
            action.sum().backward()
            value.square().sum().backward(retain_graph=True)
            value.square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


class Chain(nn.Module):
    """Heads on what another model gives, one of them on it detached."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return self.one(x), self.other(x.detach())


@pytest.mark.parametrize("order", [(0, 1), nightly((1, 0))], ids=str)
def test_where_no_gradient_reaches_a_model_it_is_not_differentiated_twice(order, capsys):
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        first, heads = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), Chain()
        with opened_session(budget="1GiB", solver_seconds=0.5) if planned else contextlib.nullcontext():
            optimizer = torch.optim.SGD([*first.parameters(), *heads.parameters()], 0.1)
            for _ in range(4):
                x = torch.randn(8, 16)
                features = first(x)
                outputs = heads(features)
                optimizer.zero_grad()
                for k in order:
                    outputs[k].square().sum().backward()
                optimizer.step()
            found.append([p.detach().clone() for m in (first, heads) for p in m.parameters()])
    assert all(map(torch.equal, *found))
    said = capsys.readouterr().err
    assert "Chain" in said
    assert "Sequential" not in said


class Codes(nn.Module):
    """The second output is made with a buffer that the forward changes then, or of a tensor that is written to."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes
        self.trunk, self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = self.trunk(x)
        if self.writes:
            z = torch.zeros(len(x), 16)
            z[:, :8] = y.detach()[:, :8]
            return self.one(y), self.other(z)
        other = self.other(x - self.mean)
        self.mean.mul_(0.9).add_(x.mean(0))
        return self.one(y), other


@pytest.mark.parametrize("writes", [False, True])
def test_a_second_run_on_other_values_is_not_taken_for_the_first(writes):
    with opened_session(budget="1GiB", solver_seconds=0.5):
        model = Codes(writes)
        trunk, rest = (torch.optim.SGD(m.parameters(), 0.1) for m in (model.trunk, model.other))
        x = torch.randn(8, 16)
        one, other = model(x)
        one.sum().backward()
        if writes:
            trunk.step()
        with pytest.raises(CaptureFailed, match="changed or dropped since the forward"):
            other.square().sum().backward()
        rest.zero_grad()


@pytest.mark.parametrize("first", [0, 4])
def test_the_critic_may_take_its_step_before_the_backward_of_the_actor(first):
    """Eager's second backward does not read the critic's weights, which the one node of both has saved."""

    def losses():
        model = made("features")
        critic = torch.optim.SGD(model.critic.parameters(), 0.05)
        actor = torch.optim.SGD([*model.trunk.parameters(), *model.actor.parameters()], 0.05)
        found = []
        for step in range(7):
            action, value = model(torch.randn(256, 16))
            critic.zero_grad()
            actor.zero_grad()
            if step >= first:
                value.square().mean().backward(retain_graph=True)
                critic.step()
                action.square().mean().backward()
            else:
                (value.square().mean() + action.square().mean()).backward()
                critic.step()
            actor.step()
            found.append((action.sum().item(), value.sum().item()))
        return found

    expected = losses()
    with opened_session(budget="1.5x", solver_seconds=0.5, quiet=True) as opened:
        assert losses() == expected
        assert opened.engine.plan is not None
        assert opened.engine.breaks


def test_an_output_whose_weights_were_changed_has_torchs_own_error():
    model = made("features")
    with opened_session(budget="1.5x", solver_seconds=0.5, quiet=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        action, value = model(torch.randn(256, 16))
        value.square().mean().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            action.square().mean().backward()
