"""The trial run decides nothing: a launch does without what it cannot see. Scripts here need no torch, but for one."""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from monetrun.commands.main import main
from monetrun.core import codec
from monetrun.core.errors import NeverTrained
from monetrun.core.plain import PlainPeaks
from monetrun.launcher import trial
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.ranks import Ranks
from monetrun.runtime.probe import UNCOMPARED, UNSEEN
from monetrun.runtime.settings import MEASURE, PROBE, Settings
from support.launcher import MONETRUN, run
from support.step_records import chain_record

pytestmark = pytest.mark.usefixtures("plain_surroundings")

# What only a trial has.
OWN = {"MONETRUN_TRIAL", "WANDB_MODE", "COMET_MODE", "COMET_AUTO_LOG_DISABLE"}
OWN |= {"MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "SWANLAB_MODE", "NEPTUNE_MODE", "CLEARML_OFFLINE_MODE"}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script; gives its path. Its variable ``where`` is "trial" or its rank."""
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(
            "import json, os, signal, subprocess, sys\n"
            "where = 'trial' if os.environ.get('MONETRUN_TRIAL') else os.environ['RANK']\n" + text
        )
        return str(path)

    return write


def test_a_trial_has_the_variables_and_arguments_of_rank_0s_worker(script, tmp_path):
    path = script("json.dump([dict(os.environ), sys.argv], open(where, 'w'))\n")
    words = ["--nproc-per-node=2", "--role=trainers", "--max-restarts=3", "--rdzv-id=17"]
    assert main([*words, "--quiet", path, "--rank=${local_rank}"]) == 0
    (tried, tried_with), (ran, ran_with) = (json.loads((tmp_path / name).read_text()) for name in ("trial", "0"))
    assert tried_with == ran_with == [path, "--rank=0"]
    assert tried.keys() - ran.keys() == OWN
    assert ran.keys() - tried.keys() == set()
    theirs = [name for name in ran if not name.startswith("MONETRUN_")]
    different = {name for name in theirs if tried[name] != ran[name]}
    assert different <= {
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"),
        "TORCHELASTIC_RUN_ID",  # of a launch on one node, torchrun draws it
    }
    assert (ran["ROLE_NAME"], ran["TORCHELASTIC_MAX_RESTARTS"], ran["OMP_NUM_THREADS"]) == ("trainers", "3", "1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ended without a training step in its trial run"),
        ("if where == 'trial': sys.exit(96)", "failed in its trial run: exit code 96"),
        ("if where == 'trial': os.kill(os.getpid(), signal.SIGSEGV)", "failed in its trial run: killed by SIGSEGV;"),
        ("if where == 'trial': os.kill(os.getpid(), 9)", "killed by SIGKILL, which the kernel sends when memory runs"),
    ],
)
def test_a_script_runs_whatever_becomes_of_its_trial_and_strict_gives_85(script, tmp_path, capfd, text, reason):
    path = script(f"{text}\nopen(where, 'w').close()\n")
    assert main([path]) == 0
    assert (tmp_path / "0").exists()
    printed = capfd.readouterr().err
    assert reason in printed
    assert printed.count("planning at the first step instead") == 1
    (tmp_path / "0").unlink()
    assert main(["--strict", path]) == 85
    assert reason.rstrip(";") in capfd.readouterr().err
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize(
    ("constant", "text", "reason"),
    [
        ("_WAITING_SECONDS", "time.sleep(600)", "it waits, for "),
        (
            "_WAITING_SECONDS",
            "import torch; torch.nn.Linear(8, 8)(torch.ones(4, 8)); time.sleep(600)",
            "it waits, for ",
        ),
        ("_MOST_SECONDS", "while True: pass", "it has called no model in training for "),
    ],
)
def test_a_trial_of_a_server_that_never_trains_and_never_ends_is_ended(
    script, tmp_path, capfd, monkeypatch, constant, text, reason
):
    monkeypatch.setattr(trial, constant, 1.0)
    path = script(f"import time\nif where == 'trial':\n    {text}\nopen(where, 'w').close()\n")
    assert main([path]) == 0
    assert (tmp_path / "0").exists()
    printed = capfd.readouterr().err
    assert f"the trial run cannot see {path} train: {reason}" in printed
    assert printed.count("planning at the first step instead") == 1


def test_what_took_too_long_as_the_plain_step_is_not_tried_again(script, tmp_path, monkeypatch, capfd):
    path = script("print(where, file=open('runs', 'a'))\n")
    (tmp_path / f"{trial.PLAIN_FILE}{UNSEEN}").write_text(json.dumps({"reason": "it is slow", "too_long": True}))
    options = launch_parser().parse_launch([path])[0]
    settings = Settings(mode=PROBE, record_file=str(tmp_path / "record.json"))
    place = (Ranks("cpu", 1, 1), settings, tmp_path, Console(quiet=True))
    assert trial.run_trial(options, *place, needed=False).record is None
    assert not (tmp_path / "runs").exists()
    assert "it is slow; planning at the first step instead" in capfd.readouterr().err
    with pytest.raises(NeverTrained):  # ``monetrun plan`` waits
        trial.run_trial(options, *place)
    assert (tmp_path / "runs").exists()


@pytest.mark.parametrize("unseen", [False, True])
def test_a_record_is_there_where_the_trial_ends_as_its_models_are_compared_with_eager(script, tmp_path, unseen):
    record = chain_record(8)
    (tmp_path / "made.json").write_text(codec.dumps(record))
    text = f"import os, shutil\nshutil.copy('made.json', 'record.json{UNCOMPARED}')\n"
    if unseen:  # it has opened a file a second time, say
        text += f"open('record.json{UNSEEN}', 'w').write('{{}}')\n"
    path = script(f"{text}os._exit(9)\n")
    options = launch_parser().parse_launch([path])[0]
    settings = Settings(mode=PROBE, record_file=str(tmp_path / "record.json"))
    assert trial.run_trial(options, Ranks("cpu", 1, 1), settings, tmp_path, Console(quiet=True)).record == record


def test_a_trial_works_where_processes_that_it_has_started_did():
    work = "import time\nwhile time.process_time() < 0.3: pass\nopen('/dev/null', 'w').write('x' * 300_000)"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}])\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        seconds, nbytes = trial._work(process.pid)
        assert seconds > 0.28  # counted in ticks of the system
        assert nbytes > 300_000 or sys.platform != "linux"
        process.stdin.close()


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), AttributeError("as on macOS"), RuntimeError("empty")])
def test_where_bytes_are_not_told_processor_time_alone_is_work(monkeypatch, error):
    def io_counters(self):
        raise error

    monkeypatch.setattr(psutil.Process, "io_counters", io_counters, raising=False)
    seconds, nbytes = trial._work(os.getpid())
    assert seconds > 0
    assert nbytes == 0


def test_a_trial_does_not_wait_while_its_processes_end_unseen(tmp_path, monkeypatch):
    assert looks_until_it_waits(tmp_path, monkeypatch, [(9.0, 0), (3.0, 0), (5.0, 0), (1.0, 0), (1.0, 0)]) == 5


def test_a_trial_that_reads_or_writes_does_not_wait(tmp_path, monkeypatch):
    """As a slow download: the worker would find a part of the file."""
    mib = 1 << 20
    work = [(1.0, 90 * mib), (1.0, 96 * mib), (1.0, 102 * mib), (1.0, 98 * mib), (1.0, 98 * mib + mib // 3)]
    assert looks_until_it_waits(tmp_path, monkeypatch, work) == 5


def looks_until_it_waits(tmp_path, monkeypatch, work):
    """How often a trial is looked at whose processes have then worked, and read and written, so much."""
    monkeypatch.setattr(trial, "_WAITING_SECONDS", 0.0)
    left, looks = iter(work), []
    monkeypatch.setattr(trial, "_work", lambda pid: next(left))

    def wait(timeout):
        looks.append(timeout)
        raise subprocess.TimeoutExpired("script", timeout)

    found = (tmp_path / "record", tmp_path / "unseen")
    assert trial._wait(SimpleNamespace(wait=wait, pid=1), found, tmp_path / "begun", math.inf) == 0
    assert "it waits" in found[1].read_text()
    return len(looks)


def test_a_trial_whose_optimizer_makes_no_step_ends(script, capfd):
    """It may step in a hook of a process group that the trial does not have."""
    text = (
        "import os, torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(1000 if 'MONETRUN_TRIAL' in os.environ else 2):\n"
        "    model(torch.ones(4, 8)).sum().backward()\n"
        "assert 'MONETRUN_TRIAL' not in os.environ, 'the trial has not ended'\n"
    )
    assert main([script(text)]) == 0
    assert "no optimizer of torch.optim makes a step in 256 backward passes" in capfd.readouterr().err


@pytest.mark.nightly
def test_where_nodes_run_a_path_the_trial_ends_as_elsewhere_and_trains_nothing_to_its_end(script, tmp_path):
    """The agent has told workers by then that they have no rank yet."""
    text = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    optimizer.zero_grad()\n    model(torch.ones(4096, 64)).sum().backward()\n    optimizer.step()\n"
        "open(f'ended_{where}', 'w').close()\n"
    )
    endpoint = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=last_call_timeout=1")
    done = run(MONETRUN, "--budget=1GiB", *endpoint, "--run-path", script(text))
    assert [path.name for path in tmp_path.glob("ended_*")] == ["ended_0"]
    assert "planning at the first step" not in done.stderr
    assert "4 training steps" in done.stderr


@pytest.mark.nightly
def test_what_a_script_keeps_of_the_last_run_by_another_name_is_kept(script, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "train.log").write_text("of the last run")
    text = (
        "import torch\nos.replace('train.log', 'train.log.1')\nopen('train.log', 'w').write(where)\n"
        "model = torch.nn.Linear(64, 64)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n    model(torch.ones(512, 64)).sum().backward()\n    optimizer.step()\n"
    )
    done = run(MONETRUN, "--budget=1GiB", script(text))
    assert (tmp_path / "train.log.1").read_text() == "of the last run"
    assert (tmp_path / "train.log").read_text() == "0"
    assert f"it renames {tmp_path}/train.log, which was there before" in done.stderr
    assert "planning at the first step instead" in done.stderr
    assert "planned peak" in done.stderr


@pytest.mark.parametrize(
    ("steps", "told"),
    [(5, "3 training steps, as far as it was told"), pytest.param(1, "left no report (", marks=pytest.mark.nightly)],
)
def test_a_script_that_ends_by_exit_of_os_is_not_told_that_nothing_was_planned(script, steps, told):
    text = (
        "import torch\nmodel = torch.nn.Linear(64, 64)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"for _ in range({steps}):\n"
        "    optimizer.zero_grad()\n    model(torch.ones(512, 64)).sum().backward()\n    optimizer.step()\n"
        "os._exit(0)\n"
    )
    done = run(MONETRUN, "--budget=1GiB", script(text))
    assert told in done.stderr
    assert "nothing was planned" not in done.stderr


def test_a_script_that_updates_its_parameters_itself_is_told_that_nothing_is_planned(script, capfd):
    text = (
        "import torch\nmodel = torch.nn.Linear(8, 8)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 8)).sum().backward()\n"
        "    for p in model.parameters():\n"
        "        p.data.add_(p.grad, alpha=-0.1)\n"
    )
    assert main([script(text)]) == 0
    printed = capfd.readouterr().err
    assert "without an optimizer of torch.optim; nothing is planned before one makes a step" in printed
    assert "monetrun: nothing was planned: no optimizer of torch.optim was made" in printed


@pytest.mark.nightly
def test_a_script_that_trains_no_parameters_of_a_module_is_told_so_and_reads_no_message_of_ours(script, capfd):
    """As in style transfer: the picture is optimized."""
    text = (
        "import logging, sys, torch\nlogging.basicConfig(level=logging.DEBUG, stream=sys.stdout)\n"
        "model, picture = torch.nn.Linear(8, 8).requires_grad_(False), torch.ones(4, 8, requires_grad=True)\n"
        "optimizer = torch.optim.Adam([picture])\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n    model(picture).sum().backward()\n    optimizer.step()\n"
    )
    assert main([script(text)]) == 0
    printed = capfd.readouterr()
    assert "nothing was planned: the optimizers train no parameters of a module" in printed.err
    assert "monetrun" not in printed.out


@pytest.mark.parametrize("session", [False, True], ids=["its group's", "others'"])
def test_processes_that_a_trial_leaves_are_ended_before_the_workers_start(session, script, tmp_path):
    path = script(
        f"words = dict(start_new_session={session})\n"
        "if where == 'trial': open('pid', 'w').write(str(subprocess.Popen(['sleep', '60'], **words).pid))\n"
        "else: open('state', 'w').write(open(f'/proc/{open(\"pid\").read()}/stat').read().split()[2]\n"
        "     if os.path.exists(f'/proc/{open(\"pid\").read()}') else 'gone')\n"
    )
    assert main(["--quiet", path]) == 0
    assert (tmp_path / "state").read_text() in ("gone", "Z")


@pytest.mark.skipif(not os.path.exists("/bin/sh"), reason="no shell ends it")
def test_a_trial_ends_with_a_launcher_that_is_killed(script, tmp_path):
    path = script("import time\nopen('pid', 'w').write(f'{os.getpid()} ')\nwhile True: time.sleep(0.01)\n")
    seen = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-m", "monetrun", path], stderr=subprocess.DEVNULL) as launcher:
        while not (seen.exists() and seen.read_text().endswith(" ")):
            assert launcher.poll() is None
            time.sleep(0.05)
        tried = psutil.Process(int(seen.read_text()))
        launcher.kill()
    try:
        assert psutil.wait_procs([tried], timeout=60)[1] == []
    finally:
        if tried.is_running():
            tried.kill()


def test_a_launch_within_a_trial_ends_that_trial(tmp_path, monkeypatch):
    class Left(Exception):
        pass

    def leave(code):
        raise Left(code)

    trial.end_outer_trial()
    record = tmp_path / "record.json"
    for name, value in Settings(mode="probe", record_file=str(record)).to_environment().items():
        monkeypatch.setenv(name, value)
    trial.end_outer_trial()  # a worker of another launch
    monkeypatch.setenv("MONETRUN_TRIAL", "1")
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Left):
        trial.end_outer_trial()
    assert json.loads(Path(f"{record}.unseen").read_text())["reason"] == "it launches monetrun itself"


def test_a_launch_in_a_worker_plans_its_own_workers(monkeypatch):
    monkeypatch.setenv("MONETRUN_WORKER_PID", "1")
    assert not Settings().claim()
    for name, value in Settings().to_environment().items():
        monkeypatch.setenv(name, value)
    assert Settings().claim()


def test_a_script_may_end_with_any_code_and_runs_once(script, tmp_path):
    path = script("print(where, file=open('runs', 'a'))\nsys.exit(96)\n")
    assert main(["--quiet", path]) == 96
    assert (tmp_path / "runs").read_text().split() == ["trial", "0"]


def test_where_monetrun_is_imported_but_not_installed_nothing_is_tried(script, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    path = script("import torch\nprint(where, file=open('runs', 'a'))\n")
    assert main([path]) == 0
    assert (tmp_path / "runs").read_text().split() == ["0"]
    assert "nothing is planned: monetrun can be imported but is not installed" in capfd.readouterr().err
    for words in (["--strict", path], ["plan", "--budget", "1GiB", path]):
        assert main(words) == 2
        assert "nothing can be planned: monetrun can be imported but is not installed" in capfd.readouterr().err
    assert (tmp_path / "runs").read_text().split() == ["0"]


def test_where_torch_is_told_to_load_no_hooks_nothing_is_tried(script, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    path = script("import torch\nprint(where, file=open('runs', 'a'))\n")
    assert main([path]) == 0
    assert (tmp_path / "runs").read_text().split() == ["0"]
    assert "nothing is planned: TORCH_DEVICE_BACKEND_AUTOLOAD=0" in capfd.readouterr().err


@pytest.mark.parametrize("reserved_bytes", [0, 1 << 20])
def test_plain_peaks_that_torch_does_not_count_are_none(tmp_path, monkeypatch, reserved_bytes):
    peaks = PlainPeaks(reserved_bytes, reserved_bytes, 0, 3)

    def run(options, environment, stderr_file, record_file, most_seconds):
        Path(record_file).write_text(codec.dumps(peaks))

    monkeypatch.setattr(trial, "run_process", run)
    monkeypatch.setattr(trial, "trial_environment", lambda *args: {})
    settings = Settings(mode=MEASURE, record_file=str(tmp_path / "peaks.json"))
    found = trial.measure_plain_run(SimpleNamespace(quiet=True), None, settings, tmp_path, Console(file=io.StringIO()))
    assert found == (peaks if reserved_bytes else None)


TRAINED = (
    "import torch\nmodel = torch.nn.Linear(64, 64)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for step in range({steps}):\n"
    "    optimizer.zero_grad()\n    y = model(torch.ones(512, 64))\n    y.sum().backward()\n    optimizer.step()\n"
    "{then}"
)


def test_a_file_that_says_how_far_training_is_is_written_by_the_run_alone(script, tmp_path):
    then = "    with open('progress', 'a+' if step else 'w') as file:\n        file.write(where)\n"
    then = "    assert step or not os.path.exists('progress')\n" + then
    done = run(MONETRUN, "--budget=1GiB", script(TRAINED.format(steps=4, then=then)))
    assert done.returncode == 0
    assert (tmp_path / "progress").read_text() == "0000"
    assert "planning at the first step" not in done.stderr  # the trial has seen its step by then


def test_what_loaders_are_writing_when_the_trial_ends_is_not_left_as_half_a_file(script, tmp_path):
    (tmp_path / "there").write_text("kept")
    text = (
        "import time\nif os.fork() == 0:\n"
        "    if where != 'trial':\n        os._exit(0)\n"
        "    files = [open('item', 'w'), open('there', 'a'), open(os.devnull, 'w')]\n"
        "    files[0].write('half'), files[0].flush(), open('whole', 'w').close()\n"
        "    os.rename('whole', 'ready')\n    time.sleep(600)\n"
        "import pathlib\n"
        "while where == 'trial' and not os.path.exists('ready'):\n    time.sleep(0.01)\n"
    )
    done = run(MONETRUN, "--budget=1GiB", script(text + TRAINED.format(steps=2, then="")))
    assert done.returncode == 0
    assert not (tmp_path / "item").exists()
    assert (tmp_path / "there").read_text() == "kept"
    assert (tmp_path / "ready").exists()


@pytest.mark.nightly
def test_named_shared_memory_of_a_trial_is_free_again(script):
    name = f"monetrun_test_{os.getpid()}"
    text = (
        "from multiprocessing import shared_memory\n"
        f"memory = shared_memory.SharedMemory(name='{name}', create=True, size=4096)\n"
    )
    done = run(
        MONETRUN, "--budget=1GiB", script(text + TRAINED.format(steps=2, then="memory.close(), memory.unlink()"))
    )
    assert done.returncode == 0, done.stderr
    assert not Path("/dev/shm", name).exists()


def test_a_pipe_is_left_to_the_run(script, tmp_path):
    os.mkfifo(tmp_path / "data")
    time.sleep(0.02)  # a tick of the file system's clock
    writer = subprocess.Popen(["sh", "-c", "printf '1\\n2\\n' > data"], cwd=tmp_path)
    then = "import torch\nwith open('seen', 'w') as file:\n    print(list(open('data')), where, file=file)\n"
    done = run(MONETRUN, "--budget=1GiB", script(then + TRAINED.format(steps=2, then="")))
    assert done.returncode == writer.wait() == 0
    assert (tmp_path / "seen").read_text() == "['1\\n', '2\\n'] 0\n"
    assert f"it opens the pipe {tmp_path}/data, which can be read once" in done.stderr
