"""``monetrun plan`` for a cluster that is not here: nodes, ranks, and the link between them."""

import json
import subprocess
import sys

import pytest

from monetrun.commands import plan
from monetrun.core.errors import UsageError

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
assert dist.get_world_size() == 6
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())])
parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    parallel(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--link", "400"), "400Gbps,5us"), (("--link", "0Gbps,5us"), "above 0"), (("--nodes", "0"), "from 1 on")],
)
def test_a_malformed_cluster_is_refused_with_the_rule_before_anything_runs(words, said):
    with pytest.raises(UsageError) as refused:
        plan.run([*words, __file__])
    assert words[1] in refused.value.message
    assert said in refused.value.message + (refused.value.hint or "")


@pytest.mark.slow
def test_the_step_is_timed_on_ranks_that_are_not_here(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--nodes", "3", "--gpus", "2", "--link", "10Gbps,5us", "--cost-model", "roofline:h100")
    command = [sys.executable, "-m", "monetrun", "plan", *words, "--budget", "1.0x", "--json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout.splitlines()[-1])["step"]
    assert (step["ranks"], step["link"]) == (6, "10Gbps,5us")
    clocks = step["planned"]
    assert clocks["buckets"] == 4  # one for each layer of 1 MiB
    nbytes = 4 * (512 * 512 + 512) * 4
    assert clocks["communication_seconds"] == pytest.approx(4 * 5e-6 + 2 * 5 / 6 * nbytes / 1.25e9)
    # the link is the bottleneck: all but the time until the first gradient is spent on it
    waits = clocks["step_seconds"] - clocks["communication_seconds"]
    assert 0 < waits < clocks["compute_seconds"]
    assert clocks["hidden_seconds"] == pytest.approx(clocks["compute_seconds"] - waits)
    assert "4 buckets" in done.stderr


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (6,))
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)])
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(256, 512)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.nightly
def test_sharded_modules_keep_parameters_for_what_their_all_gathers_take_on_the_link(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    words = ("--nodes", "3", "--gpus", "2", "--link", "10Gbps,5us", "--cost-model", "roofline:h100")
    command = [sys.executable, "-m", "monetrun", "plan", *words, "--solver-seconds", "2", "--json"]
    done = subprocess.run([*command, "--budget", "1.6x", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout.splitlines()[-1])
    assert list(plan["keeps_parameters"].values()) == [True] * 4
    plain, planned = plan["step"]["plain"], plan["step"]["planned"]
    nbytes = 4 * (2 * 512 * 2048 + 512 + 2048)
    each = 5e-6 + 5 / 6 * nbytes / 1.25e9
    assert (plain["buckets"], planned["buckets"]) == (12, 8)  # gathered twice or once, and reduced
    assert plain["communication_seconds"] == pytest.approx(12 * each, rel=0.01)  # shards are padded
    assert planned["communication_seconds"] == pytest.approx(8 * each, rel=0.01)
    assert planned["step_seconds"] < plain["step_seconds"]
    # all four are there at once, where the plain step has gathered one or two
    assert 2 * nbytes <= plan["planned_peak_bytes"] - plan["plain_peak_bytes"] <= 3 * nbytes
    assert "8 all-gathers and reduce-scatters" in done.stderr
    assert "4 of 4 sharded modules keep their parameters" in done.stderr
