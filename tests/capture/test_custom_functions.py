"""A script's own ``autograd.Function``s in a captured graph."""

import gc

import pytest
import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.runtime.backend import Backend
from support.captured import Chooser


class KeepsItsWeight(torch.autograd.Function):
    """A linear layer that keeps its weight without ``save_for_backward``, as quantized layers of libraries do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4)])

    def forward(self, x):
        for weight in self.weights:
            x = KeepsItsWeight.apply(x, weight).tanh()
        return x


def test_activations_are_freed_in_the_backward_also_where_a_function_keeps_its_weight():
    if not cpu_allocator.install():
        pytest.skip(cpu_allocator.unavailable_reason())
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    run, x = torch.compile(net, backend=Backend(Chooser(), "net")), torch.randn(4096, 64)
    run(x).square().mean().backward()
    gradients = [p.grad for p in net.parameters()]
    net.zero_grad()
    gc.collect()
    before = cpu_allocator.allocated_bytes()
    loss = run(x).square().mean()
    loss.backward()
    gc.collect()
    kept = cpu_allocator.allocated_bytes() - before
    assert kept < x.nbytes  # gradients and the loss, no activation
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))
