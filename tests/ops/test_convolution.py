"""The gradient of a convolution's input as a convolution: what it costs, and whether it must be tried for exactness."""

import pytest
import torch
from torch import nn

from monetrun.capture import cost
from monetrun.capture.meter import meter_for
from support.captured import captured

CPU = torch.device("cpu")


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_bytes_are_those_of_the_kernel_that_runs_on_so_many_threads(threads):
    """On one thread ATen's own kernels compute a 1x1 convolution of a small batch; its transpose has other bytes."""
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 2, 1))
    joint = captured(net, torch.randn(4, 1, 64, 64))
    meter = meter_for(CPU)
    known = cost.measure(joint, {}, meter, CPU, rounds=0)
    costs = cost.costs_of(joint, known, "cpu")
    (found,) = [
        (op.id, k)
        for op in joint.graph.operators
        for k, implementation in enumerate(op.implementations)
        if implementation.name == "conv:apart"
    ]
    call = joint.calls[found]
    grad, weight = torch.randn(4, 2, 64, 64), torch.randn(2, 16, 1, 1)
    run = lambda: call.target(grad, weight, *call.args[2:])  # noqa: E731
    run()
    meter.reset_peak()
    before = meter.current_bytes()
    result = run()
    assert costs.workspace_bytes[found[0]][found[1]] == meter.peak_bytes() - before - result.nbytes
    signature = joint.signatures[found[0]][found[1]]
    assert (signature in joint.exactness_trials) == (threads == 1)
