"""What a trial run has imported decides whether its record still holds: files of modules, and packages of models."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from monetrun.core import codec
from monetrun.core.sources import SUFFIX, Sources
from monetrun.launcher import keys, sources
from monetrun.machine.store import Store

MODEL = "import torch\ndef made():\n    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())\n"
SCRIPT = """
import torch, model
network = model.made()
optimizer = torch.optim.SGD(network.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    network(torch.ones(1024, 64)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


def test_files_beside_the_script_and_packages_of_models_are_found(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    words = "import model, torchvision; from monetrun.runtime import trial_sources as s; print(*s.imported().files)"
    words += "; print(*s.imported().packages)"
    done = subprocess.run([sys.executable, "-c", words], cwd=tmp_path, capture_output=True, text=True, check=True)
    files, packages = (line.split() for line in done.stdout.splitlines())
    assert str(tmp_path / "model.py") in files
    assert not any("site-packages" in file or os.path.dirname(os.__file__) in file for file in files)
    assert packages == ["torchvision"]


def test_the_key_changes_with_a_file_and_changes_back(store, tmp_path):
    model, record = tmp_path / "model.py", tmp_path / "record.json"
    model.write_text(MODEL)
    assert sources.key_now(store, "base") == "base"  # no trial is known
    (tmp_path / f"record.json{SUFFIX}").write_text(codec.dumps(Sources((str(model),), ("torchvision",))))
    first = sources.keep(store, "base", str(record))
    assert first != "base"
    model.write_text(MODEL + "\n")
    second = sources.key_now(store, "base")
    model.unlink()
    assert len({first, second, sources.key_now(store, "base")}) == 3
    model.write_text(MODEL)
    assert sources.key_now(store, "base") == first


def test_the_key_changes_with_the_version_of_a_package(store, tmp_path, monkeypatch):
    (tmp_path / f"record.json{SUFFIX}").write_text(codec.dumps(Sources((), ("torchvision",))))
    first = sources.keep(store, "base", str(tmp_path / "record.json"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    assert sources.key_now(store, "base") != first


def test_without_a_cache_or_a_trial_the_key_is_the_launchs(store, tmp_path):
    assert sources.key_now(None, "base") == sources.keep(None, "base", str(tmp_path / "r")) == "base"
    assert sources.keep(store, "base", str(tmp_path / "record.json")) == "base"


def test_of_a_large_file_size_and_time_are_looked_at(tmp_path):
    path = tmp_path / "library.so"
    path.write_bytes(bytes(2 << 20))
    before = sources.content(str(path))
    os.utime(path, (1, 1))
    assert before != sources.content(str(path))


def test_settings_are_files_that_the_arguments_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.json", "log.txt"):
        (tmp_path / name).write_text("1")
    assert keys._settings_files(["--config", "a.yaml", "--other=b.json", "--log", "log.txt", "none.toml"]) == [
        "a.yaml",
        "b.json",
    ]


@pytest.mark.slow
def test_a_launch_records_anew_once_a_module_of_the_script_has_changed(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "MONETRUN_CACHE": str(tmp_path / "cache")}

    def launched():
        words = ["-m", "monetrun", "--budget", "1.0x", "--solver-seconds", "1", "train.py"]
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stderr

    assert "(plan from the cache)" not in launched()
    assert "(plan from the cache)" in launched()
    (tmp_path / "model.py").write_text(MODEL.replace("torch.nn.Tanh()", "torch.nn.Tanh(), torch.nn.Linear(64, 64)"))
    changed = launched()
    assert "(plan from the cache)" not in changed
    assert "warning" not in changed
    assert "(plan from the cache)" in launched()
