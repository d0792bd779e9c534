"""How workers end under torch's agent: how they are stopped, and what is known of those that have failed."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monetrun.core.patched import patched
from monetrun.launcher.failure import exit_code_of
from monetrun.runtime.settings import AS_IS_MARK, PROBED, Settings

# With what a worker ends so that the launch starts anew (``unplannable_use``).
START_ANEW = PROBED

# In the report folder: workers have been started anew for the mark there. A script may end with any code of its own.
_ANEW_ONCE = "started_anew"

# For so long torch waits until workers have ended that it has asked to, unless --shutdown-timeout says otherwise.
_SHUTDOWN_SECONDS = 30

# How long to wait for workers that were killed.
KILLED_SECONDS = 5


@dataclass
class Workers:
    """The workers of one node.

    Attributes:
        stopped_pids: of those that had to be stopped.
        failures: torch's ``ProcessFailure`` by local rank, of those that were started last.
    """

    stopped_pids: set[int] = field(default_factory=set)
    failures: dict[int, Any] = field(default_factory=dict)

    def exit_code(self, monitor_seconds: float) -> int:
        """With what those that were started last have failed; 0 where they have not. Then they are forgotten."""
        failures = dict(self.failures)
        self.failures.clear()
        return exit_code_of(failures, self.stopped_pids, monitor_seconds) if failures else 0


@contextlib.contextmanager
def watched_workers(args: argparse.Namespace) -> Iterator[Workers]:
    """Watch how workers end, and have them end as ``_close`` says."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import PContext

    workers = Workers()
    with (
        patched(PContext, "close", _close(args, workers)),
        patched(PContext, "wait", _wait(workers)),
        patched(LocalElasticAgent, "_monitor_workers", _monitor()),
    ):
        yield workers


def _close(args: argparse.Namespace, workers: Workers) -> Any:
    """A ``PContext.close`` that applies ``--shutdown-timeout`` however a run ends, and kills on a second Ctrl-C.

    After a worker's failure torch always waits 30 s, and a signal ends the waiting before workers have ended.
    """
    from torch.distributed.elastic.multiprocessing import PContext, SignalException

    wanted = getattr(args, "shutdown_timeout", None)  # torch 2.11 has no such option
    if wanted is None and (text := os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")).isdigit():
        wanted = int(text)
    close = PContext.close

    def close_in_time(self: Any, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        seconds = (_SHUTDOWN_SECONDS if timeout is None else timeout) if wanted is None else wanted
        workers.stopped_pids.update(pid for pid in self.pids().values() if _is_running(pid))
        interrupts, last = int(death_sig == signal.SIGINT), None
        while True:
            try:
                close(self, death_sig, seconds)
                break
            except SignalException as error:
                last = error
            interrupts += last.sigval == signal.SIGINT
            death_sig, seconds = (signal.SIGKILL, KILLED_SECONDS) if interrupts > 1 else (signal.SIGTERM, seconds)
        if last is not None:
            raise last

    return close_in_time


def _wait(workers: Workers) -> Any:
    """A ``PContext.wait`` that tells ``workers`` which have failed."""
    from torch.distributed.elastic.multiprocessing import PContext

    wait = PContext.wait

    def told_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(self, *args, **kwargs)
        if result is not None:
            workers.failures.clear()
            workers.failures.update(result.failures)
        return result

    return told_wait


def _monitor() -> Any:
    """An agent's ``_monitor_workers``: where workers start anew for a mark of theirs, that takes no restart.

    The number of the restart stays torch's: workers meet under it in the store.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monitor_workers = LocalElasticAgent._monitor_workers

    def monitor(self: Any, worker_group: Any) -> Any:
        result = monitor_workers(self, worker_group)
        if _starts_anew(result.failures, os.environ):
            worker_group.spec.max_restarts += 1
            self._remaining_restarts += 1
        return result

    return monitor


def _starts_anew(failures: Mapping[int, Any], environment: Mapping[str, str]) -> bool:
    """Whether a worker ended since models have to run as they are, which it has noted in the report folder.

    It is so once in a launch: that is noted there, too.
    """
    if all(failure.exitcode != START_ANEW for failure in failures.values()):  # or there are none
        return False
    folder = Settings.from_environment(environment).report_folder
    if not folder or not Path(folder, AS_IS_MARK).exists() or Path(folder, _ANEW_ONCE).exists():
        return False
    Path(folder, _ANEW_ONCE).touch()
    return True


def _is_running(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # ended, and its exit code has been read
        return False
