"""Torch's partitioner as a schedule: it is what torch runs, and the comparison is fair."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config, partitioners

import bench_partitioner as recipe
from lib import offline
from lib.partitioner import partition
from monetrun.capture import cpu_allocator, execute
from monetrun.core.graph import FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate

BATCH, WIDTH = 512, 64


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Layers whose cheap operators have large results; the loss is its mean."""

    def __init__(self, dropout=0.0, layers=4):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        for linear in self.linear:
            x = self.dropout(torch.sin(torch.exp(torch.tanh(linear(x)))))
        return x.square().mean()


def captured(**options):
    with offline.fake_tensors():
        joint = offline.capture(Net(**options), (torch.empty(BATCH, WIDTH),))
    return joint, offline.costs(joint, "roofline:p100")


def measured(budget):
    """Bytes that torch's own two modules allocate in a step, by the allocator."""

    def split(module, inputs, **options):
        with config.patch(activation_memory_budget=budget):
            return partitioners.min_cut_rematerialization_partition(module, inputs, **options)

    def compiled(module, inputs):
        return execute.boxed(module)

    backend = aot_autograd(
        fw_compiler=compiled, bw_compiler=compiled, partition_fn=split, keep_inference_input_mutations=True
    )
    torch._dynamo.reset()
    model, x = Net(), torch.ones(BATCH, WIDTH)
    step = torch.compile(model, backend=backend, dynamic=False)
    step(x).backward()
    model.zero_grad()
    before = cpu_allocator.allocated_bytes()
    cpu_allocator.reset_peak()
    step(x).backward()
    return cpu_allocator.peak_bytes() - before


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.05])
def test_the_peak_equals_that_of_torchs_modules_when_they_run(budget):
    if reason := cpu_allocator.unavailable_reason():
        pytest.skip(reason)
    assert cpu_allocator.install()
    joint, costs = captured()
    made = partition(joint, costs, budget)
    predicted = simulate(made.graph, made.costs, made.schedule).peak_bytes
    assert predicted == pytest.approx(measured(budget), abs=64)  # scalars that the allocator rounds, or autograd makes


def test_with_a_budget_of_zero_everything_that_backward_reads_is_recomputed():
    joint, costs = captured()
    made = partition(joint, costs, 0.0)
    operators = made.graph.operators
    again = [operators[s.operator].target for s in made.schedule.backward if operators[s.operator].phase == FORWARD]
    # the backward of each layer reads x, tanh(x), exp(tanh(x)) and sin(...), of the last one too: square's does
    assert {t: again.count(t) for t in set(again)} == {
        "aten.addmm.default": 4,
        "aten.tanh.default": 4,
        "aten.exp.default": 4,
        "aten.sin.default": 4,
    }
    assert made.again == 16
    plain = simulate(joint.graph, costs, plain_schedule(joint.graph)).seconds
    seconds = simulate(made.graph, made.costs, made.schedule).seconds
    extra = sum(costs.seconds[o.id][0] for o in joint.graph.operators if o.target in set(again))
    assert seconds == pytest.approx(plain + extra)


def test_a_random_operator_that_torch_reruns_draws_the_same_numbers_from_one_saved_state():
    joint, costs = captured(dropout=0.5)
    made = partition(joint, costs, 0.0)
    targets = [
        [made.graph.operators[s.operator].target for s in part]
        for part in (made.schedule.forward, made.schedule.backward)
    ]
    assert [part.count("monet.bernoulli.default") for part in targets] == [4, 4]
    assert [part.count("monet.generator_state.default") for part in targets] == [4, 0]
    simulate(made.graph, made.costs, made.schedule)


def test_an_operator_read_only_by_backward_runs_only_there():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return nn.functional.relu6(self.linear(x), inplace=True).mean()  # keeps a copy of what it overwrites

    with offline.fake_tensors():
        joint = offline.capture(Overwriting(), (torch.empty(BATCH, WIDTH),))
    costs = offline.costs(joint, "roofline:p100")
    made = partition(joint, costs, 0.5)
    steps = made.schedule.forward + made.schedule.backward
    copies = [i for i, s in enumerate(steps) if made.graph.operators[s.operator].target == "aten.clone.default"]
    assert made.deferred == len(copies) == 1
    assert copies[0] >= len(made.schedule.forward)
    again = [s.operator for s in made.schedule.backward if made.graph.operators[s.operator].phase == FORWARD]
    plain = simulate(joint.graph, costs, plain_schedule(joint.graph)).seconds
    extra = sum(made.costs.seconds[o][0] for o in again)
    assert simulate(made.graph, made.costs, made.schedule).seconds == pytest.approx(plain + extra)


def test_partitioning_does_not_change_the_joint_graph():
    joint, costs = captured(dropout=0.5)
    before = [(n.name, n.target, sorted(n.meta)) for n in joint.module.graph.nodes]
    first = partition(joint, costs, 0.5)
    assert [(n.name, n.target, sorted(n.meta)) for n in joint.module.graph.nodes] == before
    assert partition(joint, costs, 0.5) == first


def test_each_of_torchs_points_is_compared_with_the_cheapest_plan_within_its_peak():
    joint, costs = captured(layers=6)
    partitions = {f"{budget:g}": partition(joint, costs, budget) for budget in (1.0, 0.5, 0.3, 0.0)}
    bench = recipe.Bench(joint, costs, "none", Options(seconds=1.0, gap=0.0, mip_solver="highs"))
    rows = list(bench.rows(partitions, (0.99, 0.4, 0.01)))
    assert sorted(s for r in rows for s in r.settings) == ["0", "0.3", "0.5", "1"]
    for row in rows:
        torch_s = [simulate(p.graph, p.costs, p.schedule) for k, p in partitions.items() if k in row.settings]
        assert {t.peak_bytes for t in torch_s} <= {row.peak_bytes}
        assert all(bench.overhead(t) == pytest.approx(row.torch_overhead) for t in torch_s)
        if row.settings:
            assert row.bound - 1e-9 <= row.overhead <= row.torch_overhead + 1e-9
    unreached = [r for r in rows if not r.settings]
    assert [r.verdict for r in unreached] == ["plan", "no schedule"]  # 0.99 is a share that torch reaches
    assert unreached[0].share == pytest.approx(0.4, abs=0.001)


@pytest.mark.parametrize(
    ("torch_s", "ours", "bound", "status", "verdict", "ratio"),
    [
        (0.10, 0.069, 0.0, "feasible", "ok", 0.69),
        (0.10, 0.08, 0.05, "feasible", "worse", 0.8),
        (0.10, 0.08, 0.075, "feasible", "out of reach", 0.8),
        (0.0, 0.0, 0.0, "optimal", "ok", None),
        (None, 0.2, 0.1, "feasible", "plan", None),
        (None, None, 0.0, "unknown", "none found", None),
        (None, None, float("inf"), "infeasible", "no schedule", None),
    ],
)
def test_the_verdict_follows_from_the_ratio_or_the_bound(torch_s, ours, bound, status, verdict, ratio):
    row = recipe.Row("net", "none", (), 0.5, 1, torch_s, 0, ours, bound, 1.0, status)
    assert row.verdict == verdict
    assert row.ratio == (None if ratio is None else pytest.approx(ratio))
