"""Gradients for what a model has given, of its other outputs: eager's, though to autograd they are side by side."""

import gc

import pytest
import torch
from torch import nn

from monetrun.core.errors import CaptureFailed
from support.sessions import opened_session


class Generator(nn.Module):
    """Gives an image, two features on the way to it, and a number that does not depend on them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.style, self.drop = nn.Sequential(nn.Linear(16, 64), nn.Tanh()), nn.Identity()
        self.mid, self.net = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.SiLU())
        if dropout:
            self.drop = nn.Dropout(dropout)

    def forward(self, z):
        z = 2 * z  # what the script gives is not saved
        first = self.style(z)
        second = self.drop(self.mid(first).mul_(1.5).tanh())
        return self.net(second) + 0.1 * first, first, second, self.style(z.flip(0)).sum()


def of_features(image, first, second, _):
    return torch.autograd.grad(image.square().sum() + second.sum(), [first, second])


def of_one_and_a_parameter(image, first, second, _, parameter):
    return torch.autograd.grad([image, first], [first, parameter], [torch.ones_like(image), first.detach()])


def trained(use, steps=4, keep=True, **options):
    torch.manual_seed(0)
    model = Generator(**options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for step in range(steps):
        z = torch.randn(128, 16)
        outputs = model(z)
        if not keep:
            del z
            gc.collect()
        more = (model.style[0].weight,) if use is of_one_and_a_parameter else ()
        found += [g.clone() for g in (use(*outputs, *more) if step % 2 == 0 else ())]
        optimizer.zero_grad()
        sum(o.square().mean() for o in model(torch.randn(128, 16))).backward()
        optimizer.step()
    return found + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("use", "options"),
    [
        *((use, {"dropout": 0.3}) for use in (of_features, of_one_and_a_parameter)),
        *(pytest.param(use, {}, marks=pytest.mark.nightly) for use in (of_features, of_one_and_a_parameter)),
        pytest.param(of_features, {"keep": False}, marks=pytest.mark.nightly),
        (of_features, {"keep": False, "dropout": 0.3}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_they_are_eagers(use, options):
    plain = trained(use, **options)
    with opened_session(budget="1GiB", solver_seconds=0.5, implementations="exact") as opened:
        planned = trained(use, **options)
        assert opened.engine.running is not None
    for one, other in zip(plain, planned, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)


def path_length(image, first, *_):
    (gradient,) = torch.autograd.grad(image.sum(), first, create_graph=True)
    penalty = gradient.square().mean()
    return torch.autograd.grad(penalty, first)


def test_with_a_graph_of_their_own_they_can_be_differentiated_again():
    plain = trained(path_length)
    with opened_session(budget="1GiB", solver_seconds=0.5, implementations="exact"):
        planned = trained(path_length)
    for one, other in zip(plain, planned, strict=True):
        torch.testing.assert_close(other, one)


def test_what_nothing_depends_on_is_torchs_own_error_and_a_dropped_input_is_said():
    with opened_session(budget="1GiB", solver_seconds=0.5):
        trained(of_features, steps=2)
        model = Generator(dropout=0.3)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(3):
            model(torch.randn(8, 16))[0].sum().backward()
            optimizer.step()
        _, first, _, other = model(z := torch.randn(8, 16))
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(other, first, retain_graph=True)
        assert torch.autograd.grad(other, first, retain_graph=True, allow_unused=True) == (None,)
        (zeros,) = torch.autograd.grad(other, first, materialize_grads=True)
        assert not zeros.any()
        image, _, second, _ = model(z)
        del z
        gc.collect()
        with pytest.raises(CaptureFailed, match="an input of the model is gone"):
            torch.autograd.grad(image.sum(), second)  # the image depends on the first feature, too, which is not given


class Watched:
    """Trains a model of which a later use watches the gradient of an output."""

    def __init__(self, use, since):
        self.use, self.since, self.seen = use, since, []

    def watch(self, first):
        if self.use == "retained":
            first.retain_grad()
        elif self.use == "changed":
            first.register_hook(lambda g: 0.1 * g)
        else:
            handle = first.register_hook(lambda g: self.seen.append("removed"))
            first.register_hook(lambda g: self.seen.append(g.norm().item()))
            handle.remove()

    def train(self):
        torch.manual_seed(0)
        model = Generator()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(5):
            image, first, _, _ = model(z := torch.randn(128, 16))
            if step >= self.since:
                self.watch(first)
            loss = image.square().mean() + 0.1 * first.abs().mean() + 0 * z.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.seen += [loss.item(), None if not first.retains_grad else first.grad.norm().item()]
        return self.seen, [p.tolist() for p in model.parameters()]


def test_a_hook_of_fsdps_own_on_an_output_is_no_watch_of_its_gradient(capsys):
    """It gets the module's parameters before the backward, whatever the gradient is."""

    class OfTorch(Watched):
        def watch(self, first):
            def before_backward(gradient):
                return gradient

            before_backward.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
            first.register_hook(before_backward)

    plain = OfTorch("torch's", 0).train()
    with opened_session(budget="1GiB", solver_seconds=0.5, implementations="exact") as opened:
        assert OfTorch("torch's", 0).train() == plain
        assert opened.engine is not None
    assert "watches the gradient of an output" not in capsys.readouterr().err


@pytest.mark.parametrize("use", ["retained", "changed", "seen"])
@pytest.mark.parametrize("since", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_hooks_of_an_output_see_all_of_its_gradient(use, since, capsys):
    plain = Watched(use, since).train()
    with opened_session(budget="1GiB", solver_seconds=0.5, implementations="exact"):
        planned = Watched(use, since).train()
    assert planned == plain
    said = [line for line in capsys.readouterr().err.splitlines() if "watches the gradient of an output" in line]
    assert len(said) == 1
