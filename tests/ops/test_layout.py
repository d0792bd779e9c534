"""Convolutions computed in the other memory format."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from monetrun.capture import roofline
from monetrun.core.graph import KINDS
from monetrun.ops import registry
from monetrun.ops.families import cudnn_convolution as _cudnn_convolution  # noqa: F401  (defines the operators)
from monetrun.ops.families import layout
from monetrun.ops.memory_format import memory_format
from support.captured import captured
from support.convolutions import CONVOLUTIONS, assert_within_rounding, operands
from support.kernel_cases import DEVICE

aten = torch.ops.aten
monet = torch.ops.monet

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_the_other_format_gives_what_the_operator_gives(case, last, dtype):
    x, weight, grad, window = operands(case, dtype, last)
    channels = grad.shape[1]
    bias = torch.linspace(-1, 1, channels).to(x)
    form = memory_format(x.dim(), last)
    wide = [t.double() for t in (x, weight, grad, bias)]
    assert_within_rounding(
        monet.convolution_by(x, weight, bias, *window, not last),
        aten.convolution(x, weight, bias, *window),
        aten.convolution(wide[0], wide[1], wide[3], *window),
        form,
    )
    arguments = [channels], *window, [False, True, True]
    absent, *given = monet.convolution_weight_backward_by(grad, x, weight, *arguments, not last)
    assert absent is None
    expected = aten.convolution_backward(grad, x, weight, *arguments)[1:]
    exact = aten.convolution_backward(wide[2], wide[0], wide[1], *arguments)[1:]
    assert_within_rounding(given[0], expected[0], exact[0], form)
    assert_within_rounding(given[1], expected[1], exact[1], torch.contiguous_format)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_opcheck(case, last):
    x, weight, grad, window = operands(case, torch.float32, last)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    bias = x.new_zeros((grad.shape[1],))
    calls = [(monet.convolution_by.default, (x, weight, b, *window, not last)) for b in (None, bias)]
    for mask in ([False, True, True], [False, True, False]):
        arguments = (grad, x, weight, [grad.shape[1]], *window, mask, not last)
        calls.append((monet.convolution_weight_backward_by.default, arguments))
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=checks)


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.one = nn.Conv2d(4, 6, 3, bias=True, dtype=dtype)
        self.two = nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False, dtype=dtype)

    def forward(self, x):
        return torch.sin(self.two(F.relu(self.one(torch.sin(x)))))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_it_is_offered_for_every_pass_where_kernels_of_both_formats_exist(last, monkeypatch):
    monkeypatch.setattr(layout, "OFFERED_ON", (DEVICE,))

    def offered(dtype):
        form = memory_format(4, last)
        x = torch.randn(2, 4, 8, 8, dtype=dtype).to(DEVICE).contiguous(memory_format=form).requires_grad_()
        joint = captured(Net(dtype).to(memory_format=form), x)
        return joint, [
            (joint.nodes[i].target, impl.exact, joint.calls[i, k].target)
            for i, op in enumerate(joint.graph.operators)
            for k, impl in enumerate(op.implementations)
            if impl.name == "layout"
        ]

    joint, found = offered(torch.float32)
    forward = (aten.convolution.default, False, monet.convolution_by.default)
    into = (aten.convolution_backward.default, False, monet.convolution_by.default)
    weight = (aten.convolution_backward.default, False, monet.convolution_weight_backward_by.default)
    assert sorted(map(str, found)) == sorted(map(str, [forward] * 2 + [into] * 2 + [weight] * 2))
    assert "layout" in KINDS
    assert all(not i.allowed_by(("exact",)) for op in joint.graph.operators for i in op.implementations if not i.exact)
    assert offered(torch.float64)[1] == []


def test_it_is_offered_on_gpus_only():
    def offered(device):
        graph = torch.fx.Graph()
        with FakeTensorMode():
            x, weight = torch.empty(2, 4, 8, 8, device=device), torch.empty(6, 4, 3, 3, device=device)
            nodes = [graph.placeholder(name) for name in ("x", "weight")]
            arguments = (*nodes, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
            node = graph.call_function(aten.convolution.default, arguments)
            nodes[0].meta["val"], nodes[1].meta["val"] = x, weight
            node.meta["val"] = torch.empty(2, 6, 6, 6, device=device)
        graph.output(node)
        found = registry.alternatives(torch.fx.GraphModule(nn.Module(), graph))
        return [a.name for a in found.get(node, ())]

    assert "layout" not in offered("cpu")
    assert "layout" in offered("cuda")


@pytest.mark.parametrize("case", ["2d", "transposed"])
def test_without_measurements_it_costs_what_the_operator_costs(case):
    x, weight, grad, window = operands(case, torch.float32, False)
    forward = x, weight, None, *window
    backward = grad, x, weight, [grad.shape[1]], *window, [False, True, False]

    model = dataclasses.replace(roofline.DEVICES["p100"], launch_seconds=0.0, bytes_per_second=1e30)

    def seconds(operator, *arguments):
        return roofline.estimate(operator, arguments, {}, operator(*arguments), model)

    expected = seconds(aten.convolution.default, *forward)
    assert seconds(monet.convolution_by.default, *forward, True) == expected
    assert seconds(monet.cudnn_convolution.default, *forward, False, "eng0") == expected
    expected = seconds(aten.convolution_backward.default, *backward)
    assert seconds(monet.convolution_weight_backward_by.default, *backward, True) == expected
    assert seconds(monet.cudnn_convolution_weight_backward.default, *backward, False, "eng0") == expected
