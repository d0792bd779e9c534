"""Launches, compared with torchrun's: what workers see, how they end, and what is printed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from monetrun.commands.main import main
from monetrun.commands.run import run_launch
from monetrun.core.errors import MonetrunError
from monetrun.launcher import agent, workers
from monetrun.launcher.failure import first_failure
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.process import exit_on_signals
from monetrun.runtime.traceback_file import install_excepthook
from support.paths import SCRIPTS

BEHAVE = str(SCRIPTS / "behave.py")
DUMP = str(SCRIPTS / "dump_worker.py")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MONETRUN = [sys.executable, "-m", "monetrun", "--no-probe", "--quiet"]  # these scripts train nothing

pytestmark = pytest.mark.usefixtures("plain_surroundings")


def parsed(*words: str) -> LaunchOptions:
    return launch_parser().parse_launch(words)[0]


def launched(*words: str) -> int:
    """Launch from this process, which has imported torch already: that saves two seconds."""
    return agent.launch(parsed(*words), {})


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "tmp").iterdir() if p.name.startswith("torchelastic_"))


def dumped(folder: Path) -> dict[str, dict]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


# ---- what a worker sees


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([DUMP, "--budget", "3", "", "a b"], marks=pytest.mark.slow),
        ["--nproc-per-node", "2", "-m", "dump_worker", "--", "-x", "${local_rank}"],
    ],
)
def test_a_worker_sees_exactly_what_torchrun_gives_it(words, tmp_path, monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    seen = []
    for command in (TORCHRUN, MONETRUN):
        folder = tmp_path / command[-1]
        folder.mkdir()
        monkeypatch.setenv("DUMP_FOLDER", str(folder))
        subprocess.run([*command, *words], check=True, timeout=600, capture_output=True)
        ranks = dumped(folder)
        for rank in ranks.values():
            for varying in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "DUMP_FOLDER"):
                assert rank["environ"].pop(varying)
            for ours in [name for name in rank["environ"] if name.startswith("MONETRUN_")]:
                assert command == MONETRUN
                del rank["environ"][ours]
        seen.append(ranks)
    assert seen[0] == seen[1]
    threads = [rank["environ"].get("OMP_NUM_THREADS") for rank in seen[1].values()]
    assert threads in ([None], ["1", "1"])
    assert len(left_behind(tmp_path)) == 1  # torchrun's


def test_the_given_environment_reaches_the_workers_and_this_processs_is_restored(tmp_path, monkeypatch):
    monkeypatch.setenv("DUMP_FOLDER", str(tmp_path))
    before, handlers = dict(os.environ), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    options = parsed("--nproc-per-node=2", "--no-python", sys.executable, DUMP)
    assert agent.launch(options, {"MONETRUN_TEST": "planned"}) == 0
    assert [rank["environ"]["MONETRUN_TEST"] for rank in dumped(tmp_path).values()] == ["planned", "planned"]
    assert dict(os.environ) == before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert options.torchrun.rdzv_id == "none"


def test_workers_that_start_again_meet_in_a_store_of_their_own(tmp_path):
    """In the one that torch keeps, gloo may find the address of a worker that has ended."""
    script = tmp_path / "ports.sh"
    script.write_text(f'echo $MASTER_PORT >>{tmp_path}/ports\n[ "$TORCHELASTIC_RESTART_COUNT" = 1 ]\n')
    assert launched("--standalone", "--max-restarts=1", "--no-python", "sh", str(script)) == 0
    first, second = (tmp_path / "ports").read_text().split()
    assert first != second


def test_a_taken_default_port_does_not_stop_a_standalone_run(tmp_path, monkeypatch):
    monkeypatch.setenv("DUMP_FOLDER", str(tmp_path))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another process has taken it, which serves as well
            taken.bind(("", 29500))
            taken.listen()
        assert launched("--standalone", DUMP) == 0
    assert dumped(tmp_path)["0"]["environ"]["MASTER_PORT"] != "29500"


# ---- how it ends


@pytest.mark.parametrize(("how", "code"), [("exit:0", 0), ("exit:3", 3), ("kill:9", 137), ("kill:11", 139)])
def test_the_exit_code_is_the_workers_own(how, code, capfd, tmp_path):
    assert launched(BEHAVE, f"0={how}") == code
    printed = capfd.readouterr().err
    assert ("SIGKILL" in printed) == (how == "kill:9")
    assert ("rank 0 failed: " in printed) == bool(code)
    assert "torch" not in printed
    assert left_behind(tmp_path) == []


def test_a_single_workers_traceback_is_printed_once_as_python_prints_it(capfd):
    assert launched(BEHAVE, "0=raise") == 1
    ours = capfd.readouterr().err
    environment = {**os.environ, "RANK": "0"}
    plain = subprocess.run([sys.executable, BEHAVE, "0=raise"], env=environment, capture_output=True, text=True)
    assert ours == plain.stderr
    assert ours.endswith("ValueError: a bad batch\n")


def test_the_first_rank_to_fail_is_named_and_its_traceback_comes_last(capfd, tmp_path):
    assert launched("--nproc-per-node=2", "--quiet", BEHAVE, "0=obey", "1=raise") == 1
    lines = capfd.readouterr().err.splitlines()
    culprit = next(i for i, line in enumerate(lines) if line.startswith("monetrun: rank 1 failed first: "))
    assert lines[culprit].count("rank") == 1
    assert lines[culprit + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: a bad batch"
    assert 'raise ValueError("a bad batch")' in "\n".join(lines[culprit:])
    assert not [line for line in lines if "torch" in line]
    assert left_behind(tmp_path) == []


def test_the_traceback_of_a_script_run_with_run_path_is_printed():
    done = subprocess.run([*MONETRUN, "--run-path", BEHAVE, "0=raise"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stdout == "ready\n"
    assert done.stderr.count("ValueError: a bad batch") == 1
    assert done.stderr.endswith("ValueError: a bad batch\n")


def test_an_uncaught_monetrun_error_sets_the_exit_code_of_the_launch():
    assert launched(BEHAVE, "0=refuse") == 84
    assert launched("--run-path", BEHAVE, "0=refuse") == 84


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch leaves the log files open
def test_redirected_output_is_kept_and_the_traceback_still_shown(capfd, tmp_path):
    assert launched("--redirects=3", BEHAVE, "0=raise") == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "ValueError: a bad batch" in printed.err
    (folder,) = left_behind(tmp_path)
    assert folder in printed.err
    (log,) = (tmp_path / "tmp" / folder).rglob("stdout.log")
    assert log.read_text() == "ready\n"


def test_the_shutdown_timeout_holds_when_a_worker_fails(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    began = time.monotonic()
    assert launched("--nproc-per-node=2", BEHAVE, "0=exit:3", "1=stay") == 3
    assert time.monotonic() - began < 25  # torch's own default is 30


def interrupted(*words: str, signals: list[int]) -> tuple[int, float, str]:
    """Exit code, seconds from the first signal to the end, and stderr of a launch that gets these signals."""
    process = subprocess.Popen([*MONETRUN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.5)
    error = process.communicate(timeout=600)[1]
    return process.returncode, time.monotonic() - began, error


def test_ctrl_c_and_sigterm_stop_at_once(tmp_path, monkeypatch):
    code, _, error = interrupted(BEHAVE, "0=obey", signals=[signal.SIGTERM])
    assert (code, error) == (143, "monetrun: stopped by SIGTERM\n")
    # the worker ignores signals: the first Ctrl-C waits for the timeout, the second does not
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    code, seconds, error = interrupted(BEHAVE, "0=stay", signals=[signal.SIGINT, signal.SIGINT])
    assert code == 130
    assert seconds < 30
    assert error.endswith("monetrun: stopped by SIGINT\n")
    assert left_behind(tmp_path) == []


def closings(monkeypatch, args, death_sig, *further):
    """What torch's ``close`` is called with (signal, seconds) when workers end at last; ``further`` signals come."""
    from torch.distributed.elastic.multiprocessing import PContext, SignalException

    closed, coming = [], list(further)

    def close(self, death_sig, timeout):
        closed.append((death_sig, timeout))
        if coming:
            raise SignalException("", coming.pop(0))

    monkeypatch.setattr(PContext, "close", close)
    with workers.watched_workers(args), pytest.raises(SignalException) if further else contextlib.nullcontext():
        PContext.close(SimpleNamespace(pids=dict), death_sig, 30)
    return closed


def test_workers_get_torchs_time_to_end_and_only_a_second_ctrl_c_kills_them(monkeypatch):
    args = parsed("train.py").torchrun
    for number in (signal.SIGINT, signal.SIGTERM, None):
        assert closings(monkeypatch, args, number) == [(number, 30)]
    killed = (signal.SIGKILL, workers.KILLED_SECONDS)
    once, again = (signal.SIGINT, 30), (signal.SIGTERM, 30)
    assert closings(monkeypatch, args, signal.SIGINT, signal.SIGINT) == [once, killed]
    assert closings(monkeypatch, args, signal.SIGTERM, signal.SIGTERM) == [again, again]
    assert closings(monkeypatch, args, signal.SIGINT, signal.SIGTERM, signal.SIGINT) == [once, again, killed]
    assert closings(monkeypatch, args, signal.SIGTERM, signal.SIGINT) == [again, again]
    args.shutdown_timeout = 7
    for number in (signal.SIGINT, None):
        assert closings(monkeypatch, args, number) == [(number, 7)]


def failure(exitcode: int, timestamp: int, raised_ns: int = 0, pid: int = 1) -> SimpleNamespace:
    message = {"extraInfo": {"timestamp": str(timestamp), "timestamp_ns": str(raised_ns)}} if raised_ns else "none"
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, message=message, pid=pid)


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        ([failure(1, 9, 9_600_000_000), failure(1, 9, 9_500_000_000)], 1),  # within one second, by nanoseconds
        ([failure(1, 9, 9_600_000_000), failure(-9, 9)], 1),  # killed, which made the other's connection fail
        ([failure(-9, 9, pid=7), failure(3, 10)], 1),  # killed, but by the agent, since the other had failed
        ([failure(1, 9, 9_500_000_000, pid=7), failure(-15, 10)], 1),  # raised when the agent stopped it
        ([failure(1, 9), failure(1, 9, 9_500_000_000)], 1),  # an exit without a recorded exception counts as later
        ([failure(1, 8), failure(1, 9, 9_500_000_000)], 0),
    ],
)
def test_the_first_failure_is_found_among_those_of_one_second(failures, culprit):
    assert first_failure(dict(enumerate(failures)), {7}, 0.1) == culprit


# ---- the error file


def test_the_error_file_is_what_torchs_own_handler_writes(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    files = []
    for name in ("torch", "ours"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / name))
        try:
            raise ValueError("a bad batch")
        except ValueError as error:
            if name == "torch":
                ErrorHandler().record_exception(error)
            else:
                install_excepthook()
                sys.excepthook(type(error), error, error.__traceback__)
        files.append(json.loads((tmp_path / name).read_text())["message"])
    assert files[1]["extraInfo"].pop("timestamp_ns")[:6] == files[0]["extraInfo"]["timestamp"][:6]
    for file in files:
        file["extraInfo"]["timestamp"] = ""
    assert files[0] == files[1]
    read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "ours"))
    assert read.message["message"] == "ValueError: a bad batch"
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["ours", "torch"]


def test_the_excepthook_is_installed_once_and_only_in_workers(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: called.append(error))
    plain = sys.excepthook
    install_excepthook()
    assert sys.excepthook is plain
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder" / "file"))
    install_excepthook()
    installed = sys.excepthook
    install_excepthook()
    assert sys.excepthook is installed
    error = KeyError("x")
    sys.excepthook(KeyError, error, None)  # an error file that cannot be written does not hide the traceback
    assert called == [(KeyError, error, None)]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "file"))
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert len(called) == 2
    assert not (tmp_path / "file").exists()


# ---- before and after the workers run


class FakeJob:
    """Replaces the planning before a launch and the report after it."""

    seen: ClassVar[list[object]] = []
    mode = "run"
    ranks = SimpleNamespace(kind="cpu")

    def __init__(self, options):
        self.options = options

    def prepare(self):
        os.environ["OMP_NUM_THREADS"] = "17"  # as a solver may do; the workers must not get it
        return {"MONETRUN_TEST": self.options.budget}

    def finish(self, exit_code):
        self.seen.append((self.options.budget, exit_code))

    def close(self):
        self.seen.append("closed")


def test_a_launch_plans_first_and_reports_last(tmp_path, monkeypatch):
    monkeypatch.setenv("DUMP_FOLDER", str(tmp_path))
    monkeypatch.setattr("monetrun.launcher.job.Job", FakeJob)
    monkeypatch.setattr(FakeJob, "seen", [])
    assert run_launch(parsed("--budget", "1GiB", DUMP)) == 0
    environ = dumped(tmp_path)["0"]["environ"]
    assert (environ["MONETRUN_TEST"], environ.get("OMP_NUM_THREADS")) == ("1GiB", None)
    assert FakeJob.seen == [("1GiB", 0), "closed"]


def test_sigterm_while_planning_ends_with_143_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("DUMP_FOLDER", str(tmp_path))
    monkeypatch.setattr("monetrun.launcher.job.Job", FakeJob)
    monkeypatch.setattr(FakeJob, "seen", [])
    monkeypatch.setattr(FakeJob, "prepare", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run_launch(parsed(DUMP))
    assert end.value.code == 143
    assert FakeJob.seen == ["closed"]
    assert dumped(tmp_path) == {}
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_signal_to_be_handled_that_comes_while_planning_ends_the_launch_as_sigterm_does(tmp_path, monkeypatch):
    """As SLURM's ``--signal=USR1``: its default action would leave the trial's processes."""
    monkeypatch.setenv("DUMP_FOLDER", str(tmp_path))
    monkeypatch.setattr("monetrun.launcher.job.Job", FakeJob)
    monkeypatch.setattr(FakeJob, "seen", [])
    monkeypatch.setattr(FakeJob, "prepare", lambda self: os.kill(os.getpid(), signal.SIGUSR1) or {})
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        named = "--signals-to-handle=SIGTERM, SIGUSR1,SIGINT,SIGKILL,SIGNONE"
        with pytest.raises(SystemExit) as end:
            run_launch(parsed(named, DUMP))
        assert (end.value.code, came, FakeJob.seen, dumped(tmp_path)) == (128 + signal.SIGUSR1, [], ["closed"], {})
        assert run_launch(parsed(DUMP)) == 0  # where it is not named, it is not handled
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_hangup_or_quit_while_planning_cleans_up_unless_it_is_ignored(number, tmp_path, monkeypatch):
    monkeypatch.setenv("DUMP_FOLDER", str(tmp_path))
    monkeypatch.setattr("monetrun.launcher.job.Job", FakeJob)
    monkeypatch.setattr(FakeJob, "seen", [])

    def prepare(self):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr(FakeJob, "prepare", prepare)
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does
    try:
        with pytest.raises(SystemExit) as end:
            run_launch(parsed(DUMP))
        assert (end.value.code, signal.getsignal(number)) == (143, signal.SIG_IGN)
        signal.signal(number, signal.default_int_handler)
        with pytest.raises(SystemExit) as end:  # the second signal does not interrupt the cleaning up
            run_launch(parsed(DUMP))
        assert (end.value.code, signal.getsignal(number)) == (128 + number, signal.default_int_handler)
    finally:
        signal.signal(number, before)
    assert FakeJob.seen == ["closed", "closed"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_a_hangup_quit_or_signal_to_be_handled_leaves_no_trial_process_and_no_folder(number, tmp_path, monkeypatch):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    script, seen = tmp_path / "train.py", tmp_path / "pid"
    script.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(f'{os.getpid()} ')\ntime.sleep(100)\n")

    def send_when_the_trial_runs():
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not (seen.exists() and seen.read_text().endswith(" ")):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send_when_the_trial_runs)
    before = signal.signal(number, lambda *given: None)  # where it is not handled, the test fails and the run goes on
    sender.start()
    try:
        with pytest.raises(SystemExit) as end:
            run_launch(parsed("--quiet", "--signals-to-handle=SIGUSR1", str(script), str(seen)))
    finally:
        sender.join()
        signal.signal(number, before)
    assert end.value.code == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen.read_text()), 0)
    assert list((tmp_path / "tmp").glob("monetrun_*")) == []


def test_an_interpreter_that_is_not_there_is_named_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setenv("PYTHON_EXEC", "/nowhere/python")
    assert main([DUMP]) == 2
    assert capsys.readouterr().err == (
        "monetrun: error: PYTHON_EXEC is '/nowhere/python', which is not a program that can be run\n"
        "  unset it, or name a Python\n"
    )


def test_a_program_that_the_system_cannot_start_is_named(tmp_path, monkeypatch, capsys):
    program = tmp_path / "train"
    program.write_text("no first line that names an interpreter")
    program.chmod(0o755)
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    assert main(["--quiet", "--no-python", str(program)]) == 2
    assert f"{program} cannot be started: Exec format error" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["folder", "file", "no folder"])
def test_a_full_disk_is_the_reason_of_the_failure(when, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/here")

    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    if when == "file":
        monkeypatch.setattr("monetrun.launcher.job.Job.prepare", full)
    elif when == "folder":
        monkeypatch.setattr("tempfile.mkdtemp", full)
    else:
        for name in ("TMPDIR", "TEMP", "TMP"):
            monkeypatch.setenv(name, "/nowhere")
        monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere"])
    assert main(["--quiet", DUMP]) == 70
    error = capsys.readouterr().err
    reason = "No usable temporary directory" if when == "no folder" else "/tmp/here: No space left on device"
    assert error.startswith("monetrun: error: a temporary file cannot be written: ")
    assert reason in error
    assert "set TMPDIR to a folder on another disk" in error
    assert "Traceback" not in error
    assert list((tmp_path / "tmp").glob("monetrun_*")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--master-port", "PORT"], "the nodes did not meet at 127.0.0.1:PORT: .*EADDRINUSE"),
        (
            ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=join_timeout=1"],
            "the nodes did not meet at localhost:0: RendezvousTimeoutError",
        ),
    ],
)
def test_nodes_that_do_not_meet_give_one_message(words, message, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(MonetrunError, match=message.replace("PORT", port)):
            launched(*(word.replace("PORT", port) for word in words), BEHAVE)
    assert left_behind(tmp_path) == []


# ---- a rendezvous that other nodes may join

ELASTIC = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=last_call_timeout=1")


@pytest.fixture
def not_ignored():
    """SIGHUP, which is ignored under ``nohup``, ends a process; SIGUSR2, unhandled, does not end the tests' own."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before_too = signal.signal(signal.SIGUSR2, lambda *given: None)
    yield
    signal.signal(signal.SIGHUP, before)
    signal.signal(signal.SIGUSR2, before_too)


def test_a_signal_that_ends_a_launch_before_training_is_told(capfd):
    with pytest.raises(SystemExit) as ended, exit_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert capfd.readouterr().err == "monetrun: stopped by SIGTERM\n"


@pytest.mark.usefixtures("not_ignored")
@pytest.mark.parametrize("when", ["they meet", "they plan"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_to_one_node_before_its_workers_start_leaves_the_rendezvous_to_the_others(
    number, when, monkeypatch, capfd
):
    closed, handlers = [], {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)}
    monkeypatch.setattr(DynamicRendezvousHandler, "shutdown", lambda self: closed.append(self) or True)

    def stop(*_):
        os.kill(os.getpid(), number)

    def plan(*_):
        try:
            stop()
        except Exception:  # noqa: BLE001 - as planning does
            pytest.fail("planning takes it for a fault of its own")

    if when == "they meet":
        monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", stop)
    with exit_on_signals():
        assert agent.launch(parsed("--signals-to-handle=SIGTERM,SIGUSR2", *ELASTIC, BEHAVE), {}, plan) == 128 + number
    assert closed == []
    assert capfd.readouterr().err == f"monetrun: stopped by {signal.Signals(number).name}\n"
    assert {n: signal.getsignal(n) for n in handlers} == handlers


def test_a_store_that_is_lost_while_the_workers_train_is_told_as_that(monkeypatch, tmp_path):
    def lose(self):
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", lose)
    lost = r"the node that has the rendezvous's store \(localhost:0\) has ended: The connection to the C10d store"
    with pytest.raises(MonetrunError, match=lost):
        agent.launch(parsed(*ELASTIC, "--monitor-interval=0.1", BEHAVE, "0=obey"), {}, lambda *_: {})
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("nodes", "given", "expected"),
    [((1, 2), {}, "2430"), ((1, 2), {"join_timeout": "5"}, "5"), ((2, 2), {}, None)],
)
def test_a_node_that_joins_later_waits_while_the_others_plan(nodes, given, expected, monkeypatch):
    seen = []
    monkeypatch.setattr(registry, "get_rendezvous_handler", lambda parameters: seen.append(parameters) or Mock())
    with agent._agreeing(parsed("--solver-seconds=30", BEHAVE), None, workers.Workers()):
        registry.get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "id", *nodes, **given))
    assert seen[0].get("join_timeout") == expected
