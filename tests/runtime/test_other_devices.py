"""Models on devices that are neither CPUs nor CUDA devices of NVIDIA: one warning, and they train as they are."""

import pytest
import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core.errors import MonetrunError
from monetrun.runtime import candidates
from monetrun.runtime.allocation_limit import set_limit
from support.sessions import opened_session

MIB = 1 << 20


class Elsewhere(nn.Parameter):
    """A parameter that says that it is on another device; it computes on the CPU."""

    kind = "xpu"

    @property
    def device(self):
        return torch.device(self.kind)


def trained(kind, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    if kind:
        for layer in (model[0], model[2]):
            layer.weight = type(kind, (Elsewhere,), {"kind": kind})(layer.weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu", "privateuseone"])
def test_a_model_on_another_accelerator_runs_as_it_is_with_one_warning(kind, capsys):
    plain = trained("")
    with opened_session(budget="1KiB") as session:  # within which nothing could be planned
        assert trained(kind) == plain
        assert session.engine is None
    said = capsys.readouterr().err
    assert said.count("runs without a plan") == said.count("warning") == 1
    assert f"it is on {kind}, and monetrun plans for CPUs and CUDA devices only" in said


def test_strict_refuses_another_accelerator():
    with opened_session(budget="0.5x", strict=True), pytest.raises(MonetrunError, match="it is on xpu"):
        trained("xpu")


def test_nothing_is_planned_on_rocm(monkeypatch, capsys):
    """There, CUDA devices are AMD's, whose memory NVML and NVIDIA's driver do not know: ``auto`` would be refused."""
    plain = trained("")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(candidates, "other_allocator", lambda device: "")
    with opened_session(budget="auto") as session:
        assert trained("cuda") == plain
        assert session.engine is None
    said = capsys.readouterr().err
    assert said.count("nothing is planned on ROCm yet") == said.count("warning") == 1


def test_a_model_on_meta_is_of_no_other_kind():
    with torch.device("meta"):
        assert candidates.of_another_kind(nn.Linear(4, 4)) == ""


def test_a_limit_on_another_device_is_none_on_the_cpu():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    set_limit(torch.device("xpu"), 1)
    try:
        assert torch.empty(MIB).numel() == MIB
    finally:
        set_limit(torch.device("cpu"), None)


def test_another_accelerators_parameters_do_not_decide_where_the_others_are_planned():
    with torch.device("meta"):
        here = nn.Parameter(torch.empty(2))
    assert candidates.device_of_parameters([Elsewhere(torch.empty(2))]).type == "cpu"
    assert candidates.device_of_parameters([Elsewhere(torch.empty(2)), here]).type == "meta"
