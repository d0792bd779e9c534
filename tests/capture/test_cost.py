"""Costs of operators that are hard to measure."""

import pytest
import torch
from torch import fx, nn

from monetrun.capture import cost
from monetrun.capture.meter import meter_for
from support.captured import captured
from support.kernel_cases import DEVICE

NORMS = {
    "batch": nn.BatchNorm2d(8),
    "batch, plain": nn.BatchNorm2d(8, affine=False),
    "batch, without running statistics": nn.BatchNorm2d(8, track_running_stats=False),
    "batch, evaluated": nn.BatchNorm2d(8).eval(),
    "layer": nn.LayerNorm(6),
    "group": nn.GroupNorm(2, 8),
}


class Narrow(nn.Module):
    """A norm of 16 bits whose parameters have 32, as under autocast."""

    def __init__(self, norm):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = norm

    def forward(self, x):
        return torch.tanh(self.norm((x * self.scale).bfloat16()))


def measured(joint):
    return cost.measure(joint, {}, meter_for(torch.device(DEVICE)), torch.device(DEVICE))


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_a_norm_with_wider_parameters_is_captured_with_the_dtypes_that_it_gives(norm):
    joint = captured(Narrow(NORMS[norm]), torch.randn(4, 8, 5, 6).to(DEVICE))
    assert all(c.measured for c in measured(joint).values())

    class Real(fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if isinstance(result, torch.Tensor):
                assert (n.name, result.dtype) == (n.name, n.meta["val"].dtype)
            return result

    forms = [n.meta["val"] for n in joint.module.graph.find_nodes(op="placeholder")]
    inputs = [torch.ones(v.shape, dtype=v.dtype, device=DEVICE) for v in forms]
    with torch.no_grad():
        Real(joint.module).run(*inputs)


def test_a_call_that_fails_alone_is_estimated_with_its_results_as_workspace(monkeypatch):
    joint = captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8).to(DEVICE))
    warm_up = cost._warm_up

    def refuse(call, meter):
        if call.target is torch.ops.aten.tanh.default:
            raise RuntimeError("not alone")
        return warm_up(call, meter)

    monkeypatch.setattr(cost, "_warm_up", refuse)
    known = measured(joint)
    (tanh,) = (s for s, (call, _) in joint.timed.items() if call.target is torch.ops.aten.tanh.default)
    assert {s for s, c in known.items() if not c.measured} == {tanh}
    assert known[tanh].workspace_bytes == 4 * 8 * 4
    assert known[tanh].seconds > 0
