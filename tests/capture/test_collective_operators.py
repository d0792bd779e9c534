"""Collectives in a model's own forward are called as often as the script calls them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from monetrun.capture import cost
from monetrun.capture.meter import meter_for
from monetrun.ops.collective_operators import is_collective
from support.captured import captured


@pytest.fixture
def _two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            total = y.abs().sum(0)
            dist.all_reduce(total)
        return torch.tanh(y * torch.exp(total))


@pytest.mark.usefixtures("_two_ranks")
def test_a_collective_is_neither_run_again_nor_left_out_nor_measured():
    joint = captured(Averaged(), torch.randn(8, 16))
    found = [k for k, node in enumerate(joint.nodes) if is_collective(node.target)]
    assert found
    for k in found:
        operator = joint.graph.operators[k]
        assert not operator.replayable
        assert not operator.optional
    assert any(op.replayable for op in joint.graph.operators)
    measured = cost.measure(joint, {}, meter_for(torch.device("cpu")), torch.device("cpu"), rounds=1)
    signatures = {row[0] for k, row in enumerate(joint.signatures) if k in found}
    assert [measured[s].measured for s in signatures] == [False] * len(signatures)
    assert any(c.measured for c in measured.values())
