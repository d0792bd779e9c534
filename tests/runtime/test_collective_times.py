"""Seconds of all-gathers seen as sharded modules train: the plan is made anew where they change the choice, once."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from monetrun.core.event import GATHER, REDUCE
from monetrun.core.sharding import ShardedModule, Sharding, seconds_known, with_seconds
from monetrun.runtime import agreement, collective_times
from support.sessions import opened_session

WIDTH = 64


@pytest.fixture
def slow(monkeypatch):
    """Four ranks, of which this is one; an all-gather takes ``slow[0]`` seconds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seconds = [0.0]

    def slowly(run):
        def gather(*args, **kwargs):
            time.sleep(seconds[0])
            return run(*args, **kwargs)

        return gather

    def reduce_scatter(output, input, *args, **kwargs):  # torch 2.11's leaves the output as it was allocated
        output.copy_(input[: len(output)])

    for name in ("all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, slowly(getattr(dist, name)))
    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter)
    monkeypatch.setattr(agreement, "plan_in_rank_0", lambda make, budget="", *_, **__: make([budget] * 4))
    monkeypatch.setattr(agreement, "largest", lambda value, record=None: value)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield seconds
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(steps):
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_slow_all_gathers_are_made_once_where_the_parameters_fit(slow, capsys):
    expected = train(7)
    slow[0] = 0.02
    options = {"budget": "0.75x", "solver_seconds": 0.5, "implementations": "exact"}
    with opened_session(**options) as session:
        assert train(7) == expected
        engine = session.engine
        peak, budget = engine.peak_bytes, engine.plan.budget_bytes
        kept = engine.plan.keeps_parameters
        known = collective_times.known(engine.running.record)
    assert all(kept.values())
    assert peak <= budget
    (gather,) = (s for kind, _, s in known if kind == GATHER)
    assert 0.02 <= gather < 0.2
    assert [kind for kind, _, _ in known].count(REDUCE) == 1
    said = capsys.readouterr().err
    assert "planned again, 4 of 4 sharded modules keep their parameters" in said
    # a launch that knows it from the beginning does not look again
    record = session.engine.running.record
    assert not collective_times.CollectiveTimes(torch.device("cpu"), record).wanted


def test_fast_all_gathers_change_nothing(slow, capsys):
    with opened_session(budget="0.75x", solver_seconds=0.5, implementations="exact") as session:
        train(5)
        assert seconds_known(session.engine.running.record.sharding)
    assert "planned again" not in capsys.readouterr().err


def test_the_shortest_of_each_kind_and_size_counts():
    modules = (ShardedModule("a", 100, 100, 4), ShardedModule("b", 200, 0, 4))
    found = [(GATHER, 100, 3.0), (GATHER, 100, 2.0), (GATHER, 200, 5.0), (REDUCE, 100, 1.0), (REDUCE, 300, 9.0)]
    sharding = with_seconds(Sharding(modules, ()), found)
    assert [(m.gather_seconds, m.reduce_seconds) for m in sharding.modules] == [(2.0, 1.0), (5.0, 0.0)]
    assert seconds_known(sharding)
    assert not seconds_known(with_seconds(Sharding(modules, ()), found[:2]))


@pytest.mark.nightly
def test_what_is_timed_stops_with_the_session(slow):
    before = {name: getattr(dist, name) for name in ("reduce_scatter_tensor",)}
    with opened_session(budget="0.75x", solver_seconds=1.0) as session:
        train(2)  # too few to look at
        assert session.engine.running.collectives.wanted
    assert {name: getattr(dist, name) for name in before} == before
