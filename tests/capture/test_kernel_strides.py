"""While tracing, results have the strides that kernels give them; torch's own fake kernels have others for these."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_leaves, tree_map_only

from monetrun.capture import cpu_allocator, kernel_strides
from monetrun.capture.kernel_strides import as_kernels_give_them
from monetrun.core.errors import CaptureFailed
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

aten = torch.ops.aten


def turned(*shape):
    """A tensor with the order of its dimensions in memory that channels-last has."""
    order = [0, *range(2, len(shape)), 1] if len(shape) > 2 else [1, 0]
    dense = torch.randn([shape[d] for d in order])
    return dense.permute([order.index(d) for d in range(len(shape))])


CALLS = {
    "weight norm": (aten._weight_norm_interface.default, (turned(16, 16, 3, 3), torch.randn(16, 1, 1, 1), 0)),
    "group norm": (aten.native_group_norm.default, (turned(2, 6, 5, 3), None, None, 2, 6, 15, 3, 1e-5)),
    "softmax": (aten._log_softmax_backward_data.default, (turned(7, 3), torch.randn(7, 3), 1, torch.float32)),
    "gated": (aten.glu_backward.default, (turned(2, 3, 4, 5), turned(2, 6, 4, 5), 1)),
    "padding": (aten.reflection_pad3d.default, (turned(3, 3, 5, 5), [1, 1, 1, 1, 1, 1])),
    "logarithm": (aten.xlogy.Tensor, (turned(5, 10, 5), torch.rand(5, 10, 5))),
    "sign": (aten.copysign.Tensor, (turned(10, 5), torch.tensor(1.0))),
    "rounded": (aten.floor_divide.default, (turned(10, 5), torch.tensor(2.0))),
    "loss": (aten.smooth_l1_loss_backward.default, (torch.tensor(1.0), turned(5, 6), turned(5, 6), 1, 1.0)),
    "an image of one pixel": (aten.relu.default, (turned(4, 6, 1, 1),)),
    "an image of one channel": (aten.sigmoid.default, (turned(4, 1, 5, 5),)),
    "images in two formats": (aten.threshold_backward.default, (turned(4, 6, 1, 1), torch.randn(4, 6, 1, 1), 0)),
    "normed image of one pixel": (aten.native_batch_norm.default, (turned(4, 6, 1, 1), *[None] * 4, True, 0.1, 1e-5)),
    "broadcast": (aten.logaddexp.default, (turned(10, 1, 5), turned(10, 5))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_result_has_the_kernels_strides(name):
    call, arguments = CALLS[name]
    expected = [tuple(r.stride()) for r in tree_leaves(call(*arguments)) if isinstance(r, torch.Tensor)]

    def strides():
        with FakeTensorMode() as mode:
            given = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
            return [tuple(r.stride()) for r in tree_leaves(call(*given)) if isinstance(r, torch.Tensor)]

    if torch.__version__ >= "2.14":  # those of other versions are not all wrong
        assert strides() != expected
    with as_kernels_give_them():
        assert strides() == expected


def test_a_kernel_to_which_zeros_are_no_pivots_is_not_asked(monkeypatch):
    """It would exchange rows with the memory before the block."""
    ran = []
    monkeypatch.setattr(kernel_strides, "_asked", {})
    monkeypatch.setattr(kernel_strides, "_run", lambda func, *given: ran.append(func))
    with FakeTensorMode(), as_kernels_give_them():
        pivots = torch.empty(4, dtype=torch.int32)
        aten.linalg_lu_solve.default(torch.empty(4, 4).t(), pivots, torch.empty(4, 3))
        aten._weight_norm_interface.default(torch.empty(5, 4).t(), torch.empty(4, 1), 0)
    assert aten._weight_norm_interface.default in ran
    assert aten.linalg_lu_solve.default not in ran


def test_without_memory_to_ask_the_kernel_nothing_is_traced_and_nothing_kept(monkeypatch):
    call, arguments = CALLS["group norm"]

    def traced():
        with FakeTensorMode() as mode, as_kernels_give_them():
            return call(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))[0].stride()

    def refuse(*given):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(kernel_strides, "_asked", {})
    with monkeypatch.context() as short:
        short.setattr(kernel_strides, "_filled", refuse)
        with pytest.raises(CaptureFailed, match="no memory to ask"):
            traced()
    assert traced() == call(*arguments)[0].stride()


class Convolutions(nn.Module):
    def __init__(self, resized):
        super().__init__()
        self.resized = resized
        self.first = nn.Conv2d(3, 16, 3, 1, 1)
        self.norm = nn.GroupNorm(4, 16)
        self.second = weight_norm(nn.Conv2d(16, 16, 3, 1, 1))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.gate = nn.Conv2d(16, 1, 1)
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x):
        x = F.relu6(self.second(F.silu(self.norm(self.first(x)))))
        pooled = self.pooled(x)
        if self.resized:  # as DeepLab's image features
            pooled = F.interpolate(pooled, size=x.shape[-2:], mode="bilinear")
        return self.last(x * self.gate(x).sigmoid() + pooled)


def train(sizes):
    torch.manual_seed(0)
    resized = len(set(sizes)) == 1  # torch traces no such sizes that vary
    model = Convolutions(resized).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for size in sizes:
        optimizer.zero_grad()
        x = torch.randn(4, 3, size, size).to(memory_format=torch.channels_last)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("sizes", [(16, 16, 16), pytest.param((16, 16, 20, 24, 16), marks=pytest.mark.nightly)])
def test_a_model_in_channels_last_format_trains_as_in_eager(sizes):
    assert cpu_allocator.install()
    losses, weights = train(sizes)
    session = Session(Settings(mode=RUN, budget="0.9x", solver_seconds=0.3, implementations="exact"))
    session.watch_process()
    try:
        found, trained = train(sizes)
        assert session.engine.plan is not None
        assert not session.reporter.warned
        assert all(planned._open_sizes and planned.broken is None for planned in session.planned)
    finally:
        session.close()
        torch._dynamo.reset()
    assert found == losses
    assert all(map(torch.equal, trained, weights))
