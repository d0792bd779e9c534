"""The regions that a script gives to ``torch.utils.checkpoint`` are part of its plain step."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from monetrun.capture import cost, cpu_allocator
from monetrun.capture.meter import meter_for
from monetrun.core.graph import Costs
from monetrun.core.options import Options
from monetrun.core.plain_step import plain_step, plain_timeline
from monetrun.core.plan import each_once, plain_schedule
from monetrun.core.simulate import judge, simulate
from monetrun.core.step import replay
from monetrun.planning import planner
from monetrun.runtime.backend import Backend
from support.captured import captured
from support.step_records import graph_record


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.two(torch.relu(self.one(self.norm(x)))))


class Network(nn.Module):
    """Blocks behind a first layer, each under ``keep``, which calls it."""

    def __init__(self, keep, width=32, depth=3):
        super().__init__()
        self.first, self.blocks = nn.Linear(width, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.keep = keep

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.keep(block, x)
        return x.square().mean()


class Nested(Network):
    """Half of the blocks in a region, and each in one of its own."""

    def forward(self, x):
        def run(blocks, x):
            for block in blocks:
                x = self.keep(block, x)
            return x

        x, half = self.first(x), len(self.blocks) // 2
        for blocks in (self.blocks[:half], self.blocks[half:]):
            x = checkpoint(run, blocks, x, use_reentrant=False)
        return x.square().mean()


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.drop = nn.GroupNorm(4, channels), nn.Dropout(0.1)

    def forward(self, x):
        return torch.relu(x + self.drop(self.norm(self.two(torch.relu(self.one(x))))))


class ConvNetwork(nn.Module):
    """Results of regions, which end with what their backward reads, are read again after the last of them."""

    def __init__(self, keep, depth=2):
        super().__init__()
        self.first, self.blocks = nn.Conv2d(8, 8, 3), nn.ModuleList(ConvBlock(8) for _ in range(depth))
        self.keep = keep

    def forward(self, x):
        x, found = self.first(x), []
        for block in self.blocks:
            x = self.keep(block, x)
            found.append(x)
        for y in reversed(found):
            x = torch.sigmoid(x) * y
        return x.mean()


def _keep_products(context, operator, *args, **kwargs):
    keep = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


KEEPS = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "as a whole": partial(checkpoint, use_reentrant=False, early_stop=False, determinism_check="none"),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, _keep_products),
    ),
}


def runs_again(graph):
    steps = plain_schedule(graph).backward
    return Counter(graph.operators[s.operator].target for s in steps if s.operator < graph.forward_count)


@pytest.mark.parametrize("kind", KEEPS)
def test_the_plain_step_runs_checkpoint_regions_again(kind):
    graph = captured(Network(KEEPS[kind]), torch.randn(64, 32)).graph
    judge(graph, plain_schedule(graph))
    assert {op.checkpoint for op in graph.operators} == {None, 0, 1, 2}
    again = runs_again(graph)
    assert again["aten.addmm.default"] == (0 if kind == "selective" else 6)
    assert again["aten.relu.default"] == 3
    # it comes after the last operator that the backward needs
    assert again["aten.add.Tensor"] == (3 if kind in ("reentrant", "as a whole") else 0)
    assert each_once(graph).forward == plain_schedule(graph).forward


def gradients(model, run, x):
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(1)
    run(x).backward()
    return [p.grad for p in model.parameters()]


NETWORKS = {
    "blocks": (lambda keep: Network(keep, 64, 3), (512, 64)),
    "nested": (lambda keep: Nested(keep, 64, 4), (512, 64)),
    "convolutions": (ConvNetwork, (16, 8, 34, 34)),
}


PAIRS = [(network, kind) for network in NETWORKS for kind in KEEPS if network == "blocks" or kind.endswith("reentrant")]
PAIRS.append(("convolutions", "selective"))
MORE = {("blocks", "as a whole"), ("nested", "non-reentrant"), ("convolutions", "non-reentrant")}


@pytest.mark.skipif(cpu_allocator.unavailable_reason() is not None, reason="the counting allocator is not available")
@pytest.mark.parametrize(("network", "kind"), PAIRS)
def test_the_plain_peak_is_that_of_eager_with_its_checkpoints(network, kind):
    """One step of eager allocates as much as the replay of the plain step."""
    assert cpu_allocator.install()
    make, shape = NETWORKS[network]
    model, x = make(KEEPS[kind]), torch.randn(shape)
    gradients(model, model, x)  # what is allocated once is there
    for p in model.parameters():
        p.grad = None
    before = cpu_allocator.allocated_bytes()
    cpu_allocator.reset_peak()
    model(x).backward()
    eager = cpu_allocator.peak_bytes() - before
    for p in model.parameters():
        p.grad = None
    joint = captured(model, x)
    costs = cost.costs_of(joint, cost.measure(joint, {}, meter_for(x.device), x.device), "cpu")
    assert plain_timeline(joint.graph, costs).peak_bytes == pytest.approx(eager, rel=0.002)
    assert simulate(joint.graph, costs, each_once(joint.graph)).peak_bytes > 1.02 * eager


@pytest.mark.parametrize(
    ("network", "kind"), [pytest.param(*pair, marks=pytest.mark.nightly if pair in MORE else ()) for pair in PAIRS]
)
def test_training_under_checkpoints_is_bitwise_that_of_eager(network, kind):
    """Whatever the schedule, which need not run the regions again; dropout repeats its numbers.

    A reentrant region's results that others read too get gradients from both sides, which eager adds up separately.
    """
    make, shape = NETWORKS[network]
    model, x = make(KEEPS[kind]), torch.randn(shape)[:2]
    expected = gradients(model, model, x)
    for of in (plain_schedule, each_once):
        torch._dynamo.reset()
        other = copy.deepcopy(model)
        found = gradients(other, torch.compile(other, backend=Backend(Runs(of), kind), fullgraph=True), x)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


class Runs:
    """Chooses the schedule ``of`` each graph."""

    def __init__(self, of):
        self.of = of

    def choose(self, joint):
        return 0, self.of(joint.graph)


def test_overhead_and_shares_are_of_the_plain_step_with_its_checkpoints():
    graph = captured(Network(KEEPS["non-reentrant"], 64, 6), torch.randn(512, 64)).graph
    costs = Costs("none", *(tuple((n,) * len(op.implementations) for op in graph.operators) for n in (1, 0)))
    record = graph_record(graph, costs)
    base = planner.baseline(record)
    plain, once = replay(*plain_step(record)), replay(record, [each_once(graph)])
    assert base.plain.peak_bytes == plain.peak_bytes < once.peak_bytes
    assert base.plain.seconds == plain.seconds > once.seconds

    roomy = planner.plan_step(record, once.peak_bytes, "greedy", Options(seconds=1.0), base)
    assert roomy.overhead == once.seconds / plain.seconds - 1 < 0  # nothing runs again
    assert roomy.plain_peak_bytes == plain.peak_bytes
    same = planner.plan_step(record, plain.peak_bytes, "greedy", Options(seconds=1.0), base)
    assert same.planned_peak_bytes <= plain.peak_bytes
    assert same.bound <= same.overhead < 0  # faster than the script's own choice, at its peak


def test_a_reentrant_checkpoint_whose_arguments_need_no_gradient_is_not_captured():
    """In eager its parameters get no gradients; in a captured graph they would."""

    def compiled(module):
        torch._dynamo.reset()
        return torch.compile(module, backend=Backend(Runs(plain_schedule), "case"), fullgraph=True)

    block, x = Block(32), torch.randn(64, 32)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="reentrant checkpoint, of which no argument"):
        compiled(lambda x: KEEPS["reentrant"](block, x).sum() + block.one.weight.sum())(x)
    for kind, y in (("reentrant", x.clone().requires_grad_()), ("non-reentrant", x)):
        block.zero_grad()
        compiled(lambda x, kind=kind: KEEPS[kind](block, x).sum())(y).backward()
        assert all(p.grad is not None for p in block.parameters())


def test_a_checkpointed_batch_norm_is_not_captured():
    """In eager its statistics are updated again where the region runs again; in a captured graph they would not be."""
    norm, x = nn.BatchNorm1d(32), torch.randn(64, 32, requires_grad=True)
    for keep in (KEEPS["non-reentrant"], KEEPS["reentrant"]):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, keep=keep: keep(norm, x).sum(), backend=Backend(Runs(each_once), "case"))
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="updates its buffers again"):
            compiled(x)
    torch._dynamo.reset()
    norm.eval()
    torch.compile(lambda x: KEEPS["reentrant"](norm, x).sum(), backend=Backend(Runs(each_once), "case"))(x).backward()


class Statistics(nn.Module):
    """Updates a buffer, in one of the ways in which scripts do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("var", torch.ones(32))

    def forward(self, x):
        if self.how == "functional":
            return torch.relu(F.batch_norm(x, self.mean, self.var, training=True))
        if self.how == "data":
            self.mean.data.lerp_(x.detach().mean(0), 0.1)
        if self.how == "part":
            self.mean[:4] = x.detach().mean(0)[:4]
        return torch.relu(x * 2)


@pytest.mark.parametrize("how", ["functional", "data", "part"])
def test_other_updates_of_buffers_under_checkpoints_are_not_captured_either(how):
    module, x = Statistics(how), torch.randn(64, 32, requires_grad=True)
    torch._dynamo.reset()
    keep = KEEPS["non-reentrant"]
    compiled = torch.compile(lambda x: keep(module, x).sum(), backend=Backend(Runs(each_once), "case"))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="updates its buffers again"):
        compiled(x)
    torch._dynamo.reset()


def test_a_checkpoint_that_draws_other_numbers_when_it_runs_again_is_not_captured():
    """In eager the gradients are of other noise than the loss; without noise there is no difference."""
    keep, x = partial(checkpoint, use_reentrant=False, preserve_rng_state=False), torch.randn(64, 32)
    model = Network(keep)

    def compiled():
        torch._dynamo.reset()
        return torch.compile(model, backend=Backend(Runs(plain_schedule), "case"), fullgraph=True)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="preserve_rng_state=False draws other numbers"):
        compiled()(x)
    for block in model.blocks:
        block.drop.p = 0.0
    expected = gradients(model, model, x)
    assert all(torch.equal(*pair) for pair in zip(expected, gradients(model, compiled(), x), strict=True))
