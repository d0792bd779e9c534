"""A recorded step that runs out of memory, where the script goes on with a smaller batch: the next one is recorded."""

import pytest
import torch
from torch import nn

from support.sessions import opened_session


class Full(nn.Module):
    """Has memory run out in its forward, or in its backward, for large batches."""

    def __init__(self, within):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.within = within

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return RunsOut.apply(x, self.within)


@torch.library.custom_op("monetrun_tests::filled", mutates_args=())
def filled(x: torch.Tensor) -> torch.Tensor:
    if len(x) > 256:
        raise torch.OutOfMemoryError("CPU out of memory. It is a test")
    return x.clone()


filled.register_fake(torch.empty_like)


class RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, within):
        ctx.within = within
        return filled(x) if within == "forward" else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return filled(gradient) if ctx.within == "backward" else gradient.clone(), None


def trained(within, batch=512):
    torch.manual_seed(0)
    model = Full(within)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, step = [], 0
    while step < 4:
        optimizer.zero_grad()
        try:
            loss = model(torch.full((batch, 64), step / 4)).square().mean()
            loss.backward()
        except torch.OutOfMemoryError:
            batch //= 2
            continue
        optimizer.step()
        losses.append(loss.item())
        step += 1
    return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("within", [pytest.param("forward", marks=pytest.mark.nightly), "backward"])
def test_a_step_that_ran_out_of_memory_is_not_the_one_that_is_planned(within):
    expected = trained(within)
    with opened_session(budget="1.0x", solver_seconds=1.0, implementations="exact") as opened:
        assert trained(within) == expected
        record = opened.engine.running.record
    assert [(e.kind, e.graph) for e in record.events if e.kind in ("forward", "backward")] == [
        ("forward", 0),
        ("backward", 0),
    ]
    (graph,) = record.graphs
    assert max(t.nbytes for t in graph.tensors) == 256 * 64 * 4
