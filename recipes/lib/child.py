"""Run a command with a time limit, and end all that it started: the workers of a launch have sessions of their own."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_SECONDS = 4.0  # between asking a command to end and killing it
_PR_SET_CHILD_SUBREAPER = 36
_TRACEBACK = re.compile(r"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):", re.MULTILINE)
_KEPT_CHARACTERS = 6000


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        exit_code: negative for a signal; None where its time was up.
        seconds: that it took.
        stdout, stderr: what it printed.
        left_over: names of processes that it had left running, and that were ended.
    """

    exit_code: int | None
    seconds: float
    stdout: str
    stderr: str
    left_over: tuple[str, ...] = ()

    @property
    def traceback(self) -> str:
        """The first traceback near the end of stderr, with all that follows it; without one, the end of stderr."""
        tail = self.stderr[-_KEPT_CHARACTERS:]
        found = _TRACEBACK.search(tail)
        return tail[found.start() :] if found else tail[-_KEPT_CHARACTERS // 3 :]


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants, so that none is lost (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_child(
    command: Sequence[str], environment: Mapping[str, str], limit_seconds: float, log: Path, folder: Path
) -> Ended:
    """Run ``command`` to its end, for ``limit_seconds`` at most; then no process of it is left.

    Args:
        command: to run.
        environment: all of its variables.
        limit_seconds: after which it is ended, with all of its descendants.
        log: where its output is written, with the endings ``.out`` and ``.err``.
        folder: to run it in.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    out, err = log.with_name(log.name + ".out"), log.with_name(log.name + ".err")
    others = descendants()
    started = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(max(0.0, limit_seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # monetrun and torchrun then end their workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:  # also when this process is interrupted
            left_over = end_descendants(others)
            process.wait()
    seconds = time.monotonic() - started
    return Ended(code, seconds, out.read_text(errors="replace"), err.read_text(errors="replace"), left_over)


def descendants() -> set[psutil.Process]:
    """All of this process's."""
    return set(psutil.Process().children(recursive=True))


def end_descendants(spared: set[psutil.Process]) -> tuple[str, ...]:
    """Kill this process's descendants, except ``spared``; gives the names of those that were running."""
    names = []
    for _ in range(5):  # one may start another meanwhile
        alive = descendants() - spared
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    names.append(process.name())
                process.kill()
        psutil.wait_procs(alive, timeout=GRACE_SECONDS)
        if not descendants() - spared:
            break
    return tuple(names)
