"""A worker of ``--run-path``: the script runs in a process of multiprocessing's, which has a rank only once it runs."""

from __future__ import annotations

import os
import sys
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
    autoload.autoload()
    try:
        _run_script_path(script, *arguments)
    except Exception as error:  # noqa: BLE001 - as at the end of a process of its own
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        sys.exit(error.exit_code if isinstance(error, MonetrunError) else 1)
