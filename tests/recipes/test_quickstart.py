"""The README's first command, for one epoch."""

import json
import subprocess
import sys

import pytest

from support.launches import set_apart, skip_without
from support.paths import RECIPES


@pytest.mark.nightly
def test_the_quickstart_trains_in_half_of_the_memory(tmp_path, monkeypatch):
    skip_without(["sklearn", "torchvision"])
    set_apart(monkeypatch, tmp_path)
    command = ("--budget", "0.5x", "--json", str(RECIPES / "quickstart.py"), "--epochs", "1")
    done = subprocess.run([sys.executable, "-m", "monetrun", *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == 8
    assert found["measured_peak_bytes"] <= found["budget_bytes"] <= 0.5 * found["plain_peak_bytes"] + 1
    assert "test accuracy" in done.stdout
