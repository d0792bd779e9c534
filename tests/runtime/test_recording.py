"""What a recorded step has of the script, and of nothing else."""

import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core.step import OUTSIDE
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings


def test_what_capturing_a_graph_within_the_step_allocates_is_not_the_scripts():
    """The second model is captured after the first one's backward; its kernels allocate for a while in that."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    session = Session(Settings(mode=RUN, budget="1.0x", solver_seconds=1.0, implementations="exact"))
    session.watch_process()
    try:
        generator = nn.Sequential(
            nn.ConvTranspose2d(32, 64, 4),
            nn.BatchNorm2d(64),
            nn.ReLU(True),
            nn.ConvTranspose2d(64, 48, 4, 2, 1),
            nn.Tanh(),
        )
        critic = nn.Sequential(nn.Conv2d(48, 24, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(24, 1, 4))
        optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            critic(torch.rand(64, 48, 8, 8)).sum().backward()
            critic(generator(torch.rand(64, 32, 1, 1))).sum().backward()
            optimizer.step()
        record = session.engine.running.record
        peak = session.engine.findings()["measured_peak_bytes"]
    finally:
        session.close()
        torch._dynamo.reset()
    assert len(record.graphs) == 3
    assert max(e.peak_bytes for e in record.events if e.kind == OUTSIDE and not e.name) < peak // 50
