"""What a trial run has imported decides whether its record still holds: files of modules, and packages of models."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from monetrun.core.sources import Sources, content
from monetrun.launcher import keys, sources
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.ranks import Ranks
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


def test_what_a_script_imports_and_the_settings_that_it_reads_are_found(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    for name in ("read.yaml", "results.json", "unread.toml", "log.txt", "unnamed.yaml"):
        (tmp_path / name).write_text("1")
    (tmp_path / "script.py").write_text(
        "from monetrun.runtime import trial_sources\ntrial_sources.watch()\nimport model, torchvision, sys, types\n"
        "sys.modules['lazy'] = type('Lazy', (types.ModuleType,), {'__getattr__': lambda *_: 1 / 0})('lazy')\n"
        "for name in ('read.yaml', 'results.json', 'log.txt', 'unnamed.yaml'): open(name).read()\n"
        "open('results.json', 'w').close()\ntrial_sources.write('record')\n"
    )
    words = ["--config=read.yaml", "--out", "results.json", "--other", "unread.toml", "log.txt"]
    subprocess.run([sys.executable, "script.py", *words], cwd=tmp_path, check=True)
    found = sources.of_trial(str(tmp_path / "record"))
    own = {path.removeprefix(f"{tmp_path}/") for path in found.files if path.startswith(str(tmp_path))}
    assert own - {"script.py"} == {"model.py", "read.yaml"}
    assert found.packages == {"torchvision": importlib.metadata.version("torchvision")}


def keep(store, base, files, packages=()):
    versions = {name: importlib.metadata.version(name) for name in packages}
    return sources.keep(store, base, Sources({str(file): content(str(file)) for file in files}, versions))


def test_the_key_changes_with_a_file_and_changes_back(store, tmp_path):
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    assert sources.key_now(store, "base") == "base"  # no trial is known
    first = keep(store, "base", [model], ["torchvision"])
    assert first == sources.key_now(store, "base") != "base"
    model.write_text(MODEL + "\n")
    second = sources.key_now(store, "base")
    model.unlink()
    assert len({first, second, sources.key_now(store, "base")}) == 3
    model.write_text(MODEL)
    assert sources.key_now(store, "base") == first


def test_what_was_edited_during_the_trial_is_tried_again(store, tmp_path):
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    read = Sources({str(model): content(str(model))}, {})
    model.write_text(MODEL + "\n")
    assert sources.keep(store, "base", read) != sources.key_now(store, "base")


def test_the_key_changes_with_the_version_of_a_package(store, monkeypatch):
    first = keep(store, "base", [], ["torchvision"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    assert sources.key_now(store, "base") != first


def test_without_a_cache_or_a_trial_the_key_is_the_launchs(store, tmp_path):
    read = sources.of_trial(str(tmp_path / "record.json"))
    assert sources.key_now(None, "base") == sources.keep(None, "base", read) == sources.keep(store, "base", read)


def test_of_a_large_file_size_and_time_are_looked_at(tmp_path):
    path = tmp_path / "library.so"
    path.write_bytes(bytes(2 << 20))
    before = content(str(path))
    os.utime(path, (1, 1))
    assert before != content(str(path))


@pytest.mark.nightly
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


def test_a_launch_from_another_folder_has_a_key_of_its_own(tmp_path, monkeypatch):
    """There a relative name among the arguments, or a module, may be another file."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        options, _ = launch_parser().parse_launch(["../script.py", "--config", "config.yaml"])
        found.append(keys.record_key(options, Ranks("cpu", 1, 1)))
    assert found[0] != found[1]
