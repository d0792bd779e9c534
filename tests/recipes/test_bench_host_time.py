"""recipes/bench_host_time.py runs on a stand-in GPU, and a planned step dispatches no more operators than eager's."""

import json
import os
import subprocess
import sys

import pytest

from support.on_stand_in import needs_stand_in
from support.paths import RECIPES, ROOT, python_path
from support.standin_gpu import environment

pytestmark = needs_stand_in

SMALL = """
import gpu_training
from torch import nn
import bench_host_time

def make(size):
    blocks = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000))

size = gpu_training.Size(64, (64, 64))
gpu_training.NETWORKS["small"] = gpu_training.Network(make, size, size, example_mib=16.0)
if __name__ == "__main__":
    bench_host_time.main()
"""


@pytest.mark.nightly
def test_it_compares_the_hosts_time_of_both_steps(tmp_path):
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    words = (
        "--networks",
        "small",
        "--budgets",
        "auto,full",
        "--starts",
        "1",
        "--pairs",
        "2",
        "--steps",
        "1",
        "--out",
        tmp_path / "x.json",
    )
    environ = {**os.environ, **environment(gib=16.0), "PYTHONPATH": python_path(RECIPES, ROOT)}
    command = [sys.executable, script, *map(str, words)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "x.json").read_text())
    auto, row = found["rows"]
    assert auto["operators"] == auto["eager_operators"]
    assert row["network"] == "small"
    assert row["planned_overhead"] <= 0
    assert row["cpu_ratio"] > 0
    assert row["wall_seconds"] > 0
    assert row["operators"] <= row["eager_operators"]
    assert found["compiled"]
    assert "small" in done.stdout
