"""Models whose sizes torch cannot leave open are captured whole, with fixed sizes, for each new one."""

import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings


class Masked(nn.Module):
    """As a DETR: a mask of the image is brought to the size of what a backbone gives."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, images, mask):
        found = self.backbone(images)
        there = F.interpolate(mask[None].float(), size=found.shape[-2:]).to(torch.bool)[0]
        return self.head(found.masked_fill(there[:, None], 0.0).flatten(2).transpose(1, 2))


SIZES = ((16, 16), (16, 16), (24, 24), (24, 32), (32, 32), (16, 16))


def train():
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for height, width in SIZES:
        images, mask = torch.randn(2, 3, height, width), torch.rand(2, height, width) > 0.8
        optimizer.zero_grad()
        loss = model(images, mask).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def test_a_mask_that_is_resized_by_the_size_of_features_keeps_the_model_in_one_piece():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    losses, weights = train()
    session = Session(Settings(mode=RUN, budget="1.0x", solver_seconds=0.3, implementations="exact"))
    session.watch_process()
    try:
        found, trained = train()
        (planned,) = session.planned
        assert planned.broken is None
        assert session.engine.plan is not None
    finally:
        session.close()
        torch._dynamo.reset()
    assert found == losses
    assert all(map(torch.equal, trained, weights))
