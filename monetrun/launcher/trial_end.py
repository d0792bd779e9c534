"""Ends all processes of a trial run, so that none of them leaves what the run would stumble over.

A process that is killed while it writes leaves half a file: of a data set's cache that would be read from then on. And
what unlinks named shared memory when the processes that use it are gone must not be killed with them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from monetrun.runtime.settings import PREFIX
from monetrun.runtime.trial_files import BEGAN, NO_FILES

# How long processes may take to end.
_END_SECONDS = 1.0

# They end by themselves, after those that they clean up for; the latter after two seconds, of names that never come
# again.
_LATE_CLEANER = "torch_shm_manager"
_CLEANERS = ("multiprocessing.resource_tracker", _LATE_CLEANER)


def end(process: subprocess.Popen[bytes], record_file: str) -> None:
    """Kill what is left of a trial run, and wait for it: the run may need its ports and its devices.

    Processes are found by the group of ``process``, and those in sessions of their own by their environment. Files that
    the trial has made, and which a process writes to at that moment, are removed.

    Args:
        process: the trial's first one.
        record_file: of the trial.
    """
    members = functools.partial(_members, process.pid, record_file)
    for one in members():  # what is written stays as it is
        _signal(one, signal.SIGSTOP)
    there = members()
    cleaners = [one for one in there if _is(one, *_CLEANERS)]
    others = [one for one in there if one not in cleaners]
    unfinished: list[str] = []
    try:
        unfinished += _made_since(_written_by(others), record_file)
    finally:  # whatever comes, none stays stopped
        for one in others:
            _signal(one, signal.SIGKILL)
        for one in cleaners:
            _signal(one, signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    psutil.wait_procs([one for one in there if not _is(one, _LATE_CLEANER)], timeout=_END_SECONDS)
    deadline = time.monotonic() + _END_SECONDS
    while left := [one for one in members() if not _is(one, _LATE_CLEANER)]:  # what was begun meanwhile
        for one in left:
            _signal(one, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for path in unfinished:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _members(group: int, record_file: str) -> list[psutil.Process]:
    """The processes of a group, and what a trial with this record has started beside: servers, launched workers."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if one.pid == os.getpid() or one.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getpgid(one.pid) == group or one.environ().get(PREFIX + "RECORD_FILE") == record_file:
                found.append(one)
    return found


def _signal(one: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error, OSError):
        one.send_signal(number)


def _is(one: psutil.Process, *names: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return any(name in word for name in names for word in one.cmdline())
    return False


def _written_by(processes: Iterable[psutil.Process]) -> Iterator[str]:
    """The regular files that they have open for writing."""
    for one in processes:
        for fd in _listed(f"/proc/{one.pid}/fd"):
            with contextlib.suppress(OSError, ValueError, StopIteration):
                path = os.readlink(f"/proc/{one.pid}/fd/{fd}")
                told = Path(f"/proc/{one.pid}/fdinfo/{fd}").read_text().splitlines()
                flags = int(next(line for line in told if line.startswith("flags:")).split()[1], 8)
                if flags & (os.O_WRONLY | os.O_RDWR) and path.startswith("/") and stat.S_ISREG(os.lstat(path).st_mode):
                    yield path


def _listed(folder: str) -> Sequence[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return ()


def _made_since(paths: Iterable[str], record_file: str) -> list[str]:
    """Those of ``paths`` that did not exist when the trial began, where the file system tells."""
    folder, found = os.path.dirname(os.path.abspath(record_file)), []
    with contextlib.suppress(OSError):
        began = os.stat(record_file + BEGAN).st_mtime_ns / 1e9
        for path in dict.fromkeys(paths):
            if path.startswith((os.path.join(folder, ""), *NO_FILES)):
                continue
            told = subprocess.run(["stat", "--format=%.9W", "--", path], capture_output=True, text=True)
            with contextlib.suppress(ValueError):  # "?", or nothing: it is not told
                found += [path] if float(told.stdout) >= began else []
    return found
