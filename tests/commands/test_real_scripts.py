"""Scripts with other people's trainers, at small sizes: the same losses and weights as torchrun's, within the budget.

They need the packages of the extra ``real``.
"""

import json
import subprocess
import sys

import pytest
import torch

from support.launches import set_apart, skip_without
from support.paths import SCRIPTS


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    set_apart(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def launch(*words):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done


def trained_alike(script, packages, budget):
    """Launch ``script`` by torchrun and by monetrun, and compare; give what monetrun found, and what it said.

    Words after the script's name are options of monetrun.
    """
    skip_without(packages)
    script, *more = script.split()
    path = str(SCRIPTS / script)
    launch("torch.distributed.run", "--standalone", path, "plain")
    options = ("--budget", budget, "--implementations", "exact", "--solver-seconds", "3", "--json", *more)
    done = launch("monetrun", "--standalone", *options, path, "planned")
    plain, planned = torch.load("plain.0"), torch.load("planned.0")
    assert planned["losses"] == plain["losses"]
    assert planned["state"].keys() == plain["state"].keys()
    assert [k for k in plain["state"] if not torch.equal(plain["state"][k], planned["state"][k])] == []
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "packages", "budget"),
    [
        ("real_trainer.py", ("transformers", "accelerate"), "0.7x"),
        pytest.param(  # has its own recomputation
            "real_trainer_checkpointing.py", ("transformers", "accelerate"), "0.9x", marks=pytest.mark.nightly
        ),
        ("real_accelerate.py --no-probe", ("transformers", "accelerate"), "0.7x"),
        ("real_timm.py", ("timm",), "0.75x"),  # AdamW's step takes most of what these small networks have
        ("real_peft.py --no-probe", ("transformers", "peft"), "0.7x"),
    ],
)
def test_a_real_script_trains_as_under_torchrun_within_the_budget(script, packages, budget):
    found, _ = trained_alike(script, packages, budget)
    assert found["planned_peak_bytes"] <= found["budget_bytes"] < found["plain_peak_bytes"]
    assert found["measured_peak_bytes"] <= found["budget_bytes"]


@pytest.mark.slow
def test_lightning_averages_and_accumulates_as_under_torchrun_and_says_which_steps_have_no_plan():
    # SWA's last epoch updates the statistics of BatchNorm without a momentum, which reads a number back from a tensor
    found, said = trained_alike("real_lightning.py", ("lightning",), "0.7x")
    assert found["planned_peak_bytes"] <= found["budget_bytes"]
    assert (
        "Sequential runs without a plan from now on, nothing of its forward was captured: it depends on the data"
        in said
    )
    assert "batchnorm.py" in said
    assert "its budget is not enforced" in said
