"""Gradients of outputs that arrive with other strides than the outputs have, or not at all: trained under a plan."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from monetrun.capture import cpu_allocator
from monetrun.capture.lowering import lower
from monetrun.capture.open_strides import open_nodes, with_the_same_strides
from monetrun.ops import registry
from support import random_models
from support.captured import captured
from support.sessions import opened_session

aten = torch.ops.aten

HOW = random_models.Script(3, (8,), 1, False, (3,), (1,), "SGD", True, False, False, False)


@pytest.fixture(autouse=True)
def _counted():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(random_models.VOCABULARY, 16)
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)


class SecondOperand(Tokens):
    """A sum and products whose second operand is of the layout that was traced, and the first one is not."""

    def forward(self, tokens):
        x = F.silu(self.linear(self.token(tokens)))
        y = F.normalize(x, dim=-1) + self.linear(x)
        return y.abs().mean(), y.transpose(1, 2)


class PackedMask(Tokens):
    """What the forward keeps of a dropout is in the order of its own storage."""

    def forward(self, tokens):
        x = F.dropout(torch.tanh(self.linear(self.token(tokens))), 0.2, self.training)
        return x.square().mean(), x.transpose(1, 2)


class OutputFirst(Tokens):
    """Autograd adds what the graph computes to the output's gradient, which arrives first."""

    def forward(self, tokens):
        x = F.silu(self.linear(self.token(tokens)))
        return x.mean((1, 2)), x.transpose(1, 2), x[:, 1:3]


class ViewsBehind(Tokens):
    """The gradient has no view of the shape in which the weights' gradients are computed."""

    def forward(self, tokens):
        x = self.linear(self.norm(self.token(tokens).transpose(1, 2)).transpose(1, 2))
        return x.transpose(1, 2), F.layer_norm(x, (16,))


class Recurrent(Tokens):
    """It runs in Python, and gives its input a transposed gradient."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Dropout(0.2))
        self.recurrent = nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens):
        x = self.inner(self.token(tokens))
        return (self.recurrent(x)[0].mean((1, 2)), self.inner(x))


class Unused(Tokens):
    """Zeros in place of an absent gradient would come first in sums, and with strides of their own."""

    def forward(self, tokens):
        x = self.norm(self.token(tokens).transpose(1, 2)).transpose(1, 2)
        y = x.clone()
        y[:, ::2] *= 0.5
        z = self.norm(F.silu(y).transpose(1, 2)).transpose(1, 2)
        return z.mean((1, 2)), z[:, 1:3], torch.tanh(self.linear(x)).sum(-1)


@pytest.mark.parametrize("budget", [pytest.param("2x", marks=pytest.mark.nightly), "0.8x"])
@pytest.mark.parametrize(
    ("model", "used"),
    [
        (SecondOperand, (2,)),
        (PackedMask, (2,)),
        (OutputFirst, (2, 1)),
        (ViewsBehind, (2,)),
        (Recurrent, (1,)),
        (Unused, (3, 1, 2)),
    ],
)
def test_training_is_that_of_eager(model, used, budget):
    how = replace(HOW, used_outputs=used)
    found, session = random_models.train_within(budget if model is not Recurrent else "2x", model, how)
    assert session.engine.plan is not None
    assert not random_models.differences(random_models.train(model, how), found)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        x = torch.tanh(self.linear(x) + x * torch.sigmoid(x))
        return torch.tanh(x) * torch.sigmoid(x)


def test_a_convolution_of_a_gradient_gives_the_strides_of_the_operator_whose_place_it_takes():
    gradient, x, weight = torch.randn(2, 6, 4, 5), torch.randn(2, 8, 4, 5), torch.randn(6, 8, 1, 1)
    graph = fx.Graph()
    tangent, given = graph.placeholder("tangents_1"), graph.placeholder("primals_1")
    tangent.meta["val"], given.meta["val"] = gradient, weight
    arguments = (None, [1, 1], [0, 0], [1, 1])
    backward = (gradient, x, weight, *arguments, False, [0, 0], 1, [True, False, False])
    apart = graph.call_function(aten.convolution.default, (tangent, given, *arguments, True, [0, 0], 1))
    apart.meta["val"] = x
    graph.output(apart)
    lower(graph)
    run = fx.Interpreter(fx.GraphModule({}, graph)).run
    for arrives in (gradient, gradient.to(memory_format=torch.channels_last)):
        expected = aten.convolution_backward.default(arrives, *backward[1:])[0]
        found = run(arrives, weight)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_strides_are_open_up_to_a_matrix_product():
    torch.manual_seed(0)
    module = captured(Sums(), torch.randn(4, 6, 8)).module
    open_ = open_nodes(module.graph)
    products = [n for n in module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default) if n in open_]
    assert products
    assert not any(open_[node] for node in products)
    offered = registry.alternatives(module)
    kept = with_the_same_strides(module, offered)
    sums = [n for n in offered if n.target is torch.ops.aten.add.Tensor and n.meta["val"].dim() > 1]
    second = [n for n in sums if open_.get(n.args[0])]
    assert any(a.overwrites is n.args[1] for n in second for a in offered[n])
    assert not any(a.overwrites is n.args[1] for n in second for a in kept[n])
    assert any(a.overwrites is n.args[0] for n in second for a in kept[n])


@torch.library.custom_op("monetrun_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("monetrun_tests::twice_backward", mutates_args=())
def twice_backward(gradient: torch.Tensor) -> torch.Tensor:
    """As a kernel that takes the address of a contiguous tensor."""
    return gradient.as_strided(gradient.shape, (gradient.shape[1], 1)) * 2


twice.register_fake(torch.empty_like)
twice_backward.register_fake(lambda gradient: gradient.new_empty(gradient.shape))
twice.register_autograd(lambda context, gradient: twice_backward(gradient.contiguous()))


class OfALibrary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.ops.monetrun_tests.twice(self.linear(x))


def test_an_operator_of_a_library_gets_the_strides_that_its_formula_made():
    """The formula's ``contiguous()`` is not in a graph whose gradients are traced contiguous."""

    def train():
        torch.manual_seed(0)
        model = OfALibrary()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        gradients = []
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.randn(8, 8)).t() * torch.arange(64.0).view(8, 8)).sum().backward()
            gradients.append(model.linear.weight.grad.clone())
            optimizer.step()
        return torch.stack(gradients)

    plain = train()
    with opened_session(budget="2x", solver_seconds=0.5):
        assert torch.equal(train(), plain)
