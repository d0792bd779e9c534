"""A run that fits: training steps are bounded, evaluation is not."""

import contextlib

import pytest
import torch
from torch import nn

from monetrun.capture.peaks import Peaks
from monetrun.runtime import hooks, plain_run
from monetrun.runtime.plain_run import PlainRun
from monetrun.runtime.settings import MEASURE, RUN, Settings


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


def test_evaluation_that_differentiates_is_not_bounded_and_training_in_evaluation_mode_is(bounded, monkeypatch):
    net, large, is_bounded, optimizers = bounded
    optimizer = optimizers[0]
    monkeypatch.setattr(hooks, "optimizers", lambda: optimizers)  # other tests may have left some
    both = nn.ModuleList([net, large])
    both.eval()
    for _ in range(2):
        x = torch.ones(2, 4, requires_grad=True)
        torch.autograd.grad(net(x).sum(), x)  # forces
        assert not is_bounded()
    net(torch.ones(2, 4)).sum().backward()
    assert not is_bounded()
    optimizer.step()
    assert is_bounded()
    net.eval()  # as for frozen statistics: a part of what is trained
    net(torch.ones(2, 4)).sum().backward()
    assert is_bounded()


def test_a_batch_norm_or_block_that_stays_as_it_is_and_a_teacher_are_none(bounded):
    small, _, is_bounded, _ = bounded
    small[1].eval()
    whole = nn.Sequential(small)
    whole.train()
    small.eval()
    nn.Sequential(nn.Linear(3, 3)).eval()
    assert is_bounded()


def test_what_a_wrapper_trains_is_evaluated_by_itself(bounded):
    small, _, is_bounded, _ = bounded
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = small
    wrapper.train()  # as transformers' Trainer does, in each step
    small.eval()
    assert not is_bounded()


class Meter:
    """What a trial reads of a device."""

    def __init__(self):
        self.peak = self.cached = 0

    def current_bytes(self):
        return 100

    def reset_peak(self):
        self.peak = 100

    def peaks(self):
        return Peaks(self.peak, self.peak, 100 + self.cached)


def test_a_trial_does_not_count_what_an_evaluation_takes(tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(plain_run, "large_blocks", lambda device: ())
    run, undo = PlainRun(Settings(mode=MEASURE, record_file=str(tmp_path / "record"))), contextlib.ExitStack()
    hooks.install(run, undo)
    with undo:
        net = nn.Sequential(nn.Linear(4, 4))
        net.eval()  # before there is an optimizer
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run.device, run._meter = torch.device("cpu"), Meter()
        for evaluated in (5000, 3000):
            run._meter.peak, run._meter.cached = evaluated, 80
            net.train()(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            run._meter.peak = 400  # of the step
            assert run._most_in_training()[0] == 400
            net.eval()
        assert emptied == [1, 1]
