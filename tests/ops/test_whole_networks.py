"""Whole networks in which all operators run by alternatives at once, or leave out what their passes do not need."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils._pytree import tree_map

from lib import networks
from monetrun.core.graph import BACKWARD, FORWARD, Costs
from monetrun.core.plan import Schedule, Step
from monetrun.core.simulate import simulate
from monetrun.ops.cudnn import MOST_PLANS
from monetrun.runtime.backend import Backend
from support.captured import Chooser, Residual, normalized_conv, pool
from support.kernel_cases import DEVICE

# Implementations by name, the one to be forced first. Every one that is not in place stands here.
FORCED = (
    *(f"conv:cudnn-{plan}" for plan in reversed(range(MOST_PLANS))),
    "layout",
    "conv:apart",
    "fused:batch-norm",
    "fused:cross-entropy",
    "intermediate:mask",
    "output:input",
    "intermediate:index",
    "output:elu",
    "output:hardswish",
    "output:softplus",
    "output:layer-norm",
    "output:group-norm",
    "output:batch-norm",
    "output",
    "output:copy",
)
IN_PARTS = ("conv:parts", "fused:batch-norm-parts")
NIGHTLY = pytest.mark.nightly


class Forcing(Chooser):
    """Runs every backward operator by an alternative, and every forward operator that has one a second time by it.

    ``in_parts``: for some of the images or channels at a time, where that is offered; otherwise in no such way.
    """

    def __init__(self, in_parts=False):
        self.forced = (*IN_PARTS, *FORCED) if in_parts else FORCED

    def choose(self, joint):
        self.joint = joint
        graph = joint.graph

        def other(op):
            names = {k: impl.name for k, impl in enumerate(op.implementations) if k and impl.in_place_of is None}
            assert {*names.values()} <= {*FORCED, *IN_PARTS}
            found = [k for k in names if names[k] in self.forced]
            return Step(op.id, min(found, key=lambda k: self.forced.index(names[k]), default=0))

        forward = [Step(op.id) for op in graph.operators[: graph.forward_count]]
        again = [s for s in map(other, graph.operators[: graph.forward_count]) if s.implementation]
        backward = [other(op) for op in graph.operators[graph.forward_count :]]
        self.schedule = Schedule(tuple(forward), (*again, *backward))
        zeros = [[0] * len(op.implementations) for op in graph.operators]
        costs = Costs("none", tuple(tuple(map(float, row)) for row in zeros), tuple(map(tuple, zeros)))
        simulate(graph, costs, self.schedule)
        steps = self.schedule.forward + self.schedule.backward
        used = [graph.operators[s.operator].implementations[s.implementation] for s in steps]
        self.used, self.exact = {impl.name for impl in used}, all(impl.exact for impl in used)
        return 0, self.schedule


NETWORKS = {
    "convolutions": (
        lambda: nn.Sequential(Residual(4, F.relu), pool(kernel_size=2), nn.Dropout(0.3), nn.Conv2d(4, 2, 3)),
        lambda: torch.randn(4, 4, 8, 8),
        {"intermediate:mask", "output:input", "conv:apart", "fused:batch-norm"},
    ),
    "mobilenet": (
        lambda: torchvision.models.mobilenet_v2(num_classes=10),
        lambda: torch.randn(4, 3, 64, 64),
        {"intermediate:mask", "conv:apart", "fused:batch-norm"},
    ),
    "norms": (
        lambda: nn.Sequential(normalized_conv(nn.GroupNorm(4, 16), nn.ReLU()), normalized_conv(nn.BatchNorm2d(16))),
        lambda: torch.randn(8, 16, 12, 12),
        {"output:group-norm", "output:batch-norm", "intermediate:mask", "conv:apart"},
    ),
    "softplus": (
        lambda: nn.Sequential(normalized_conv(nn.GroupNorm(4, 16), nn.Softplus()), nn.Conv2d(16, 4, 1)),
        lambda: torch.randn(8, 16, 12, 12),
        {"output:softplus", "output:group-norm", "conv:apart"},
    ),
    "gpt": (
        lambda: networks.GPT(layers=2, width=32, length=32),
        lambda: networks.tokens(4, 32, 0),
        {"intermediate:mask", "fused:cross-entropy", "output:layer-norm"},
    ),
}


class Omitting(Chooser):
    """Leaves out of its pass every operator that need not run there; what the backward pass reads runs there."""

    def choose(self, joint):
        self.joint = joint
        graph = joint.graph
        present: set[int] = {t.id for t in graph.tensors if t.external}
        parts = {FORWARD: [], BACKWARD: []}
        self.missing, self.late = set(), set()

        def provide(reads):
            for t in sorted(set(reads) - present):
                op = graph.operators[graph.writer[t]]
                provide(op.inputs)
                parts[BACKWARD].append(Step(op.id))
                present.update(op.outputs)
                self.late.add(op.target)

        for op in graph.operators:
            if op.optional:
                self.missing.add(op.target)
                continue
            # a default in place overwrites what nothing else reads
            ways = [k for k, impl in enumerate(op.implementations) if impl.in_place_of is None] or [0]
            able = [k for k in ways if present.issuperset(op.implementations[k].inputs)]
            if op.phase == BACKWARD and not able:
                # a backward operator that was left out can not run here: another implementation does without it
                backward = {t for o in graph.operators[graph.forward_count :] for t in o.outputs}
                able = [k for k in ways if backward.isdisjoint(set(op.implementations[k].inputs) - present)]
                provide(op.implementations[able[0]].inputs)
            parts[op.phase].append(Step(op.id, able[0]))
            present.update(op.outputs)
        self.schedule = Schedule(tuple(parts[FORWARD]), tuple(parts[BACKWARD]))
        zeros = [[0] * len(op.implementations) for op in graph.operators]
        simulate(graph, Costs("none", tuple(map(tuple, zeros)), tuple(map(tuple, zeros))), self.schedule)
        return 0, self.schedule


def gradients_beside_eager(make, inputs, chooser):
    """Gradients and buffers as scheduled, as eager gives them, and a function that computes them in float64."""
    torch.manual_seed(0)
    module, x = make().to(DEVICE), tree_map(lambda t: t.to(DEVICE), inputs())
    twin, exact = copy.deepcopy(module), copy.deepcopy(module).double()

    def gradients(module, run, x=x):
        torch.manual_seed(1)
        out = run(x)
        loss = out["loss"] if isinstance(out, dict) else out.square().sum()
        loss.backward()
        return {name: p.grad for name, p in module.named_parameters()} | dict(module.named_buffers())

    expected = gradients(module, module)
    torch._dynamo.reset()
    given = gradients(twin, torch.compile(twin, backend=Backend(chooser, "case")))

    def wide():
        return gradients(exact, exact, tree_map(lambda t: t.double() if t.is_floating_point() else t, x))

    return given, expected, wide


def differing(given, expected):
    return [name for name in expected if not torch.equal(given[name], expected[name])]


@pytest.mark.slow
@pytest.mark.parametrize("network", [pytest.param(n, marks=NIGHTLY if n == "mobilenet" else ()) for n in NETWORKS])
def test_every_other_implementation_at_once_gives_the_gradients_of_eager(network):
    """Bitwise; where an implementation is not exact, with at most twice eager's own error."""
    make, inputs, expected_kinds = NETWORKS[network]
    chooser = Forcing()
    given, expected, wide = gradients_beside_eager(make, inputs, chooser)
    assert chooser.used - {"default"} == expected_kinds or DEVICE != "cpu"  # what is exact there is not known
    if chooser.exact:
        assert differing(given, expected) == []
    else:
        for name, value in wide().items():
            if not value.is_floating_point():
                continue
            errors = [(v[name].double() - value).norm() for v in (given, expected)]
            assert errors[1] < 1e-5 * value.norm() + 1e-12, name  # the same dropout
            assert errors[0] <= 2 * errors[1] + 1e-12, (name, errors)


def assert_at_most_twice_the_error(given, expected, exact):
    """Over all parameters and buffers."""
    floats = [name for name, value in exact.items() if value.is_floating_point()]
    error, eagers = (sum((v[n].double() - exact[n]).square().sum() for n in floats) for v in (given, expected))
    assert error <= 4 * eagers


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", ["convolutions", pytest.param("mobilenet", marks=NIGHTLY), pytest.param("resnet", marks=NIGHTLY)]
)
def test_all_that_can_run_in_parts_has_at_most_twice_the_error_of_eager(network):
    make, inputs, _ = NETWORKS.get(network) or (
        lambda: torchvision.models.resnet18(num_classes=10),
        lambda: torch.randn(16, 3, 64, 64),
        None,
    )
    chooser = Forcing(in_parts=True)
    given, expected, wide = gradients_beside_eager(make, inputs, chooser)
    assert {"conv:parts", "fused:batch-norm-parts"} <= chooser.used
    assert_at_most_twice_the_error(given, expected, wide())


@pytest.mark.nightly
def test_hardswish_from_its_output_has_at_most_twice_eagers_error_in_a_whole_network():
    """Over all parameters: in single ones, behind one hardswish, it is up to four times eager's."""
    chooser = Forcing()
    given, expected, wide = gradients_beside_eager(
        lambda: torchvision.models.mobilenet_v3_small(num_classes=10, dropout=0.0),
        lambda: torch.randn(8, 3, 64, 64),
        chooser,
    )
    assert "output:hardswish" in chooser.used
    assert_at_most_twice_the_error(given, expected, wide())


@pytest.mark.parametrize(
    ("make", "inputs", "missing", "late"),
    [
        (
            lambda: nn.Sequential(Residual(4, F.relu), Residual(4, F.relu)),
            lambda: torch.randn(4, 4, 8, 8),
            {"aten.add.Tensor"},
            set(),
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 3)),
            lambda: torch.randn(4, 4, 8, 8),
            {"aten.clone.default"},
            {"aten.clone.default"},
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 3)),
            lambda: torch.randn(4, 4, 8, 8),
            {"aten.clone.default"},
            set(),
        ),
        (
            lambda: networks.GPT(layers=2, width=32, length=32),
            lambda: networks.tokens(4, 32, 0),
            {"aten.nll_loss_backward.default"},
            set(),
        ),
    ],
    ids=[
        "sum before a fused kernel",
        "copy that backward reads",
        "copy that need not be read",
        "gradient before a fused kernel",
    ],
)
def test_operators_that_need_not_run_in_their_pass_are_left_out_of_it(make, inputs, missing, late):
    chooser = Omitting()
    given, expected, _ = gradients_beside_eager(make, inputs, chooser)
    assert differing(given, expected) == []
    plain = {op.target for op in chooser.joint.graph.operators if op.plain}
    assert (chooser.missing & plain, chooser.late) == (missing, late)
