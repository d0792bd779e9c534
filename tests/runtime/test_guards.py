"""Guards on the weights: implementations whose guard fails are left out, and planned around when it fails later."""

import gc

import pytest
import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core import codec
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.left_out import without
from monetrun.core.plan import Plan
from monetrun.planning import kept, two_searches
from monetrun.runtime.engine import Engine
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from monetrun.solve import greedy
from support import zoo
from support.captured import captured
from support.on_stand_in import needs_stand_in, printed_by

USED = "output:layer-norm"


@pytest.fixture(autouse=True)
def _counted():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()


class Stream(nn.Module):
    """A residual stream of layer norms: it need not be saved where their backward runs from their outputs."""

    def __init__(self, layers=4, width=64):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + self.drop(linear(norm(x)))
        return x


def batch(seed):
    return torch.randn(4096, 64, generator=torch.Generator().manual_seed(seed))


def train(model, steps, before=lambda step: None):
    optimizer = zoo.sgd(model, 1e-3)
    losses = []
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def planned(
    model,
    steps,
    before=lambda step: None,
    plan=None,
    see=lambda engine: None,
    budget="0.7x",
    recompute=False,
    **options,
):
    """Losses of training without recomputation, under a budget that needs layer norms' backward from their outputs.

    ``see`` is called with the engine before each step but the first.
    """
    gc.collect()  # models of tests before this one, and of its own first session, are bytes that torch holds until then
    settings = Settings(mode=RUN, budget=budget, recompute=recompute, solver_seconds=0.5, **options)
    session = Session(settings, plan)
    session.watch_process()

    def before_and_seen(step):
        before(step)
        if session.engine is not None:
            see(session.engine)

    try:
        return train(model, steps, before_and_seen), session.engine, session.reporter.warned
    finally:
        session.close()
        torch._dynamo.reset()


def used(engine: Engine, plan: Plan | None = None) -> list[str]:
    """The names of the layer norms whose backward runs from the output under ``plan``, by default the engine's."""
    found = []
    for graph, own in zip(engine.running.record.graphs, (plan or engine.plan).graphs, strict=True):
        for step in own.schedule.backward:
            op = graph.operators[step.operator]
            if op.implementations[step.implementation].name == USED:
                found.append(op.name.rpartition(".")[0])
    return sorted(found)


def seeded():
    torch.manual_seed(0)
    return Stream()


def shrink(model, layer, factor):
    with torch.no_grad():
        model.norms[layer].weight.mul_(factor)
        model.norms[layer].bias.fill_(1.0)


def assert_trains_as_eager(losses, model, plain_losses, plain):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses), rtol=1e-5, atol=1e-6)
    for (name, given), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def drifting(model, layers):
    """From the fourth step on the weights of the first of ``layers`` shrink: at the sixth its guard fails."""
    return lambda step: shrink(model, layers[0], 0.4) if step >= 3 else None


def test_when_a_guard_begins_to_fail_the_step_is_planned_again_without_its_implementation():
    plans, layers = [], []

    def see(engine):
        plans.append(engine.plan)
        if engine.plan is not None and not layers:
            layers.append(int(used(engine)[0].removeprefix("norms.")))

    model = seeded()
    losses, engine, warned = planned(model, 8, drifting(model, layers), see=see)
    before, name = plans[4], f"norms.{layers[0]}"
    assert plans == [None, *[before] * 4, engine.plan, engine.plan]
    assert name in used(engine, before)
    assert used(engine)
    assert name not in used(engine)
    assert engine.generation == 2
    assert [name in w and USED in w for w in warned] == [True]
    assert engine.plan.planned_peak_bytes <= engine.plan.budget_bytes == before.budget_bytes
    assert engine.peak_bytes <= engine.plan.budget_bytes
    plain = seeded()
    plain_losses = train(plain, 8, drifting(plain, layers))
    assert_trains_as_eager(losses, model, plain_losses, plain)


def test_an_implementation_whose_guard_fails_from_the_start_is_never_used():
    def zeroed(model):
        return lambda step: shrink(model, 1, 0.0) if step == 0 else None

    model = seeded()
    losses, engine, warned = planned(model, 4, zeroed(model))
    assert engine.generation == 1
    assert warned == set()
    assert used(engine)
    assert "norms.1" not in used(engine)
    plain = seeded()
    assert_trains_as_eager(losses, model, train(plain, 4, zeroed(plain)), plain)


@pytest.mark.parametrize(
    "recorded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["with its record", "alone"]
)
def test_a_plan_whose_guard_fails_for_other_weights_is_replaced_before_its_first_call(recorded, tmp_path):
    model = seeded()
    _, engine, _ = planned(model, 2)
    name = used(engine)[0]
    layer = int(name.removeprefix("norms."))
    options = {}
    if recorded:
        (tmp_path / "record.json").write_text(codec.dumps(engine.running.record))
        options["record_file"] = str(tmp_path / "record.json")
    other = seeded()
    shrink(other, layer, 0.01)
    losses, again, warned = planned(other, 4, plan=engine.plan, **options)
    assert len(warned) == 1
    assert again.generation == 1
    assert again.peak_bytes <= engine.plan.budget_bytes
    if recorded:
        assert name not in used(again)
        assert used(again)
    plain = seeded()
    shrink(plain, layer, 0.01)
    assert_trains_as_eager(losses, other, train(plain, 4), plain)


@pytest.mark.slow
def test_a_budget_that_needs_an_implementation_whose_guard_fails_is_refused_then():
    model = seeded()
    _, engine, _ = planned(model, 2, budget="0.64x")
    assert "norms.1" in used(engine)
    model = seeded()
    with pytest.raises((InfeasibleBudget, NoPlanInTime)):
        planned(model, 8, drifting(model, [1]), budget="0.64x")


def test_a_graph_whose_implementations_are_not_usable_keeps_its_fingerprints_and_is_planned_without_them():
    _, engine, _ = planned(seeded(), 2)
    (graph,), (costs,) = engine.running.record.graphs, engine.running.record.costs
    guarded = {(op.id, k) for op in graph.operators for k, impl in enumerate(op.implementations) if impl.name == USED}
    less = without(graph, guarded)
    assert (less.fingerprint, less.structural_fingerprint) == (graph.fingerprint, graph.structural_fingerprint)
    assert less != graph
    assert codec.loads(type(less), codec.dumps(less)) == less
    frugal = greedy.most_frugal(less, costs)
    assert not guarded & {(s.operator, s.implementation) for s in frugal.backward}
    (plan,) = engine.plan.graphs
    assert kept.carry_over(plan, graph, costs, 1 << 40) == plan.schedule
    carried = kept.carry_over(plan, less, costs, 1 << 40)
    assert carried is None or not guarded & {(s.operator, s.implementation) for s in carried.backward}


def test_guards_depend_on_parameters_and_buffers_only():
    class Computed(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.weight, self.bias, self.how = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), how

        def forward(self, x):
            return torch.tanh(nn.functional.layer_norm(x * 2, [8], self.how(self.weight), self.bias))

    for how, guards in [(lambda w: w, 1), (lambda w: w + 1, 0)]:
        joint = captured(Computed(how), torch.randn(3, 8, requires_grad=True))
        assert len(joint.guards.guards) == guards
        assert sum(i.name == USED for op in joint.graph.operators for i in op.implementations) == guards


def test_weights_that_are_not_gathered_now_are_not_read():
    norm = nn.Sequential(nn.LayerNorm(8), nn.Tanh())
    joint = captured(norm, torch.randn(3, 8, requires_grad=True))
    (guard,) = joint.guards.guards
    weights = {position: torch.zeros(8) for position in guard.positions}
    run = joint.guards.watching(lambda arguments: None)
    run([weights.get(position) for position in range(len(joint.primals))])
    assert joint.guards.failed() is not None
    for weight in weights.values():
        weight.untyped_storage().resize_(0)  # as FSDP2 does after a module's forward
    assert joint.guards.failed() is None


class Halves(nn.Module):
    """Two graphs: the first counts its calls in a BatchNorm's buffers, the second has the layer norms."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(64), Stream()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_guard_that_fails_is_noticed_before_any_graph_of_the_call_has_run(monkeypatch):
    monkeypatch.setattr(two_searches, "INEXACT_MUST_SAVE", 0.01)

    def halves():
        torch.manual_seed(0)
        return Halves()

    def drift(model):
        def before(step):
            if step >= 3:
                for layer in range(4):
                    shrink(model.second, layer, 0.4)

        return before

    model, plans = halves(), []
    settings = {"budget": "0.6x", "recompute": True, "cost_model": "roofline:cpu"}  # recomputation never looks cheaper
    losses, engine, warned = planned(model, 8, drift(model), see=lambda engine: plans.append(engine.plan), **settings)
    assert used(engine, plans[2])
    assert len(warned) == 1
    assert not any(
        graph.operators[s.operator].implementations[s.implementation].name == USED
        for graph, own in zip(engine.running.record.graphs, engine.plan.graphs, strict=True)
        for s in own.schedule.backward
    )
    plain = halves()
    assert_trains_as_eager(losses, model, train(plain, 8, drift(plain)), plain)
    assert model.first.num_batches_tracked == 8


ALIKE = """
import json
import torch
from monetrun.capture import guards as module
from monetrun.capture.guards import Guard, Guards, _Input

target = lambda weight: weight.new_zeros((), dtype=torch.bool)  # what is false on a stand-in, holds here
waits, whole = [], Guards.failed
Guards.failed = lambda self: waits.append("device")
synchronize = torch.cuda.Event.synchronize
torch.cuda.Event.synchronize = lambda event: waits.append("event " + str(event.number))
numbers = iter(range(1000))
copied = module._copied

def numbered(on_device):
    on_host, event = copied(on_device)
    event.number = next(numbers)
    return on_host.fill_(True), event

module._copied = numbered
guard = Guard(0, 1, "a norm's", target, ((_Input(0),), {}))
of_blocks = Guards(None, [guard])
run = of_blocks.checking(lambda arguments: None)
blocks = [torch.ones(4, device="cuda") for _ in range(3)]
said = []
for step in range(4):
    for weight in blocks:
        run([weight])
    assert module.first_failed([of_blocks]) is None
    for weight in blocks:
        weight.add_(1)
    module.optimizer_ended()
    said.append(list(waits))
    waits.clear()
print(json.dumps(said))
"""


@needs_stand_in
def test_blocks_that_share_a_graph_wait_for_no_result_of_the_same_step():
    first, second, *later = printed_by(ALIKE)
    assert first == ["device"] * 3
    assert second == ["event 0", "event 1", "event 2"]  # the first that are copied
    assert later == [["event 0", "event 1", "event 2"], ["event 3", "event 4", "event 5"]]
