"""A run that fits: training steps are bounded, evaluation is not."""

import contextlib

import pytest
import torch
from torch import nn

from monetrun.runtime import hooks, plain_run
from monetrun.runtime.plain_run import PlainRun
from monetrun.runtime.settings import RUN, Settings


@pytest.fixture
def bounded(monkeypatch):
    """A run of two networks on a device, and whether it is bounded."""
    limits = [1000]
    monkeypatch.setattr(plain_run, "set_limit", lambda device, nbytes: limits.append(nbytes))
    run, undo = PlainRun(Settings(mode=RUN, budget_bytes=1000)), contextlib.ExitStack()
    hooks.install(run, undo)
    small, large = (nn.Sequential(nn.Linear(n, n), nn.BatchNorm1d(n), nn.Linear(n, n)) for n in (4, 64))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (small, large)]
    run.device = torch.device("cpu")
    with undo:
        yield small, large, lambda: limits[-1] is not None, optimizers


@pytest.mark.parametrize("evaluate", [nn.Module.eval, lambda net: net.train(False)], ids=["eval", "train"])
@pytest.mark.parametrize("which", [0, 1])
def test_evaluation_of_each_network_that_is_trained_is_not_bounded(bounded, which, evaluate):
    net, is_bounded = bounded[which], bounded[2]
    assert is_bounded()
    evaluate(net)
    assert not is_bounded()
    assert not any(module.training for module in net.modules())
    net.train()(torch.ones(2, net[0].in_features)).sum().backward()
    assert is_bounded()


def test_a_batch_norm_or_block_that_stays_as_it_is_and_a_teacher_are_none(bounded):
    small, _, is_bounded, _ = bounded
    small[1].eval()
    whole = nn.Sequential(small)
    whole.train()
    small.eval()
    nn.Sequential(nn.Linear(3, 3)).eval()
    assert is_bounded()
