"""The regions that a script gives to ``torch.utils.checkpoint`` are part of its plain step."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from monetrun.capture import cpu_allocator
from monetrun.core.graph import Costs
from monetrun.core.options import Options
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


def _keep_products(context, operator, *args, **kwargs):
    keep = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


KEEPS = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
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
    assert again["aten.add.Tensor"] == 0  # it comes after the last operator that the backward needs
    assert each_once(graph).forward == plain_schedule(graph).forward


@pytest.mark.skipif(cpu_allocator.unavailable_reason() is not None, reason="the counting allocator is not available")
@pytest.mark.parametrize("kind", KEEPS)
def test_the_plain_peak_is_that_of_eager_with_its_checkpoints(kind):
    """One step of eager allocates as much as the replay of the plain schedule, and far less than without regions."""
    assert cpu_allocator.install()
    x = torch.randn(512, 64)
    model = Network(KEEPS[kind], 64, 6)
    model(x).backward()  # its gradients are there
    for p in model.parameters():
        p.grad = None
    before = cpu_allocator.allocated_bytes()
    cpu_allocator.reset_peak()
    model(x).backward()
    eager = cpu_allocator.peak_bytes() - before
    for p in model.parameters():
        p.grad = None
    graph = captured(model, x).graph
    costs = Costs("none", *(tuple((0,) * len(op.implementations) for op in graph.operators) for _ in range(2)))
    plain, once = (simulate(graph, costs, of(graph)).peak_bytes for of in (plain_schedule, each_once))
    # eager's reentrant checkpoint computes its output again too, and a selective one keeps products that nobody reads
    lower = {"non-reentrant": 0.01, "reentrant": 0.06, "selective": 0.12}[kind]
    assert (1 - lower) * eager <= plain <= 1.01 * eager
    assert once > 1.1 * eager


def test_training_under_checkpoints_is_bitwise_that_of_eager():
    """Whatever the schedule, which need not run the regions again; dropout repeats its numbers."""
    x = torch.randn(64, 32)
    for kind, keep in KEEPS.items():
        for of in (plain_schedule, each_once):
            model = Network(keep)
            other = copy.deepcopy(model)
            torch._dynamo.reset()
            compiled = torch.compile(other, backend=Backend(Runs(of), kind))
            torch.manual_seed(1)
            model(x).backward()
            torch.manual_seed(1)
            compiled(x).backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


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
    plain, once = (replay(record, [of(graph)]) for of in (plain_schedule, each_once))
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
