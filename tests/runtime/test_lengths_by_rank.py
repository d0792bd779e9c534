"""Ranks whose inputs have other lengths train as under torchrun: sums of gradients are added in torch's order."""

import pytest
import torch

from support import launcher
from support.launches import set_apart
from support.paths import SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "probed",
    [pytest.param([], id="with a trial", marks=pytest.mark.nightly), pytest.param(["--no-probe"], id="without")],
)
def test_ranks_with_lengths_of_their_own_train_as_under_torchrun(tmp_path, monkeypatch, probed):
    set_apart(monkeypatch, tmp_path)
    options = ("--standalone", "--nproc-per-node=3")
    settings = ("--budget=0.8x", "--implementations=exact", "--solver-seconds=1", *probed)
    script = SCRIPTS / "lengths_by_rank.py"
    launcher.run(launcher.TORCHRUN, *options, script, tmp_path / "plain")
    done = launcher.run(launcher.MONETRUN, *options, *settings, script, tmp_path / "planned")
    assert "measured peak" in done.stdout + done.stderr
    for rank in range(3):
        theirs, ours = (torch.load(tmp_path / f"{name}.{rank}") for name in ("plain", "planned"))
        assert ours["losses"] == theirs["losses"]
        assert all(torch.equal(ours["state"][name], value) for name, value in theirs["state"].items())
