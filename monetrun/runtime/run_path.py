"""A worker of ``--run-path``: the script runs in a process of multiprocessing's, which has a rank only once it runs."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from typing import Any

from torch.distributed import run

from monetrun.core.errors import MonetrunError
from monetrun.runtime import autoload

_run_script_path = run.run_script_path  # before the launcher puts ours in its place


def run_script_path(script: str, *arguments: Any) -> None:
    """Torch's function of that name, in a session; it ends as a process of its own would have.

    ``multiprocessing`` calls no excepthook, and gives each exception the exit code 1.
    """
    os.environ.pop(autoload.NO_RANK_YET, None)
    with _ending_as_a_program():
        autoload.autoload()
        _run(script, *arguments)


@contextlib.contextmanager
def _ending_as_a_program() -> Iterator[None]:
    """What is registered with ``atexit`` runs at the end, also of a fork, where it would not."""
    if isinstance(multiprocessing.current_process(), SpawnProcess):
        yield
        return
    atexit._clear()  # the launcher's
    try:
        yield
    finally:
        atexit._run_exitfuncs()


def _run(script: str, *arguments: Any) -> None:
    try:
        _run_script_path(script, *arguments)
    except Exception as error:  # noqa: BLE001 - as at the end of a process of its own
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        sys.exit(error.exit_code if isinstance(error, MonetrunError) else 1)
