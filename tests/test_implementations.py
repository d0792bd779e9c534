"""Every implementation that the registry offers, run beside the operator that it stands for, on captured graphs.

A case is a small module whose joint graph has the operators of one family. All its nodes are computed with real
numbers; then every alternative is called with the same numbers and must give what the node gave: bit for bit where it
says that it is exact, otherwise within a few roundings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from monetrun.backend import Backend
from monetrun.capture import JointGraph
from monetrun.graph import check
from monetrun.ops import kernels, layout, registry
from monetrun.plan import Schedule, plain_schedule

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DEVICE = os.environ.get("MONETRUN_TEST_DEVICE", "cpu")  # recipes/gpu_check.py sets it
torch.backends.cudnn.allow_tf32 = False  # two kernels, only one of which uses it, differ by far more than rounding


class Chooser:
    """Takes the plain schedule, and keeps what was captured."""

    meter = None

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        self.joint = joint
        return 0, plain_schedule(joint.graph)

    def entering(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        pass

    def left(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        pass


def captured(module: nn.Module, x: torch.Tensor) -> JointGraph:
    chooser = Chooser()
    torch._dynamo.reset()
    module.to(DEVICE)
    kernels.load(DEVICE)
    torch.compile(module, backend=Backend(chooser, "case", observed=True))(x)
    check(chooser.joint.graph)
    return chooser.joint


class Wave(nn.Module):
    """Elementwise functions, one after the other, on scaled data."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x):
        x = x * self.scale
        for function in self.functions:
            x = function(x)
        return x


class Residual(nn.Module):
    def __init__(self, channels, activation, dimensions=2):
        super().__init__()
        make_conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        make_norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
        self.one, self.two = make_conv(channels, channels, 1), make_conv(channels, channels, 3, padding=1)
        self.norm, self.norm2 = make_norm(channels), make_norm(channels)
        self.activation = activation
        for norm in (self.norm, self.norm2):
            nn.init.uniform_(norm.weight, -1, 2)
            nn.init.uniform_(norm.bias, -1, 1)

    def forward(self, x):
        y = self.activation(self.norm(self.one(x)))
        y = self.norm2(self.two(y)) + y
        return self.activation(y + self.norm(self.one(y)))


class Normalized(nn.Module):
    """A normalization between functions that need its output."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x):
        return torch.tanh(self.norm(x * self.scale))


class Plain(nn.Module):
    """A layer norm whose weight and bias may each be missing, or need no gradient."""

    def __init__(self, shape, weight, bias, trained=True):
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.ones(shape), trained) if weight else None
        self.bias = nn.Parameter(torch.zeros(shape), trained) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.shape, self.weight, self.bias)


class Loss(nn.Module):
    def __init__(self, classes, weight=False, reduction="mean", label=0):
        super().__init__()
        self.classes, self.reduction, self.label = classes, reduction, label
        self.register_buffer("weight", torch.linspace(0.5, 2, classes) if weight else None)
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x):
        target = torch.full((len(x),), self.label, dtype=torch.long, device=x.device)
        return F.cross_entropy(x[:, : self.classes] * self.scale, target, self.weight, reduction=self.reduction)


def normalized_conv(norm, activation=None):
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), norm, activation or nn.SiLU())


def pool(**keywords):
    return Wave(lambda x: F.relu(x), lambda x: F.max_pool2d(x, **keywords))


CASES = {
    "relu": (Wave(F.relu, torch.sin, lambda x: F.relu(x, inplace=True), torch.sin), (3, 5, 7, 3)),
    "relu, empty": (Wave(F.relu, torch.sin), (0, 5, 2, 3)),
    "relu6": (Wave(lambda x: F.relu6(4 * x), lambda x: F.hardtanh(2 * x, -1.0, 0.5), torch.sin), (1, 9, 3, 3)),
    "relu6 in place": (Wave(lambda x: F.relu6(4 * x, inplace=True), torch.sin), (2, 8, 3, 3)),
    "leaky relu": (Wave(lambda x: F.leaky_relu(x, 0.2), torch.sin), (2, 3, 5, 1)),
    "elu": (Wave(F.elu, lambda x: F.elu(3 * x, 0.5), F.selu, lambda x: F.celu(4 * x, 2.0), torch.sin), (3, 5, 7, 3)),
    "softplus": (Wave(F.softplus, lambda x: F.softplus(3 * x, 2.0), torch.sin), (3, 5, 7, 3)),
    "hardswish": (Wave(lambda x: F.hardswish(3 * x), lambda x: F.hardswish(9 * x), torch.sin), (3, 5, 7, 3)),
    "hardswish, empty": (Wave(F.hardswish, torch.sin), (0, 5, 2, 3)),
    "pool": (pool(kernel_size=2), (2, 4, 8, 6)),
    "pool, overlapping": (pool(kernel_size=3, stride=2, padding=1), (1, 4, 9, 7)),
    "pool, same size": (pool(kernel_size=3, stride=1, padding=1), (2, 3, 5, 5)),
    "pool, dilated": (pool(kernel_size=2, stride=1, dilation=2, ceil_mode=True), (2, 3, 8, 9)),
    "dropout": (Wave(torch.sin, lambda x: F.dropout(x, 0.15), torch.sin), (3, 4, 5, 7)),
    "batch norm": (Residual(6, F.relu), (4, 6, 5, 7)),
    "batch norm, relu6": (Residual(8, F.relu6), (2, 8, 4, 4)),
    "batch norm 1d": (Residual(8, F.relu, 1), (4, 8, 9)),
    "batch norm 3d": (Residual(4, F.relu, 3), (2, 4, 3, 5, 4)),
    "convolution": (nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, dilation=2, groups=2), nn.Sigmoid()), (2, 4, 11, 9)),
    "depthwise": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)), (2, 4, 6, 6)),
    "transposed": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 6, 2, stride=2)), (2, 4, 6, 6)),
    "arithmetic": (
        Wave(
            lambda x: (x + x.sin()) - x.cos(),
            lambda x: x / x.exp(),
            lambda x: torch.sigmoid(x).add(1.0).mul(2.0).sqrt().rsqrt(),
            lambda x: x.masked_fill(torch.ones(5, dtype=torch.bool, device=x.device), 0.5).cos(),
        ),
        (2, 3, 4, 5),
    ),
    "layer norm": (Normalized(nn.LayerNorm(24)), (3, 5, 24)),
    "layer norm, odd": (Normalized(nn.LayerNorm((3, 7))), (70, 3, 7)),
    "layer norm, one row": (Normalized(nn.LayerNorm(33)), (1, 33)),
    "layer norm, empty": (Normalized(nn.LayerNorm(8)), (0, 8)),
    "layer norm, no bias": (Normalized(Plain([19], True, False)), (9, 19)),
    "layer norm, no weight": (Normalized(Plain([19], False, True)), (9, 19)),
    "layer norm, neither": (Normalized(Plain([19], False, False)), (9, 19)),
    "layer norm, frozen": (Normalized(Plain([19], True, True, False)), (9, 19)),
    "layer norm, images": (Normalized(nn.LayerNorm((4, 5, 6))), (3, 4, 5, 6)),
    "group norm": (Normalized(nn.GroupNorm(2, 6)), (4, 6, 5, 7)),
    "group norm, odd": (Normalized(nn.GroupNorm(3, 9)), (1, 9, 3, 11)),
    "group norm, one group": (Normalized(nn.GroupNorm(1, 7)), (5, 7, 9)),
    "group norm, empty": (Normalized(nn.GroupNorm(4, 8)), (0, 8, 3, 3)),
    "group norm, neither": (Normalized(nn.GroupNorm(2, 6, affine=False)), (3, 6, 4, 5)),
    "batch norm alone": (Normalized(nn.BatchNorm2d(6)), (4, 6, 5, 7)),
    "batch norm, one image": (Normalized(nn.BatchNorm2d(17)), (1, 17, 3, 5)),
    "batch norm, vectors": (Normalized(nn.BatchNorm1d(9)), (7, 9)),
    "batch norm, neither": (Normalized(nn.BatchNorm2d(6, affine=False, track_running_stats=False)), (3, 6, 4, 5)),
    "instance norm": (Normalized(nn.InstanceNorm2d(6)), (3, 6, 4, 5)),
    "cross entropy": (Loss(5), (6, 11)),
    "cross entropy, weighted": (Loss(7, weight=True, reduction="sum", label=2), (9, 7)),
    "elementwise": (
        Wave(F.elu, F.silu, F.gelu, F.hardswish, F.hardsigmoid, torch.tanh, torch.exp, torch.neg, torch.sigmoid),
        (2, 3, 4, 5),
    ),
}


def computed(joint: JointGraph, dtype: torch.dtype) -> dict[fx.Node, object]:
    """Every node's value, on random inputs of the captured forms; weights are such that all guards hold."""
    generator = torch.Generator().manual_seed(0)
    guarded = {p for guard in joint.guards.guards for p in guard.places}

    def made(place: int, node: fx.Node) -> object:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        if not value.dtype.is_floating_point:
            return torch.zeros(value.shape, dtype=value.dtype, device=DEVICE)
        random = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(DEVICE, value.dtype)
        if value.dim() > 1:
            random = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE).copy_(random)
        return 1 + random.sigmoid() if place in guarded else random

    interpreter = fx.Interpreter(joint.module, garbage_collect_values=False)
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    with torch.no_grad():
        inputs = {p: made(p, n) for p, n in enumerate(placeholders)}
        assert all(guard.asked(inputs) for guard in joint.guards.guards)
        interpreter.run(*inputs.values())
    return interpreter.env


@pytest.fixture
def offered_everywhere(monkeypatch):
    """What is offered on GPUs alone, because it gains nothing elsewhere, is offered here."""
    monkeypatch.setattr(layout, "OFFERED_ON", (DEVICE,))


@pytest.mark.usefixtures("offered_everywhere")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES)
def test_an_implementation_gives_what_the_operator_gives(case, form, dtype):
    torch.manual_seed(0)
    module, shape = CASES[case]
    if form == "channels_last" and len(shape) != 4:
        pytest.skip("of 4 dimensions only")
    x = torch.randn(shape, dtype=dtype).to(DEVICE)
    if form == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    joint = captured(module.to(dtype).train(), x)
    values = computed(joint, dtype)
    for (i, k), call in joint.calls.items():
        node, impl = joint.nodes[i], joint.graph.operators[i].implementations[k]
        copies: dict[fx.Node, object] = {}
        arguments, keywords = fx.map_arg(
            (call.args, call.kwargs), lambda n, copies=copies: copies.setdefault(n, _copied(values[n]))
        )
        result = call.target(*arguments, **keywords)
        standing_for = values[node] if call.only is None else values[node][call.only]
        where = f"{node.target} as {impl.name} ({call.target})"
        pairs = list(zip(*(v if isinstance(v, tuple) else (v,) for v in (result, standing_for)), strict=True))
        for one, other in pairs:
            if other is not None:
                assert_conforms(one, other, node, impl, where)
        if impl.in_place_of is not None:
            overwritten = [c for n, c in copies.items() if joint.storage.get(n) == impl.in_place_of]
            first = result[0] if isinstance(result, tuple) else result
            assert any(c.data_ptr() == first.data_ptr() for c in overwritten), where


def assert_conforms(given, expected, node, impl, where):
    assert (given.shape, given.dtype) == (expected.shape, expected.dtype), where
    assert strides(given) == strides(expected), where
    if impl.exact:
        assert torch.equal(torch.nan_to_num(given), torch.nan_to_num(expected)), where
        assert torch.equal(given.isnan(), expected.isnan()), where
    else:
        torch.testing.assert_close(given, expected, equal_nan=True, msg=lambda m: f"{where}: {m}")


def strides(value):
    return [s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1] if value.numel() else []


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.usefixtures("offered_everywhere")
def test_every_registered_operator_is_in_a_case():
    seen = set()
    for module, shape in CASES.values():
        joint = captured(module.to(torch.float32).train(), torch.randn(shape).to(DEVICE))
        seen |= {joint.nodes[i].target for i, _ in joint.calls}
    assert {str(t) for t in registry.registered()} - {str(t) for t in seen} == set()


def test_networks_of_convolutions_batch_norms_and_relus_stay_exact():
    offered = {}
    for name, activation in (("relu", nn.ReLU()), ("silu", nn.SiLU()), ("conv", nn.Conv2d(16, 4, 1))):
        joint = captured(normalized_conv(nn.BatchNorm2d(16), activation), torch.randn(2, 16, 5, 5))
        offered[name] = {i.name for op in joint.graph.operators for i in op.implementations}
    assert "fused:batch-norm" in offered["relu"] - offered["silu"]
    assert "output:batch-norm" in offered["silu"] - offered["relu"] - offered["conv"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_takes_a_bit_and_an_index_a_byte_per_element(dtype):
    joint = captured(pool(kernel_size=2).to(dtype), torch.randn((3, 5, 7, 6), dtype=dtype).to(DEVICE))
    sizes = {op.target: joint.graph.tensors[op.outputs[0]].nbytes for op in joint.graph.operators if op.optional}
    assert sizes == {
        "monet.range_mask.default": math.ceil(3 * 5 * 7 * 6 / 8),
        "monet.max_pool2d_index.default": 3 * 5 * 3 * 3,
    }
