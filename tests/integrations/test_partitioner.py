"""torch's partitioner saves what monetrun's plan saves, and gradients stay eager's."""

import re

import pytest
import torch
from torch import nn
from torch._functorch import config, partitioners

import monetrun
from monetrun.capture import cpu_allocator
from monetrun.core.errors import BudgetSyntaxError, UsageError
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.plan import Schedule, Step
from monetrun.core.simulate import simulate
from monetrun.integrations import partitioner
from support.paths import DOCS

ASKED = {"activation_memory_budget": 0.001}  # torch decides by itself where this is larger
(EXAMPLE,) = re.findall(
    r"^## torch.compile\n.*?```python\n(.*?)```", (DOCS / "integrations.md").read_text(), re.S | re.M
)


@pytest.fixture(autouse=True)
def _forget():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Layers of which each keeps four tensors that are larger than its weights."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        for linear in self.linear:
            x = self.dropout(torch.sin(torch.exp(torch.tanh(linear(x)))))
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions, whose kernels have workspaces, and batch norms, which have three results."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + torch.relu(norm(convolution(x)))
        return x.square().mean()


def gradients(model, call, x):
    """Of a step of ``call``, after one that compiles; and what the step allocates at most."""
    for _ in range(2):
        model.zero_grad()
        before = cpu_allocator.allocated_bytes()
        cpu_allocator.reset_peak()
        torch.manual_seed(1)
        call(x).backward()
        peak_bytes = cpu_allocator.peak_bytes() - before
    return [p.grad.clone() for p in model.parameters()], peak_bytes


class Partitioned:
    """What torch's partitioner was asked, and the two modules that it made."""

    def __init__(self, monkeypatch):
        self.chosen, self.modules, self.graph, self.planned_bytes = {}, (), None, 0
        choose, split = partitioner.SavedTensors._choose, partitioners._extract_fwd_bwd_modules
        plan = partitioner.SavedTensors._plan

        def planning(solver, graph, costs):
            schedule = plan(solver, graph, costs)
            self.graph, self.planned_bytes = graph, simulate(graph, costs, schedule).peak_bytes
            return schedule

        def choosing(solver, *args):
            self.chosen = choose(solver, *args)
            return self.chosen

        def splitting(*args, **options):
            self.modules = split(*args, **options)
            return self.modules

        monkeypatch.setattr(partitioner.SavedTensors, "_choose", choosing)
        monkeypatch.setattr(partitioner.SavedTensors, "_plan", planning)
        monkeypatch.setattr(partitioners, "_extract_fwd_bwd_modules", splitting)

    def twice(self):
        """Names of the operators in both modules; views are in both for nothing."""
        forward, backward = ({n.name for n in m.graph.nodes if n.op == "call_function"} for m in self.modules)
        return forward & backward & set(self.chosen)


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        (Net, "0.8x"),
        (Net, "0.6x"),
        (lambda: Net(dropout=0.3), "0.6x"),
        pytest.param(Convolutions, "0.8x", marks=pytest.mark.nightly),
        (Convolutions, "0.7x"),
    ],
    ids=["linear-0.8", "linear-0.6", "dropout-0.6", "convolution-0.8", "convolution-0.7"],
)
def test_the_saved_set_is_the_plans_gradients_are_eagers_and_aot_eager_keeps_the_budget(make, budget, monkeypatch):
    seen = Partitioned(monkeypatch)
    torch.manual_seed(0)
    model = make()
    x = torch.randn(16, 8, 16, 16) if isinstance(model, Convolutions) else torch.randn(512, 64)
    eager, _ = gradients(model, model, x)
    plain, plain_bytes = gradients(model, torch.compile(model, backend="aot_eager", dynamic=False), x)
    torch._dynamo.reset()
    with config.patch(**ASKED, activation_memory_budget_solver=monetrun.SavedTensors(budget, seconds=2.0)):
        ours, peak_bytes = gradients(model, torch.compile(model, backend="aot_eager", dynamic=False), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert all(torch.allclose(a, b) for a, b in zip(ours, eager, strict=True))
    planned = {name for name, policy in seen.chosen.items() if policy.name == "MUST_RECOMPUTE"}
    assert planned
    assert seen.twice() == planned
    assert peak_bytes == pytest.approx(seen.planned_bytes, abs=1024)  # scalars: autograd's, and what is rounded
    assert peak_bytes <= float(budget[:-1]) * plain_bytes + 1024
    forward = [op for op in seen.graph.operators if op.phase == FORWARD]
    drawing = [op for op in forward if op.target == "aten.native_dropout.default"]
    assert len(drawing) == (4 if getattr(model, "dropout", nn.Dropout(0)).p else 0)
    assert not [op for op in drawing if op.replayable]


def test_the_pages_lines_train_by_inductors_name_for_it(monkeypatch):
    seen = Partitioned(monkeypatch)
    model = Net()
    settings = {name: getattr(config, name) for name in ("activation_memory_budget", "activation_memory_budget_solver")}
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="aot_eager"))
    with config.patch(settings):
        names = {"model": model}
        exec(EXAMPLE, names)
        names["model"](torch.randn(512, 64)).backward()
    assert "MUST_RECOMPUTE" in {policy.name for policy in seen.chosen.values()}


def test_a_graph_that_cannot_be_captured_is_compiled_with_a_warning():
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(512, 64)
    step = torch.compile(model, backend="aot_eager", dynamic=True)
    solver = monetrun.SavedTensors("0.6x", seconds=1.0)
    warned = pytest.warns(UserWarning, match="cannot plan this graph")
    with config.patch(**ASKED, activation_memory_budget_solver=solver), warned:
        ours, _ = gradients(model, step, x)
    eager, _ = gradients(model, model, x)
    assert all(torch.allclose(a, b) for a, b in zip(ours, eager, strict=True))


def test_reruns_come_once_where_they_are_first_needed():
    # a -> b -> c in the forward; the backward reads c, then b: torch runs each again once, before its first reader
    tensors = tuple(Tensor(i, 8, external=i == 0, name=name) for i, name in enumerate("xabcpq"))
    reads = {1: (0,), 2: (1,), 3: (2,), 4: (3,), 5: (2, 4)}
    operators = tuple(
        Operator(t - 1, f"o{t}", "f", FORWARD if t < 4 else BACKWARD, (t,), (Implementation("default", reads[t]),))
        for t in reads
    )
    graph = Graph("chain", tensors, operators)
    again = (0, 1, 2, 3, 0, 1, 4)  # the plan drops b, and runs a and b a third time
    schedule = Schedule(tuple(map(Step, (0, 1, 2))), tuple(map(Step, again)))
    made = partitioner.on_demand(graph, schedule)
    assert [s.operator for s in made.backward] == [0, 1, 2, 3, 4]
    free = Costs("none", ((1.0,),) * 5, ((0,),) * 5)
    assert simulate(graph, free, made).seconds == 8


def test_the_choice_is_part_of_torchs_key_of_compiled_graphs():
    made = [monetrun.SavedTensors(text).uuid() for text in ("0.6x", "0.6x", "0.7x")]
    assert made[0] == made[1] != made[2]


def test_a_budget_is_bytes_or_a_share_of_the_plain_peak():
    with pytest.raises(UsageError, match=r"80%"):
        monetrun.SavedTensors("80%")
    with pytest.raises(BudgetSyntaxError):
        monetrun.SavedTensors("much")
