"""recipes/gpu_check.py on a CPU, with a network that takes milliseconds: the document it writes, and when it stops."""

import importlib.util
import json
import sys
import time

import pytest
import torch

from lib import cells, networks
from monetrun.core.errors import InfeasibleBudget
from support.paths import RECIPES


@pytest.fixture(scope="module")
def check():
    """The recipe as a module, with one more network."""
    sys.path.insert(0, str(RECIPES))
    try:
        spec = importlib.util.spec_from_file_location("gpu_check", RECIPES / "gpu_check.py")
        module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(RECIPES))
    module.NETWORKS["tiny"] = module.Network(
        lambda: networks.SmallResNet(channels=16, blocks=2), 0, (0, 0), module.of_type(networks.Block), (8, (32, 32))
    )
    yield module
    del sys.modules["gpu_check"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


def run(check, *argv):
    common = (
        "--device cpu --scale small --networks tiny --pairs 2 --solver-seconds 0.5 --algorithm greedy --seconds 2000"
    )
    kinds = "in-place,output,intermediate,fused"
    return check.main([*common.split(), "--implementations", kinds, "--skip", "conformance", "kernels", *argv])


@pytest.fixture(scope="module")
def document(check, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "gpu.json"
    run(check, "compile", "--shares", "0.6", "--precisions", "fp32", "--out", str(path))
    return path, json.loads(path.read_text())


def by_method(document):
    return {(c["method"], c["share"]): c for c in document["cells"]}


def test_every_cell_has_what_was_planned_and_measured(document):
    found = by_method(document[1])
    assert {k: c["status"] for k, c in found.items()} == {
        ("eager", None): "ok",
        ("planned", 0.6): "ok",
        ("checkpoint", None): "ok",
    }
    eager = found["eager", None]
    assert eager["allocated_bytes"] == eager["held_bytes"] + eager["activation_bytes"]
    cell = found["planned", 0.6]
    assert cell["budget_bytes"] == eager["held_bytes"] + int(0.6 * eager["activation_bytes"])
    assert cell["planned_peak_bytes"] <= cell["budget_bytes"]
    assert cell["allocated_bytes"] == pytest.approx(cell["planned_peak_bytes"], rel=0.02)
    assert cell["measured_share"] <= 0.6
    assert cell["refused_by_the_cap"] is None
    assert cell["planned_ratio"] >= cell["bound_ratio"] > 0
    assert cell["pairs"] == 2
    assert found["checkpoint", None]["measured_share"] < 0.9


def test_measured_cells_are_kept_and_the_others_are_skipped_after_the_deadline(check, document):
    path, before = document
    argv = ["compile", "--shares", "0.6", "0.7", "--precisions", "fp32", "--out", str(path), "--resume", "--seconds"]
    after = run(check, *argv, "0")
    ok = {k: c for k, c in by_method(before).items() if c["status"] == "ok"}
    assert {k: by_method(after)[k] for k in ok} == ok
    assert by_method(after)["planned", 0.7]["status"] == "skipped"
    assert len(after["commands"]) == 2
    assert json.loads(path.read_text()) == after


def test_a_cell_that_fails_or_reaches_the_deadline_is_written_and_the_next_one_runs(check, tmp_path):
    results = cells.Results({}, tmp_path / "gpu.json", False)

    def broken(share):
        raise RuntimeError("no such kernel\nat all")

    def infeasible(share):
        raise InfeasibleBudget("too little", smallest_bytes=7)

    measured = {"allocated_bytes": 1, "measured_share": 1.0, "seconds": 1.0, "ratio": 1.0}
    key = {"network": "n", "precision": "fp32", "share": None}
    later = time.monotonic() + 600
    results.cell({**key, "method": "broken"}, broken, later)
    results.cell({**key, "method": "slow"}, lambda share: time.sleep(600), time.monotonic() + 1)
    results.cell({**key, "method": "good"}, lambda share: measured, later)
    results.cell({**key, "method": "planned"}, infeasible, later)
    found = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert [c["status"] for c in found] == ["failed", "skipped", "ok", "infeasible"]
    assert found[0]["reason"] == "RuntimeError: no such kernel"
    assert found[1]["reason"].startswith("stopped after ")
    assert found[2].items() >= measured.items()
    assert found[3]["smallest_bytes"] == 7


@pytest.mark.slow
def test_torchs_own_planner_runs_beside_the_eager_model_in_bf16(check, tmp_path):
    document = run(check, "checkpoint", "--shares", "0.5", "--precisions", "bf16")
    found = by_method(document)
    assert {k[0]: c["status"] for k, c in found.items()} == {"eager": "ok", "planned": "ok", "compile": "ok"}
    assert 0 < found["compile", 0.5]["measured_share"] < 1.5


def test_without_the_solvers_packages_plans_are_the_greedy_ones(check, monkeypatch):
    missing = lambda name: None if name == "cvxpy" else object()  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    args = check.arguments([])
    assert (args.missing, args.algorithm) == (["cvxpy"], "greedy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert check.arguments([]).algorithm == "hierarchical"
