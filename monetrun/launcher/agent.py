"""Runs torchrun's agent, and ends with the exit code and the traceback of the worker that failed first.

``torch.distributed.run`` starts the workers, so that each of its flags, ``PET_*`` variables and defaults keeps its
meaning. This module changes only what surrounds that: what is printed, how fast workers are stopped, and that no folder
is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import logging
import math
import os
import shutil
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from monetrun.core.errors import MonetrunError
from monetrun.core.patched import patched
from monetrun.launcher.failure import report_failure
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.process import (
    Stopped,
    exit_of,
    exit_on_signals,
    restored_environment,
    restored_signal_handlers,
    temporary_folder,
)
from monetrun.launcher.ranks import local_world_size
from monetrun.launcher.workers import Workers, watched_workers
from monetrun.runtime.settings import KEEPS_LOGS

# How long a node waits to join, beside the solver's seconds: torch's 600, and a trial run of the nodes that have met.
_JOIN_SECONDS = 600 + 1800

# torch's messages that repeat what monetrun prints: (logger, how the message begins). LOGLEVEL shows them all.
_REDUNDANT_MESSAGES = (
    ("torch.distributed.run", "\n*****"),
    ("torch.distributed.elastic.multiprocessing.api", "failed (exitcode"),
    ("torch.distributed.elastic.multiprocessing.api", "Sending process %s closing signal"),
    ("torch.distributed.elastic.multiprocessing.api", "Closing process %s via signal"),
    ("torch.distributed.elastic.agent.server.api", "Received %s death signal"),
    ("torch.distributed.elastic.multiprocessing.errors.error_handler", "no error file defined for parent"),
)


# Called when the nodes have met, with the store that they share, this node's rank, how many they are, whether they
# cannot meet anew, and with what this node's workers have failed that were started before, else 0; gives the variables
# of this node's workers, or None: the nodes have to meet anew.
Joined = Callable[[Any, int, int, bool, int], Mapping[str, str] | None]


def launch(options: LaunchOptions, environment: Mapping[str, str], joined: Joined | None = None) -> int:
    """Run the workers as torchrun does until all have ended.

    This process's environment and signal handlers are restored at the end.

    Args:
        options: of the launch.
        environment: variables to add to the workers' environment.
        joined: gives further ones each time the nodes have met, before workers start.

    Returns:
        0, or the exit code of the worker that failed first, 128 + n for signal n; or ``Stopped`` if a signal stopped
        the launcher. The reason of a failure has then been printed to stderr.

    Raises:
        MonetrunError: the nodes did not find one another; or from ``joined``.
    """
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    ranks = local_world_size(options)
    args = copy.copy(options.torchrun)  # run() writes into it
    with (
        restored_environment(environment),
        _run_path(args),
        restored_signal_handlers(),
        _filtered_torch_logs(),
        watched_workers(args) as workers,
        _log_folder(options, args),
        _agreeing(options, joined, workers) as meetings,
    ):
        if ranks > 1 and "OMP_NUM_THREADS" not in os.environ and not options.quiet:
            print("monetrun: OMP_NUM_THREADS=1 in each worker, as under torchrun; set it to change it", file=sys.stderr)
        try:
            # torch leaves the rendezvous open to the other nodes then
            with exit_on_signals(_stopped, named=args.signals_to_handle):
                # record() writes the reason to the error file that a scheduler may have given to this process.
                record(run.run)(args)
        except ChildFailedError as error:
            return report_failure(options, error.failures, workers.stopped_pids)
        except SignalException as error:
            print(f"monetrun: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            return Stopped(128 + error.sigval)
        except (RendezvousError, DistError) as error:
            where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
            raise _alone(error, where, have_met=bool(meetings)) from error
    return 0


def _stopped(number: int) -> BaseException:
    from torch.distributed.elastic.multiprocessing import SignalException

    return SignalException(f"stopped by signal {number}", signal.Signals(number))


def _alone(error: Exception, where: str, *, have_met: bool) -> MonetrunError:
    """The rendezvous ended with ``error``: the nodes do not find one another, or no more."""
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

    reason = str(error) or type(error).__name__
    if have_met and not isinstance(error, (RendezvousClosedError, RendezvousTimeoutError)):
        lost = f"the node that has the rendezvous's store ({where}) has ended: {reason}"
        return MonetrunError(lost, "its own messages say why")
    return MonetrunError(
        f"the nodes did not meet{' again' * have_met} at {where}: {reason}",
        "check --rdzv-endpoint or --master-addr and --master-port; --standalone needs neither",
    )


def launch_again(options: LaunchOptions, environment: Mapping[str, str], joined: Joined | None = None) -> int:
    """``launch``, after another launch in this process."""
    _forget_launch()
    return launch(options, environment, joined)


def _forget_launch() -> None:
    """Free the store of the last launch, and with it the port; remove what it has told a scheduler of its failure."""
    gc.collect()
    if told := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            os.unlink(told)


@contextlib.contextmanager
def _agreeing(options: LaunchOptions, joined: Joined | None, workers: Workers) -> Iterator[Sequence[int]]:
    """Call ``joined`` at the end of each rendezvous, after which workers have a store of their own.

    It sees this process's environment without the variables that it gave before.

    Yields:
        How many nodes have met, each time.
    """
    from torch.distributed.elastic.rendezvous import registry

    original = registry.get_rendezvous_handler
    meetings: list[int] = []
    before, given = dict(os.environ), set[str]()

    def get_rendezvous_handler(parameters: Any) -> Any:
        if parameters.min_nodes < parameters.max_nodes:  # some may come while others plan
            parameters.config.setdefault("join_timeout", str(_JOIN_SECONDS + math.ceil(options.solver_seconds)))
        handler = original(parameters)
        itself = weakref.ref(handler)  # in a cycle its store, and the port, would outlive the launch

        def next_rendezvous() -> Any:
            while True:
                own: Any = itself()
                _forget_store(own)
                met = type(own).next_rendezvous(own)
                meetings.append(met.world_size)
                if joined is None:
                    return met
                try:
                    # planning takes an Exception for a fault of monetrun's
                    with exit_on_signals(exit_of, named=options.torchrun.signals_to_handle):
                        _restore(given, before)
                        ended = workers.exit_code(float(options.torchrun.monitor_interval))
                        variables = joined(met.store, met.rank, met.world_size, own.get_backend() == "static", ended)
                except SystemExit as stopped:
                    raise _stopped(int(stopped.code or 0) - 128) from None
                if variables is not None:
                    given.update(variables)
                    os.environ.update(variables)  # workers inherit this process's environment
                    return met

        handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
        return handler

    setattr(registry, "get_rendezvous_handler", get_rendezvous_handler)  # noqa: B010 - mypy rejects the assignment
    try:
        yield meetings
    finally:
        setattr(registry, "get_rendezvous_handler", original)  # noqa: B010


def _restore(names: Iterable[str], environment: Mapping[str, str]) -> None:
    """Have this process's variables of these names as they are in ``environment``."""
    for name in names:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)


def _forget_store(handler: Any) -> None:
    """Have the next workers meet in a new store.

    Torch keeps the last one's, where a rank may find the address of a worker that has ended, and wait for it.
    """
    for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
        if hasattr(handler, name):
            setattr(handler, name, None)


@contextlib.contextmanager
def _run_path(args: argparse.Namespace) -> Iterator[None]:
    """Have workers of ``--run-path`` begin their session when they run: when they import torch they have no rank."""
    if not args.run_path:
        yield
        return
    from torch.distributed import run

    from monetrun.runtime import autoload, run_path

    with (
        restored_environment({autoload.NO_RANK_YET: "1"}),
        patched(run, "run_script_path", run_path.run_script_path),
    ):
        yield


@contextlib.contextmanager
def _filtered_torch_logs() -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not any(
            record.name == name and str(record.msg).startswith(beginning) for name, beginning in _REDUNDANT_MESSAGES
        )

    loggers = [] if "LOGLEVEL" in os.environ else [logging.getLogger(name) for name in dict(_REDUNDANT_MESSAGES)]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


@contextlib.contextmanager
def _log_folder(options: LaunchOptions, args: argparse.Namespace) -> Iterator[None]:
    """Set ``args.log_dir`` to a new folder unless the user named one; remove it at the end unless logs were wanted.

    torchrun would make such a folder in /tmp and leave it there.
    """
    if args.log_dir or args.logs_specs or options.keeps_worker_logs:
        os.environ[KEEPS_LOGS] = "1"  # workers inherit this process's environment
    if args.log_dir or args.logs_specs:
        yield
        return
    args.log_dir = str(temporary_folder("torchelastic_"))
    if options.keeps_worker_logs and not options.quiet:
        print(f"monetrun: the workers' output goes to {args.log_dir}; --log-dir puts it elsewhere", file=sys.stderr)
    try:
        yield
    finally:
        if not options.keeps_worker_logs:
            shutil.rmtree(args.log_dir, ignore_errors=True)
