"""Which worker failed first, and what is printed about it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Mapping, Set
from typing import Any

from monetrun.launcher.options import LaunchOptions

_CRASHES = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}


def report_failure(options: LaunchOptions, failures: Mapping[int, Any], stopped_pids: Set[int]) -> int:
    """Print to stderr which rank failed first and, last, its traceback.

    Args:
        options: of the launch.
        failures: torch's ``ProcessFailure`` by rank.
        stopped_pids: workers that the agent stopped.

    Returns:
        The exit code of the launch, 0..255.
    """
    args = options.torchrun
    first = first_failure(failures, stopped_pids, float(args.monitor_interval))
    failure = failures[first]
    trace = ""
    if isinstance(failure.message, dict):
        trace = failure.message.get("extraInfo", {}).get("py_callstack", "").rstrip()
    single_worker = args.nproc_per_node == "1" and args.nnodes in ("1", "1:1")
    # Python has printed it to the worker's stderr
    if trace and single_worker and not (options.keeps_worker_logs or args.local_ranks_filter):
        return _exit_code(failure)
    line = f"monetrun: rank {first} failed{'' if single_worker else ' first'}: {_describe_exit(failure)}"
    for rank, other in sorted(failures.items()):
        if rank != first and other.pid not in stopped_pids:
            line += f"; then rank {rank}: {_describe_exit(other)}"
    if failure.exitcode == -signal.SIGKILL:
        line += "\n  the kernel sends SIGKILL when memory runs out: see dmesg, or the container's memory limit"
    print(f"{line}\n{trace}" if trace else line, file=sys.stderr, flush=True)
    return _exit_code(failure)


def exit_code_of(failures: Mapping[int, Any], stopped_pids: Set[int], monitor_seconds: float) -> int:
    """The exit code of ``report_failure``. Arguments as for ``first_failure``."""
    return _exit_code(failures[first_failure(failures, stopped_pids, monitor_seconds)])


def first_failure(failures: Mapping[int, Any], stopped_pids: Set[int], monitor_seconds: float) -> int:
    """The rank that failed first.

    torch compares whole seconds. That is too coarse: a rank that fails takes the others down within milliseconds. Here:

    - a worker that the agent stopped did not fail first;
    - an exception counts from the time it was raised, which the error file records;
    - a crash or a kill, which records nothing, counts from the agent's check before the one that noticed it;
    - any other exit may have happened after these, so it counts one second later than torch's timestamp.

    Args:
        failures: torch's ``ProcessFailure`` by rank.
        stopped_pids: workers that the agent stopped.
        monitor_seconds: how often the agent checks its workers.
    """

    def order(rank: int) -> tuple[bool, float, int]:
        failure = failures[rank]
        seconds = float(failure.timestamp) + 1.0
        if isinstance(failure.message, dict):
            extra = failure.message.get("extraInfo", {})
            seconds = int(extra.get("timestamp_ns", failure.timestamp * 10**9)) / 1e9
        elif failure.exitcode in _CRASHES:
            seconds = failure.timestamp - monitor_seconds
        return failure.pid in stopped_pids, seconds, rank

    return min(failures, key=order)


def _exit_code(failure: Any) -> int:
    """The worker's own exit code; for an uncaught monetrun error, that error's (Python itself exits with 1)."""
    if failure.exitcode < 0:
        return 128 - int(failure.exitcode)
    if isinstance(failure.message, dict) and failure.exitcode == 1:
        return int(failure.message.get("errorCode", 1))
    return int(failure.exitcode)


def _describe_exit(failure: Any) -> str:
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"killed by signal {-failure.exitcode}"
        with contextlib.suppress(ValueError):
            how = f"killed by {signal.Signals(-failure.exitcode).name}"
    return f"{how} (pid {failure.pid})"
