"""What scripts do with DistributedDataParallel trains to the bit as under torchrun, within the budget."""

import json

import pytest
import torch

from support import launcher
from support.launches import set_apart
from support.paths import SCRIPTS

SCRIPT = str(SCRIPTS / "ddp_kinds.py")
MORE = [("static view", 2), ("unused no_sync", 4), ("hook join", 2), ("gan", 2), ("restart", 2)]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    set_apart(monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "ranks"),
    [
        ("unused no_sync", 2),
        *(pytest.param(*more, marks=pytest.mark.nightly) for more in MORE),
    ],
)
def test_losses_and_weights_are_torchruns(kinds, ranks):
    launches = 2 if kinds == "restart" else 1  # of which the second goes on from the first one's checkpoint
    options = ("--implementations=exact", "--solver-seconds=1", "--budget=0.8x", "--json")
    for _ in range(launches):
        launcher.run(launcher.TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", SCRIPT, "plain", *kinds.split())
        done = launcher.run(launcher.MONETRUN, *options, f"--nproc-per-node={ranks}", SCRIPT, "planned", *kinds.split())
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["measured_peak_bytes"] <= found["budget_bytes"], done.stderr
        assert found["planned_peak_bytes"] < found["plain_peak_bytes"]
        for rank in range(ranks):
            plain, planned = (torch.load(f"{name}.{rank}") for name in ("plain", "planned"))
            assert plain["losses"] == planned["losses"]
            assert [k for k in plain["state"] if not torch.equal(plain["state"][k], planned["state"][k])] == []
