"""A trial that has made training steps ends before the script writes a checkpoint, and not for anything else."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tempfile

import pytest
import torch

from monetrun.runtime import trial_checkpoints
from monetrun.runtime.settings import Settings


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Begins the watch in a folder; gives how often the process would have ended so far."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    for name in ("known", "compiled", "own"):
        (tmp_path / name).mkdir()
    ends, settings = [], Settings(cache_folder=str(tmp_path / "own"))
    with contextlib.ExitStack() as undo:
        begin = trial_checkpoints.end_before(lambda: ends.append(1), undo, settings)
        yield begin, ends
    begin(False)


def saves_to_a_file():
    torch.save(1, "last.pt")


def saves_to_an_open_file():
    with open("known/weights", "wb") as file:
        torch.save(1, file)


def opens_one():
    open("known/last.ckpt", "wb").close()


def renames_one():
    open("known/part", "wb").close()
    shutil.move("known/part", "known/last.ckpt")


def makes_a_folder():
    os.makedirs("out/checkpoint-1")


def says_how_far_it_is():
    with open("known/progress.json", "w") as file:
        file.write("1")


def opens_a_database():
    sqlite3.connect("known/steps.db").close()


@pytest.mark.parametrize(
    "write",
    [
        *(saves_to_a_file, saves_to_an_open_file, opens_one, renames_one, makes_a_folder),
        *(says_how_far_it_is, opens_a_database),
    ],
)
def test_a_checkpoint_ends_a_trial_that_has_begun_to_train(trial, write):
    begin, ends = trial
    write()
    assert ends == []
    shutil.rmtree("out", ignore_errors=True)
    begin()
    write()
    assert ends == [1]


def appends_to_a_log():
    with open("known/log.txt", "a") as file:
        file.write("a line")


def writes_what_passes():
    with tempfile.NamedTemporaryFile("w", dir=".") as file, open(os.devnull, "w") as nowhere:
        print(1, file=file)
        print(1, file=nowhere)


def saves_in_memory():
    torch.save(1, io.BytesIO())


def reads_one():
    torch.load("known/there.pt")


def compiles():
    os.makedirs("compiled/1/2")
    os.makedirs("torchinductor_root/1")
    os.makedirs(".cache/huggingface")


def saves_in_monetruns_folder():
    torch.save(1, "own/0.pt")
    torch.save(1, pathlib.Path("own") / "1.pt")


def makes_a_folder_in_a_child():
    if (child := os.fork()) == 0:
        try:
            os.mkdir("known/of_the_child")
        finally:
            os._exit(0)  # whatever comes, the child runs no further test
    os.waitpid(child, 0)
    assert os.path.isdir("known/of_the_child")


@pytest.mark.parametrize(
    "use",
    [
        *(appends_to_a_log, writes_what_passes, saves_in_memory, reads_one, compiles),
        *(saves_in_monetruns_folder, makes_a_folder_in_a_child),
    ],
)
def test_what_is_no_checkpoint_of_the_script_ends_no_trial(trial, use):
    begin, ends = trial
    torch.save(1, "known/there.pt")
    begin()
    use()
    assert ends == []


def test_after_the_trial_nothing_is_watched(tmp_path):
    save = torch.save
    ends = []
    with contextlib.ExitStack() as undo:
        trial_checkpoints.end_before(lambda: ends.append(1), undo, Settings())()
        assert torch.save is not save
    torch.save(1, tmp_path / "last.pt")
    (tmp_path / "new").mkdir()
    assert (torch.save is save, ends) == (True, [])


CHECKED = """
import torch
model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(256, 32)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), "last.pt")
"""


@pytest.mark.nightly
def test_monetrun_check_writes_no_checkpoint(tmp_path):
    (tmp_path / "train.py").write_text(CHECKED)
    words = ["-m", "monetrun", "check", "--budget", "0.9x", "--solver-seconds", "1", "train.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "last.pt").exists()


# The first step is of a model in evaluation mode: the second one is recorded.
LATER = """
import os, torch
where = "trial" if os.environ.get("MONETRUN_TRIAL") else "run"
model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())]).eval()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(256, 32)).sum().backward()
    optimizer.step()
    if step == 0 and SAVES:
        torch.save(model.state_dict(), where + ".pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("saves", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_trial_that_records_a_later_step_writes_no_checkpoint_before_it(tmp_path, saves):
    (tmp_path / "train.py").write_text(LATER.replace("SAVES", str(saves)))
    words = ["-m", "monetrun", "--budget", "0.9x", "--solver-seconds", "1", "train.py"]
    surroundings = {**os.environ, "MONETRUN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("*.pt")] == ["run.pt"] * saves
    assert ("it writes a checkpoint before the training step that is planned" in done.stderr) == saves
    assert "measured peak" in done.stderr
