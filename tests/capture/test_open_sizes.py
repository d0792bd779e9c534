"""Sizes that vary are traced once: what is made of the trace for each of them is what would be traced for it."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import open_sizes
from monetrun.core.errors import CaptureFailed
from monetrun.core.plan import plain_schedule
from monetrun.runtime import running_plan
from monetrun.runtime.backend import Backend
from support.sessions import opened_session


class Attention(nn.Module):
    """Of a language model: rotated halves, a mask that is indexed in all ways, a slice of everything."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.norm = nn.Embedding(50, 16), nn.Linear(16, 48), nn.LayerNorm(16)
        self.head = nn.Linear(16, 50)  # without a bias, torch 2.11 looks at its sizes

    def forward(self, tokens, mask):
        x = self.norm(self.embed(tokens))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q = torch.cat((-q[..., 4:], q[..., :4]), -1)
        where = torch.arange(tokens.shape[1])
        allowed = (where[None, None, :, None] >= where[None, None, None, :]) & mask[:, None, None, :].bool()
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)
        return self.head(F.dropout(x[:, slice(0, None), :], 0.1, self.training))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        x = F.relu(self.norm(self.one(x)))
        y = F.max_pool2d(self.two(x), 3, 1, 1)
        return torch.cat((x, y), 1).mean((2, 3))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, mask):
        x = torch.tanh(self.linear(x))
        return (x @ x.transpose(1, 2))[:, None].masked_fill(mask, -1.0).softmax(-1)


def padded(length):
    """With a mask that is a view of another tensor, of which no input tells the size."""
    torch.manual_seed(length)
    return torch.randn(4, length, 16), torch.ones(4, length, length).triu(1).bool()[:, None]


def tokens(length):
    torch.manual_seed(length)
    given = torch.randint(50, (4, length))
    mask = torch.ones_like(given)
    mask[0, length // 2 :] = 0
    return given, mask


def pictures(side):
    torch.manual_seed(side)
    return (torch.randn(2, 3, side, side + 2),)


CASES = {
    "attention": (Attention, tokens, (9, 12, 17)),
    "convolutions": (Convolutions, pictures, (12, 20, 15, 16)),
    "view of a mask": (Masked, padded, (9, 12, 17)),
}


class Chooser:
    def __init__(self):
        self.graphs = []

    def choose(self, joint):
        self.graphs.append(joint.graph)
        return 0, plain_schedule(joint.graph)


def trained(module, run, inputs):
    """The results' and gradients' bits, in turn for each of the inputs."""
    found = []
    for given in inputs:
        torch.manual_seed(0)
        result = run(*given)
        result.square().sum().backward()
        found += [result.detach().clone(), *(p.grad.clone() for p in module.parameters())]
        module.zero_grad()
    return found


def unnamed(graph):
    """The graph's operators and tensors; torch numbers the names."""
    return [replace(op, name="") for op in graph.operators], [replace(t, name="") for t in graph.tensors]


@pytest.mark.parametrize("case", CASES)
def test_the_graph_of_a_size_is_the_one_that_is_traced_for_it(case):
    make, batch, sizes = CASES[case]
    module = make()
    open_ = Chooser()
    run = torch.compile(module, backend=Backend(open_, "case"), dynamic=True)
    trained(module, run, [batch(size) for size in sizes])
    assert len(open_.graphs) == len(sizes)
    for graph, size in zip(open_.graphs, sizes, strict=True):
        torch._dynamo.reset()
        fixed = Chooser()
        trained(module, torch.compile(module, backend=Backend(fixed, "case"), dynamic=False), [batch(size)])
        (expected,) = fixed.graphs
        assert unnamed(graph) == unnamed(expected)
        assert graph.fingerprint == expected.fingerprint


of_2_12 = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 traces views of other sizes anew")


@pytest.mark.parametrize(
    ("case", "budget"), [("attention", "0.8x"), pytest.param("view of a mask", "64MiB", marks=of_2_12)]
)
def test_new_sizes_train_with_eagers_bits_and_one_more_trace(monkeypatch, case, budget):
    traces = []
    call = Backend.__call__
    monkeypatch.setattr(Backend, "__call__", lambda *given: (traces.append(given), call(*given))[1])
    monkeypatch.setattr(running_plan, "_PLAIN_SHARE", 0.0)  # else smaller sizes run as they are
    make, batch, _ = CASES[case]

    def steps():
        torch.manual_seed(0)
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        losses = []
        for length in (14, 12, 17, 10, 9, 14, 17):
            loss = module(*batch(length)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, module.state_dict()

    plain, weights = steps()
    with opened_session(budget=budget, implementations="exact") as session:
        found, found_weights = steps()
        assert len(session.engine.running.schedules) == 5
    assert found == plain
    assert all(torch.equal(value, weights[name]) for name, value in found_weights.items())
    # the step that is recorded, the planned one, and one for all other lengths
    assert len(traces) == 3


def test_a_retained_graph_runs_twice_and_a_value_that_was_changed_is_an_error():
    module = Attention().eval()
    run = torch.compile(module, backend=Backend(Chooser(), "case"), dynamic=True)
    result = run(*tokens(9))
    loss = result.square().sum()
    loss.backward(retain_graph=True)
    first = module.qkv.weight.grad.clone()
    loss.backward()
    assert torch.equal(module.qkv.weight.grad, 2 * first)
    result = run(*tokens(11)).sum()
    with torch.no_grad():
        module.qkv.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


class SavesItsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.exp(x * self.weight)


def test_what_is_saved_goes_with_the_call_without_a_collection():
    run = torch.compile(SavesItsOutput(), backend=Backend(Chooser(), "case"), dynamic=True)
    run(torch.ones(5, 3)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        result = run(torch.ones(7, 3))
        gone = weakref.ref(result)
        del result
        assert gone() is None
    finally:
        gc.enable()


def test_the_size_that_was_not_used_for_longest_is_forgotten(monkeypatch):
    monkeypatch.setattr(open_sizes.OpenSizes, "most", property(lambda self: 2))
    made, planned = [], Backend._planned
    monkeypatch.setattr(Backend, "_planned", lambda self, *given: (made.append(given[0]), planned(self, *given))[1])
    run = torch.compile(SavesItsOutput(), backend=Backend(Chooser(), "case"), dynamic=True)

    def new_sizes(*lengths):
        before = len(made)
        for length in lengths:
            x = torch.arange(3.0 * length).view(length, 3) / 50
            run(x).sum().backward()
        return len(made) - before

    assert new_sizes(5, 6, 5) == 2
    assert new_sizes(7, 5, 6) == 2  # in the place of 6, and of 7
    assert new_sizes(6, 5) == 0
    kept = [weakref.ref(module) for module in made]
    made.clear()
    gc.collect()
    assert sum(module() is not None for module in kept) <= 2


@pytest.mark.nightly
def test_where_sizes_cannot_be_left_open_each_is_traced(monkeypatch):
    def refuse(*given):
        raise CaptureFailed("not these", "")

    monkeypatch.setattr(open_sizes, "with_numbers", refuse)
    batches = [tokens(length) for length in (9, 12, 17)]

    def steps():
        torch.manual_seed(0)
        module, found = Attention(), []
        optimizer = torch.optim.SGD(module.parameters(), 0.0)
        for given in batches:
            found += trained(module, module, [given])
            optimizer.step()
        return found

    plain = steps()
    with opened_session(budget="1.0x", implementations="exact") as session:
        found = steps()
        assert session.engine.plan is not None
    assert all(map(torch.equal, found, plain))
