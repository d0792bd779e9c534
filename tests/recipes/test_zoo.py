"""The plans that come with monetrun: those of the tables beside them, used after import, and refused when changed."""

import json
from dataclasses import replace

import pytest

import make_zoo
from lib import offline
from monetrun.core.options import Options
from monetrun.core.plan import Schedule
from monetrun.core.step import StepRecord, replay
from monetrun.machine import archive
from monetrun.machine.store import Store
from monetrun.planning.known import KnownSchedules, known_key, known_schedules
from support import launcher
from support.paths import RECIPES

ZOO = RECIPES / "zoo"
DEVICES = ("cpu", "cuda")
SCRIPT = """
import torch
import torch.nn.functional as F
import torchvision

model = torchvision.models.vgg16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
F.cross_entropy(model(torch.randn(176, 3, 224, 224)), torch.zeros(176, dtype=torch.int64)).backward()
optimizer.step()
"""


def table(device):
    return json.loads((ZOO / f"{device}.json").read_text())["networks"]


def rows(device, network, model="h100"):
    found = [row for row in table(device)[network]["plans"] if row["cost_model"] == f"roofline:{model}"]
    return {row["budget"]: row for row in found}


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "cache")
    archive.import_(made, ZOO / "cpu.tar.xz")
    return made


@pytest.mark.parametrize("device", DEVICES)
def test_the_archive_has_the_networks_of_its_table_and_is_small(device, tmp_path):
    file, store, networks = ZOO / f"{device}.tar.xz", Store(tmp_path), table(device)
    assert set(networks) == set(make_zoo.NAMES[device])
    assert archive.import_(store, file) == (len(networks), 0)
    for network in networks.values():
        key = known_key([network["graph"]])
        known = store.get("plan", key, KnownSchedules)
        assert 0 < len(known.steps) <= len(network["plans"])
    assert file.stat().st_size < 100_000


@pytest.mark.parametrize("device", DEVICES)
def test_the_table_keeps_its_budgets(device):
    for network in table(device).values():
        for row in network["plans"]:
            assert row["peak"] <= row["budget"] or row["bound"] is None  # the smallest that is feasible
            assert row["bound"] is None or row["overhead"] >= row["bound"] - 1e-4


def test_schedules_of_the_archive_give_what_the_table_says(store):
    joint, *sizes = make_zoo.captured("vgg16", "cpu")
    assert joint.graph.structural_fingerprint == table("cpu")["vgg16"]["graph"]
    record = make_zoo.step(joint, offline.costs(joint, "roofline:h100"), *sizes)
    known = store.get("plan", known_key([joint.graph.structural_fingerprint]), KnownSchedules)
    assert {step.graphs[0].fingerprint for step in known.steps} == {joint.graph.fingerprint}
    plain = make_zoo.planner.baseline(record).plain
    replayed = [replay(record, step.schedules_for([joint.graph])) for step in known.steps]
    found = {(round(r.peak_bytes / plain.peak_bytes, 4), round(r.seconds / plain.seconds - 1, 4)) for r in replayed}
    assert {(row["peak"], row["overhead"]) for row in rows("cpu", "vgg16").values()} <= found


@pytest.mark.nightly
@pytest.mark.usefixtures("plain_surroundings")
def test_a_plan_of_the_same_network_begins_with_what_was_imported_unless_changed(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(SCRIPT)
    archive.import_(Store(tmp_path / "cache"), ZOO / "cpu.tar.xz")
    words = ("plan", "--cost-model", "roofline:h100", "--budget", "0.5x", "--solver-seconds", "0.05", "train.py")
    with_it = launcher.run(launcher.MONETRUN, *words)
    assert "planning begins with" in with_it.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    row = rows("cpu", "vgg16")[0.5]
    assert plan["overhead"] <= row["overhead"] + 0.01

    store = Store(tmp_path / "cache")
    (recorded,) = (entry.key for entry in store.entries() if entry.kind == "probe")
    (graph,) = store.get("probe", recorded, StepRecord).graphs
    assert {step.graphs[0].fingerprint for step in _known(store, graph).steps} == {graph.fingerprint}
    assert known_schedules(store, [graph], Options())
    steps = _known(store, graph).steps
    changed = KnownSchedules((_changed(steps[0]), *steps[1:]))
    store.put("plan", known_key([graph.structural_fingerprint]), changed)
    assert known_schedules(store, [graph], Options()) == []
    assert "is not used" in caplog.text


def _known(store, graph):
    return store.get("plan", known_key([graph.structural_fingerprint]), KnownSchedules)


def _changed(step):
    """Without its last run of an operator."""
    plan = step.graphs[0]
    schedule = Schedule(plan.schedule.forward, plan.schedule.backward[:-1])
    used = {(s.operator, s.implementation) for s in (*schedule.forward, *schedule.backward)}
    named = tuple(n for n in plan.implementations if (n.operator, n.index) in used)
    return replace(step, graphs=(replace(plan, schedule=schedule, implementations=named),))
