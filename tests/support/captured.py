"""Small modules whose joint graphs have the operators of one family, and how to capture and compute them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn

from monetrun.capture.joint import JointGraph
from monetrun.core.graph import check
from monetrun.core.plan import Schedule, plain_schedule
from monetrun.ops import kernels
from monetrun.runtime.backend import Backend
from support.cudnn_norm import CudnnBatchNorm
from support.kernel_cases import DEVICE

torch.backends.cudnn.allow_tf32 = False  # two kernels, only one of which uses it, differ by far more than rounding


class Chooser:
    """Chooses the plain schedule and keeps the joint graph."""

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        self.joint = joint
        return 0, plain_schedule(joint.graph)


def captured(module: nn.Module, x: torch.Tensor) -> JointGraph:
    chooser = Chooser()
    torch._dynamo.reset()
    module.to(DEVICE)
    kernels.load(DEVICE)
    torch.compile(module, backend=Backend(chooser, "case"))(x)
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
    "dropout of bytes": (Wave(torch.sin, lambda x: torch.native_dropout(x, 0.15, True)[0], torch.sin), (3, 4, 5, 7)),
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
    "batch norm by cuDNN": (Normalized(CudnnBatchNorm(6)), (4, 6, 5, 7)),
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
    guarded = {p for guard in joint.guards.guards for p in guard.positions}

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
        assert all(guard.evaluate(inputs) for guard in joint.guards.guards)
        interpreter.run(*inputs.values())
    return interpreter.env


def strides(value):
    return [s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1] if value.numel() else []
