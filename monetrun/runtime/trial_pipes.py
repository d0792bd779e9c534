"""A trial run ends before the script reads a named pipe: what it would take, the run would wait for in vain."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

from monetrun.runtime import probe
from monetrun.runtime.settings import Settings
from monetrun.runtime.trial_files import NAMES, NO_FILES


def watch(settings: Settings, began_ns: int) -> None:
    """``end_before`` in a trial run that began then: the launch plans at its first step instead."""

    def end(path: str) -> None:
        probe.leave_unseen(f"it opens the pipe {path}, which can be read once", settings.record_file)

    end_before(end, began_ns)


def end_before(end: Callable[[str], None], began_ns: int) -> None:
    """Have ``end`` called with the path, which ends the process, before a pipe is opened that was there before it.

    Args:
        end: ends the process.
        began_ns: when the trial run began, by the file system's clock. The script makes later ones itself, each time.
    """

    def noticed(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], NAMES):
            return
        with contextlib.suppress(OSError, ValueError):  # an exception here would be the script's
            path = os.path.abspath(os.fsdecode(args[0]))
            if path.startswith(NO_FILES):
                return
            found = os.stat(path)
            if stat.S_ISFIFO(found.st_mode) and found.st_ctime_ns < began_ns:
                end(path)

    sys.addaudithook(noticed)
