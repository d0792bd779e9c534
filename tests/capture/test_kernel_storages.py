"""While tracing, results have storages of the size that kernels give them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from monetrun.capture import cpu_allocator
from monetrun.capture.kernel_strides import as_kernels_give_them
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

LOSSES = {
    "mean squared error": F.mse_loss,
    "smooth L1": F.smooth_l1_loss,
    "cross entropy": F.binary_cross_entropy,
    "soft margin": F.soft_margin_loss,
    "L1": F.l1_loss,
    "huber": F.huber_loss,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_leaves_as_much_allocated_as_its_kernel(name, reduction):
    def storage_bytes():
        loss = LOSSES[name](torch.rand(7, 5, requires_grad=True), torch.rand(7, 5), reduction=reduction)
        return loss.untyped_storage().nbytes()

    expected = storage_bytes()
    with FakeTensorMode(), as_kernels_give_them():
        assert storage_bytes() == expected


class Autoencoder(nn.Module):
    """Gives its loss, scaled: written over the unscaled one, it would keep that one's storage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        return 0.25 * F.mse_loss(self.layers(x), x)


@pytest.mark.parametrize("sizes", [(512,) * 5, (512, 512, 640, 576, 512)])
def test_the_peak_is_the_planned_one_where_a_model_gives_its_loss(sizes):
    assert cpu_allocator.install()

    def train():
        torch.manual_seed(0)
        model, losses = Autoencoder(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in sizes:
            loss = model(torch.randn(size, 64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)  # held, as a log does
        return [loss.item() for loss in losses]

    plain = train()
    session = Session(Settings(mode=RUN, budget="1.0x", solver_seconds=0.3, implementations="exact"))
    session.watch_process()
    try:
        assert train() == plain
        engine = session.engine
        assert engine.peak_bytes <= engine.plan.budget_bytes
        if len(set(sizes)) == 1:
            assert engine.peak_bytes == pytest.approx(engine.plan.planned_peak_bytes, rel=0.005)
    finally:
        session.close()
        torch._dynamo.reset()
