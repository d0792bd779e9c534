"""A trial ends before the script renames what was there before it, and for no other renaming."""

from __future__ import annotations

import logging
import logging.handlers
import os
import shutil
import time
from pathlib import Path

import pytest

from monetrun.runtime import trial_renames


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """What the trial would have ended for, in a folder with older files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial_renames.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    for name in ("tmp", "models", "pip_cache", "own", "runs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("old")
    for name in ("train.log", "out.lock"):
        (tmp_path / name).write_text("old")
    (tmp_path / "latest").symlink_to("train.log")
    time.sleep(0.02)  # a tick of the file system's clock
    (tmp_path / "began").touch()
    found, open_ended = [], [True]
    began_ns = (tmp_path / "began").stat().st_mtime_ns

    def end(path: str) -> None:
        if open_ended:
            found.append(os.path.relpath(path, tmp_path))

    trial_renames.end_before(end, began_ns, [str(tmp_path / "own")])
    yield found
    open_ended.clear()  # an audit hook stays


def replaces_it():
    os.replace("train.log", "train.log.1")


def moves_it():
    shutil.move("train.log", "runs")


def has_written_into_it():
    with open("train.log", "a") as file:
        file.write("another line")
    os.rename("train.log", "train.log.1")


def rolls_over():
    handler = logging.handlers.RotatingFileHandler("train.log", backupCount=1)
    handler.doRollover()
    handler.close()


@pytest.mark.parametrize("rename", [replaces_it, moves_it, has_written_into_it, rolls_over])
def test_a_trial_ends_before_an_older_file_is_renamed(ends, rename):
    rename()
    assert ends == ["train.log"]


def test_a_trial_ends_before_an_older_folder_is_renamed(ends):
    Path("runs").rename("runs.1")
    assert ends == ["runs"]


def writes_anew():
    Path("part").write_text("new")
    os.replace("part", "train.log")


def removes():
    os.remove("train.log")
    shutil.rmtree("runs")


def makes_a_folder():
    os.mkdir("part")
    os.rename("part", "whole")


def exchanges_a_link():
    os.rename("latest", "last")


def of_a_lock():
    os.rename("out.lock", "out.lock.1")


def elsewhere():
    for name in ("tmp", "models", "pip_cache", "own"):
        os.rename(f"{name}/old", f"{name}/older")


def fails():
    with pytest.raises(FileNotFoundError):
        os.rename("nothing", "something")


def by_a_tracker(monkeypatch=None):
    exec("import os\nos.rename('train.log', 'train.log.1')", {"__name__": "wandb.sdk"})


@pytest.mark.parametrize(
    "rename",
    [
        writes_anew,
        removes,
        makes_a_folder,
        exchanges_a_link,
        of_a_lock,
        elsewhere,
        fails,
        by_a_tracker,
    ],
)
def test_a_trial_goes_on_with_what_is_its_own_or_the_same_in_the_run(ends, rename):
    rename()
    assert ends == []


def test_what_the_trial_has_made_is_its_own_whatever_the_time_on_the_files_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial_renames.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "old").write_text("old")
    found = []
    trial_renames.end_before(found.append, time.time_ns() + 3600 * 10**9, [])
    os.mkdir("folder")
    open("file", "w").close()
    for name in ("folder", "file", "old"):
        os.rename(name, f"{name}.1")
    assert found == [str(tmp_path / "old")]
