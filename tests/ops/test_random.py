"""Random operators run again: they draw the numbers of their first run and leave the generator as in eager."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from lib import networks, offline
from monetrun.capture import cpu_allocator
from monetrun.capture.execute import build
from monetrun.capture.meter import meter_for
from monetrun.capture.operators import signature
from monetrun.core.graph import check
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.ops import random
from monetrun.ops.registry import Call
from monetrun.runtime.backend import Backend, Chooser
from monetrun.runtime.recorder import estimated
from monetrun.solve import greedy

monet = torch.ops.monet
CPU = torch.device("cpu")
CHECKS = ("test_schema", "test_faketensor")


class Again(Chooser):
    """Runs all that can run again a second time, when the backward pass begins, and then what drew first once more."""

    def choose(self, joint):
        self.joint = joint
        graph = joint.graph
        check(graph)
        forward = [Step(op.id) for op in graph.operators[: graph.forward_count] if op.plain]
        again = [s for s in forward if graph.operators[s.operator].replayable]
        self.again = [graph.operators[s.operator].target for s in again]
        drawn = [s for s in again if random.is_random(joint.nodes[s.operator])]
        backward = drawn[:1] + [Step(op.id) for op in graph.operators[graph.forward_count :] if op.plain]
        self.schedule = Schedule(tuple(forward), (*again, *backward))
        simulate(graph, estimated(joint), self.schedule)
        return 0, self.schedule


class NoisyGradient(torch.autograd.Function):
    """Draws in the forward pass what only the backward pass reads."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.rand_like(x))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Noisy(nn.Module):
    """Operators that draw in many ways."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = NoisyGradient.apply(F.dropout(self.inside(x).t(), 0.15).t())
        x = F.rrelu(x + torch.rand_like(x) + torch.randn(x.shape), training=True)
        x = F.gumbel_softmax(x, tau=1.0) * torch.empty(x.shape).uniform_(0.5, 1.0)
        x = F.alpha_dropout(torchvision.ops.stochastic_depth(self.outside(x), 0.4, "row"), 0.2, training=True)
        return x * torch.randperm(8) + torch.bernoulli(x.sigmoid())


NETWORKS = {
    "noisy": (Noisy, lambda: torch.randn(6, 8)),
    "gpt": (lambda: networks.GPT(layers=2, width=32, length=32), lambda: networks.tokens(4, 32, 0)),
    "stochastic depth": (
        lambda: torchvision.models.efficientnet_b0(num_classes=10, stochastic_depth_prob=0.4),
        lambda: torch.randn(4, 3, 32, 32),
    ),
}


def trained(module, x, run, steps=2):
    """Losses, weights and buffers, and the generator's state, after some steps."""
    torch.manual_seed(3)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.01), []
    for _ in range(steps):
        out = run(x)
        loss = out["loss"] if isinstance(out, dict) else out.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict(), torch.get_rng_state()


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "network", [pytest.param(n, marks=pytest.mark.slow if n == "stochastic depth" else ()) for n in NETWORKS]
)
def test_what_runs_again_draws_the_same_numbers_and_leaves_the_generator_as_eager_does(network):
    make, inputs = NETWORKS[network]
    torch.manual_seed(0)
    module, x = make(), inputs()
    twin, chooser = copy.deepcopy(module), Again()
    losses, state, generator = trained(module, x, module)
    again = trained(twin, x, torch.compile(twin, backend=Backend(chooser, network)))
    drawn = {op.target for op in chooser.joint.graph.operators if random.is_random(chooser.joint.nodes[op.id])}
    assert drawn - set(chooser.again) == {"monet.generator_state.default"}
    assert not any(op.optional and op.target in drawn for op in chooser.joint.graph.operators)
    assert again[0] == losses
    assert [k for k in state if not torch.equal(again[1][k], state[k])] == []
    assert torch.equal(again[2], generator)


def test_a_state_is_saved_only_for_operators_that_draw_again():
    with offline.fake_tensors():
        joint = offline.capture(nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3)), (torch.empty(4, 8),))
    plain = plain_schedule(joint.graph)
    second = [op.id for op in joint.graph.operators if op.target == "monet.bernoulli.default"][1]
    for again, noted in ((), 0), ((Step(second),), 1):
        schedule = Schedule(plain.forward, (*again, *plain.backward))
        forward, backward = build(joint, schedule)
        states = forward.graph.find_nodes(op="call_function", target=monet.generator_state.default)
        assert len(states) == noted
        assert all(n.next.target is monet.bernoulli.default for n in states)  # nothing draws in between
        assert not backward.graph.find_nodes(op="call_function", target=monet.generator_state.default)


def test_noise_needs_no_tensor_to_be_drawn_again():
    with offline.fake_tensors():
        joint = offline.capture(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), (torch.empty(4, 8),))
    (drawing,) = [op for op in joint.graph.operators if op.target == "monet.bernoulli.default"]
    (read,) = drawing.inputs
    assert joint.graph.operators[joint.graph.writer[read]].target == "monet.generator_state.default"
    assert joint.graph.tensors[read].nbytes == random.STATE_BYTES["cpu"]
    assert (drawing.replayable, drawing.optional) == (True, False)


def test_at_a_tight_budget_a_plan_draws_noise_again():
    with offline.fake_tensors():
        layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Dropout(0.3))]
        joint = offline.capture(nn.Sequential(*layers), (torch.empty(65536, 32),), loss=torch.sum)
    costs = offline.costs(joint, "roofline:h200")
    plain = simulate(joint.graph, costs, plain_schedule(joint.graph))
    options = Options(seconds=1.0, implementations=("in-place",))
    schedule = greedy.solve(joint.graph, costs, plain.peak_bytes // 2, options).schedule
    targets = [joint.graph.operators[s.operator].target for s in schedule.backward]
    assert targets.count("monet.bernoulli.default") > 0
    assert targets.count("monet.generator_state.default") == 0


def test_a_draw_that_fails_leaves_the_generator_as_it_was():
    state = monet.generator_state(CPU)
    assert state.nbytes == random.STATE_BYTES["cpu"]
    torch.rand(7)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        random.draw_again(state, CPU, torch.ops.aten.bernoulli.p, torch.ones(3), 2.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("elements", [16, 4096])
def test_what_a_second_run_allocates_is_what_its_costs_say(elements):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    with offline.fake_tensors():
        joint = offline.capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)), (torch.empty(elements // 4, 4),))
    (drawing,) = [op for op in joint.graph.operators if op.target == "monet.bernoulli.default"]
    workspace = offline.costs(joint, "roofline:h200").workspace_bytes[drawing.id][0]
    meter = meter_for(CPU)
    before = meter.current_bytes()
    state = monet.generator_state(CPU)
    assert meter.current_bytes() - before == random.STATE_BYTES["cpu"]
    meter.reset_peak()
    form = {"dtype": torch.float32, "device": CPU}
    noise = random.draw_again(state, CPU, monet.bernoulli.default, [elements], [1], 0.5, **form)
    assert meter.peak_bytes() - before == state.nbytes + noise.nbytes + workspace
    assert meter.current_bytes() - before == state.nbytes + noise.nbytes


def test_ranks_on_other_devices_have_the_same_graph():
    calls = [Call(monet.generator_state.default, (torch.device("cuda", k),)) for k in (0, 1)]
    assert signature(calls[0]) == signature(calls[1])


def test_an_operator_with_a_generator_of_its_own_does_not_run_again():
    graph = fx.Graph()
    x, own = graph.placeholder("x"), graph.placeholder("generator")
    for generator in (None, own):
        node = graph.call_function(torch.ops.aten.bernoulli.default, (x,), {"generator": generator})
        node.meta = {"val": torch.ones(3), "partitioner_tag": "is_forward"}
    graph.output(node)
    random.note_states(fx.GraphModule(nn.Module(), graph))
    assert [random.state_of(n) is not None for n in graph.nodes if n.target is torch.ops.aten.bernoulli.default] == [
        True,
        False,
    ]


def test_the_operators_are_what_their_schemas_say():
    form = {"dtype": torch.float32, "device": CPU}
    torch.library.opcheck(monet.bernoulli.default, ([3, 4], [1, 3], 0.5), form, test_utils=CHECKS)
    torch.library.opcheck(monet.generator_state.default, (CPU,), test_utils=CHECKS)


def test_a_bernoulli_is_what_eager_draws_into_a_tensor_of_that_form():
    torch.manual_seed(0)
    expected = torch.empty(5, 4).t().bernoulli_(0.3)
    torch.manual_seed(0)
    given = monet.bernoulli([4, 5], [1, 4], 0.3, dtype=torch.float32, device=CPU)
    assert torch.equal(given, expected)
    assert given.stride() == expected.stride()


@torch.library.custom_op("monetrun_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, grad: grad)


def test_an_operator_of_a_library_may_draw_without_a_word_and_draws_the_same_again():
    """flash-attn's draws dropout masks, and has no tag that says so."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(torch.tanh(noisy(self.first(x))))

    torch._dynamo.reset()
    chooser = Again()
    model, x = Model(), torch.randn(4, 8)

    def step(called):
        model.zero_grad()
        torch.manual_seed(3)
        called(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    found, state = step(torch.compile(model, backend=Backend(chooser, "case")))
    (own,) = (op for op in chooser.joint.graph.operators if "noisy" in op.target)
    assert own.target in chooser.again
    plain, plain_state = step(model)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert torch.equal(state, plain_state)
    torch._dynamo.reset()


def test_an_operator_of_a_library_is_not_known_to_draw_where_a_checkpoint_would_draw_other_numbers():
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda x: run(lambda y: noisy(layer(y)), x), backend=Backend(Again(), "case"))(x).sum().backward()
    torch._dynamo.reset()
