"""Under autocast a captured graph casts a weight as often as eager does."""

import contextlib

import pytest
import torch
import torch._dynamo  # before what it imports itself
import torch.nn.functional as F
from torch import nn

from monetrun.runtime.backend import Backend
from support.captured import Chooser


class SharedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


class CastByTheScript(SharedLinear):
    """What the script casts is cast each time."""

    def forward(self, x):
        for _ in range(3):
            x = F.silu(x.bfloat16() @ self.linear.weight.to(torch.bfloat16) + self.linear(x))
        return x


class UsedInBothPrecisions(SharedLinear):
    def forward(self, x):
        x = self.linear(x) + self.linear.weight.square().mean()
        return self.linear(torch.tanh(x)) * self.linear.weight.sum() + self.linear(x)


class RegionsOfItsOwn(SharedLinear):
    """The cache is emptied where the outermost autocast ends."""

    def forward(self, x):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.linear(torch.tanh(self.linear(x)))
            x = x.float() + self.linear(x.float())
        return x


class RegionWithoutCache(SharedLinear):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return super().forward(x)


class SharedActivation(nn.Module):
    """An input that is no leaf is cast for each use."""

    def forward(self, x):
        return x @ x.flip(1) + torch.tanh(x @ x.roll(1, 0)) @ x


def _autocast(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


@pytest.mark.parametrize(
    ("module", "around"),
    [
        (SharedLinear, _autocast),
        (SharedLinear, lambda: _autocast(cache_enabled=False)),
        (CastByTheScript, _autocast),
        (UsedInBothPrecisions, _autocast),
        (RegionsOfItsOwn, contextlib.nullcontext),
        (RegionsOfItsOwn, _autocast),
        (RegionWithoutCache, contextlib.nullcontext),
        (SharedActivation, _autocast),
    ],
)
@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_are_added_in_the_precision_of_eager(module, around, leaf):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, given = module(), torch.randn(16, 16, requires_grad=True)

    def gradients(run):
        x = given if leaf else given * 1
        with around():
            result = run(x)
        return torch.autograd.grad(result.float().square().mean(), [given, *model.parameters()])

    expected = gradients(model)
    assert all(map(torch.equal, expected, gradients(torch.compile(model, backend=Backend(Chooser(), "net")))))
