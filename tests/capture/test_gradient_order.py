"""Parameters get their gradients in the plain backward's order, on which DistributedDataParallel's buckets depend."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from monetrun.capture import double_backward, execute, gradient_order
from monetrun.capture.in_turn import in_turn
from monetrun.core.freed import freed_after
from monetrun.core.plan import plain_schedule
from monetrun.runtime import dynamo_settings
from monetrun.runtime.backend import Backend
from monetrun.runtime.planned_calls import PlannedCall
from monetrun.runtime.terms import GradientTerms
from support.captured import Chooser, Residual, captured


class Tied(nn.Module):
    """An embedding that is also the output's weight, a bias of the input's shape, and a weight used as it is."""

    def __init__(self):
        super().__init__()
        self.embedding, self.place = nn.Embedding(31, 8), nn.Parameter(torch.randn(2, 5, 8))
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = self.embedding(x) + self.place
        x = x + self.linear(F.gelu(self.norm(x)))
        x = torch.addmm(self.bias, x.flatten(0, 1), self.weight)
        return F.linear(x, self.embedding.weight)


class Layer(nn.Module):
    """Attention whose input is used four times: by three projections, and added to the result."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + F.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x))


def arrivals(module, run, x):
    names = []
    for name, parameter in module.named_parameters():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    run(x).sum().backward()
    return names, [p.grad for p in module.parameters()]


@pytest.mark.parametrize(
    ("make", "example"),
    [(Tied, lambda: torch.randint(0, 31, (2, 5))), (lambda: Residual(4, F.relu), lambda: torch.randn(2, 4, 6, 6))],
    ids=["tied", "residual"],
)
def test_gradients_arrive_as_in_the_plain_backward(monkeypatch, make, example):
    monkeypatch.setattr(gradient_order, "communicates", lambda: True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, planned, x = make(), make(), example()
    planned.load_state_dict(plain.state_dict())
    expected, gradients = arrivals(plain, plain, x)
    given, same = arrivals(planned, torch.compile(planned, backend=Backend(Chooser(), "net")), x)
    assert given == expected
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


def stepping(module, run, x):
    def step(parameter):
        parameter.data.sub_(parameter.grad)
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in module.parameters()]
    for _ in range(2):
        run(x).square().mean().backward()
    for hook in hooks:
        hook.remove()
    return list(module.parameters())


class Products(nn.Module):
    """Weights whose gradients autograd computes before the input's, which reads the weight."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 6, 6))
        self.scale, self.table = nn.Parameter(torch.rand(2, 24, 6)), nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        x = torch.bmm(x.flatten(1, 2).flatten(1).view(2, -1, 6), self.experts) * self.scale
        return self.head((x @ self.table).tanh())


BARE = lambda: Layers(*[nn.Linear(6, 6, bias=False) for _ in range(3)])  # noqa: E731


@pytest.mark.parametrize(
    "make",
    [lambda: Residual(4, F.relu), lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), lambda: BARE(), Products],
    ids=["convolutions", "linear", "linear without bias", "products"],
)
def test_optimizers_may_step_within_the_backward(monkeypatch, make):
    monkeypatch.setattr(gradient_order, "communicates", lambda: True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, planned, x = make(), make(), torch.randn(2, 4, 6, 6)
    planned.load_state_dict(plain.state_dict())
    expected = stepping(plain, plain, x)
    found = stepping(planned, torch.compile(planned, backend=Backend(Chooser(), "net")), x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_optimizers_may_step_within_the_backward_at_any_size(monkeypatch):
    monkeypatch.setattr(gradient_order, "communicates", lambda: True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, planned = BARE(), BARE()
    planned.load_state_dict(plain.state_dict())
    run = torch.compile(planned, backend=Backend(Chooser(), "net"))
    for rows in (8, 12, 10):
        x = torch.randn(rows, 6)
        stepping(plain, plain, x)
        stepping(planned, run, x)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), planned.parameters(), strict=True))


class Layers(nn.Module):
    """Not an ``nn.Sequential``, as which torch 2.11 does not capture a whole model."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Calls(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_gradient_is_given_while_the_rest_of_the_backward_has_yet_to_run(monkeypatch):
    monkeypatch.setattr(gradient_order, "communicates", lambda: True)
    torch._dynamo.reset()
    module = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())])
    run = torch.compile(module, backend=Backend(Chooser(), "net"))
    run(torch.randn(4, 8)).sum().backward()
    done = {}
    calls = Calls()
    for name, parameter in module.named_parameters():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: done.update({name: calls.names.count("aten.mm.default")})
        )
    loss = run(torch.randn(4, 8)).sum()
    with calls:
        loss.backward()
    # of five products: the last layer's weight's comes second at the latest, then two for each layer
    assert done["4.weight"] <= 2
    assert done["4.weight"] < done["2.weight"] < done["0.weight"] == calls.names.count("aten.mm.default") == 5


def test_a_backward_that_is_asked_for_some_gradients_or_run_twice_gives_the_same(monkeypatch):
    monkeypatch.setattr(gradient_order, "communicates", lambda: True)
    torch._dynamo.reset()
    module, x = Tied(), torch.randint(0, 31, (2, 5))
    run = torch.compile(module, backend=Backend(Chooser(), "net"))
    expected = torch.autograd.grad(module(x).sum(), [*module.parameters()])
    loss = run(x).sum()
    assert all(map(torch.equal, expected, torch.autograd.grad(loss, [*module.parameters()], retain_graph=True)))
    some = {"norm.weight": module.norm.weight, "bias": module.bias}
    wanted = {name: g for (name, _), g in zip(module.named_parameters(), expected, strict=True)}
    given = dict(zip(some, torch.autograd.grad(loss, [*some.values()]), strict=True))
    assert all(torch.equal(given[name], wanted[name]) for name in some)


@torch._dynamo.config.patch(optimize_ddp=True)
def test_a_model_in_ddp_is_one_graph_and_its_gradients_are_eagers():
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    undo = contextlib.ExitStack()
    try:
        dynamo_settings.prepare_dynamo([PlannedCall.__call__.__code__], undo)
        torch.manual_seed(0)
        module = Layers(*[Layer(360) for _ in range(3)])
        x = torch.randn(2, 9, 360)
        module(x).square().mean().backward()
        expected = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        parallel = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
        backend = Backend(Chooser(), "net")
        module.compile(backend=backend)
        parallel(x).square().mean().backward()
        assert backend.captured == 1  # Dynamo would have made one for each bucket, with sums in another order
        assert all(torch.equal(g, p.grad) for g, p in zip(expected, module.parameters(), strict=True))
    finally:
        undo.close()
        assert torch._dynamo.config.optimize_ddp
        dist.destroy_process_group()


class Uses(nn.Module):
    """Uses its input and a weight several times each: by product, as a view, twice in one operator, and as it is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        y = torch.tanh(x @ self.weight) * x
        y = y + F.gelu(x.transpose(0, 1) * 3).transpose(0, 1) @ self.weight
        return (x * x + y) @ self.weight + x


def with_uses_around(part):
    """Losses of two calls of ``part`` on one tensor, which is used before, between and after them too."""
    torch.manual_seed(1)
    start = torch.randn(9, 8, requires_grad=True)
    x = torch.sin(start)
    before = x * 1.7
    first = part(x)
    between = torch.exp(x) * first
    second = part(x)
    return start, [before.sum() * 0.3, (between * second).sum(), (torch.cos(x) * second).square().mean(), x.sum() / 7]


def gradients_with_uses_around(part, weight, **keywords):
    start, losses = with_uses_around(part)
    return torch.autograd.grad(sum(losses), [start, weight], **keywords)


@pytest.fixture
def uses():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Uses()


def compiled(module, terms=None):
    return torch.compile(module, backend=Backend(Chooser(), "part", terms=terms))


def needed():
    terms = GradientTerms()
    terms.needed = True
    return terms


@pytest.mark.parametrize("communicates", [False, True])
def test_terms_of_a_tensor_that_is_used_around_a_graph_too_are_added_in_eagers_order(uses, communicates, monkeypatch):
    monkeypatch.setattr(gradient_order, "communicates", lambda: communicates)
    expected = gradients_with_uses_around(uses, uses.weight)
    in_sums = gradients_with_uses_around(compiled(uses), uses.weight)
    assert not any(map(torch.equal, expected, in_sums))  # so that this would show another order
    torch._dynamo.reset()
    in_terms = gradients_with_uses_around(compiled(uses, needed()), uses.weight)
    assert all(map(torch.equal, expected, in_terms))


def test_gradients_of_gradients_go_through_terms(uses):
    expected = gradients_with_uses_around(uses, uses.weight, create_graph=True)
    start, losses = with_uses_around(compiled(uses, needed()))
    total = sum(losses)
    double_backward.run_again([n for n in _nodes(total) if "CompiledFunctionBackward" in n.name()])
    found = torch.autograd.grad(total, [start, uses.weight], create_graph=True)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        pair = [torch.autograd.grad(g.square().sum(), uses.weight, retain_graph=True)[0] for g in (one, other)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-2)


def _nodes(root):
    seen, waiting = [], [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.append(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def test_terms_are_needed_only_where_something_else_uses_what_a_graph_uses_several_times(uses):
    terms = GradientTerms()
    run = compiled(uses, terms)
    terms.graph_captured()
    alone = torch.sin(torch.randn(9, 8, requires_grad=True))
    assert not terms.changes([run(alone).sum()])
    assert not terms.changes([run(alone).sum(), (alone.detach() * 2).sum()])
    once = nn.Parameter(torch.randn(9, 8))
    assert not terms.changes([(run(torch.sin(once)) * once).sum()])
    assert terms.changes([(run(alone) * alone).sum()])
    assert terms.needed


@pytest.mark.parametrize("kind", ["two calls", "root"])
def test_a_second_call_and_a_root_are_other_uses(uses, kind):
    terms = GradientTerms()
    run = compiled(uses, terms)
    x = torch.sin(torch.randn(9, 8, requires_grad=True))
    loss = run(x).sum()
    terms.graph_captured()
    assert terms.changes([loss, run(torch.randn(9, 8)).sum()] if kind == "two calls" else [loss, x])


class ConvolutionBackwards(TorchDispatchMode):
    """Counts the backward calls of convolutions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.convolution_backward.default
        return func(*args, **(kwargs or {}))


def test_gradients_that_are_taken_in_turn_are_freed_as_the_plan_says():
    # a convolution's weight: after its input's gradient, which is another step
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    joint = captured(nn.Sequential(*layers), torch.randn(2, 4, 6, 6, requires_grad=True))
    schedule = plain_schedule(joint.graph)
    forward, backward = execute.build(joint, schedule)
    values = dict(enumerate(node.meta["val"] for node in joint.primals))
    given = in_turn(backward, [i for i, node in reversed([*enumerate(joint.gradients)]) if node is not None], values)
    order = [i for turn in given.turns for i in turn]
    tensor = {i: joint.storage[joint.gradients[i]] for i in order}
    step = freed_after(joint.graph, schedule, [tensor[i] for i in order])

    def convolutions(t):
        targets = [joint.graph.operators[s.operator].target for s in schedule.backward[: step[t] + 1]]
        return targets.count("aten.convolution_backward.default")

    primals = [torch.randn(node.meta["val"].shape) for node in joint.primals]
    tangents = [torch.randn(node.meta["val"].shape) for node in joint.tangents]
    saved = forward(*primals)[len(joint.outputs) :]
    calls, counts = ConvolutionBackwards(), []
    with calls:
        for _ in given.run([*saved, *tangents]):
            counts.append(calls.count)
    assert counts == [convolutions(tensor[turn[-1]]) for turn in given.turns]
    assert counts == [2, 4, 6]
