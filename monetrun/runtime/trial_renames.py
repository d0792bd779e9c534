"""A trial run ends before the script renames what was there before it, such as the log of the last run.

The run renames again: what the trial has begun would take the place of what the user wants to keep. What is removed or
overwritten does not end a trial: the run itself would do the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from monetrun.runtime import probe
from monetrun.runtime.settings import Settings
from monetrun.runtime.trial_checkpoints import own_folders
from monetrun.runtime.trial_files import NAMES, OF_RUNNING, by_a_tracker, is_a_cache

_CACHES = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME")


def watch(settings: Settings, began_ns: int) -> None:
    """``end_before`` in a trial run that began then: the launch plans at its first step instead."""

    def end(path: str) -> None:
        reason = f"it renames {path}, which was there before (where MONETRUN_TRIAL is set it may leave that to the run)"
        probe.leave_unseen(reason, settings.record_file)

    end_before(end, began_ns, [str(folder) for folder in own_folders(settings)])


def end_before(end: Callable[[str], None], began_ns: int, free: list[str]) -> None:
    """Have ``end`` called with the path, which ends the process, before an older file or folder is renamed.

    Links, files of trackers, locks, and what lies in folders for temporary files or in caches may be renamed.

    Args:
        end: ends the process.
        began_ns: when the trial run began, by the file system's clock.
        free: further folders in which all may be renamed.
    """
    free = ["/dev", "/run", *free, *(os.environ.get(name, "") for name in _CACHES)]
    with contextlib.suppress(OSError):  # there is none
        free.append(tempfile.gettempdir())
    folders = tuple(os.path.join(os.path.abspath(folder), "") for folder in free if folder)
    # older files that the trial has opened, whose times change; new ones, whose times another machine's clock may give
    written, made = set[str](), set[str]()

    def is_older(path: str) -> bool:
        found = os.lstat(path)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            return False
        return path in written or (path not in made and max(found.st_ctime_ns, found.st_mtime_ns) < began_ns)

    def noticed(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "os.mkdir" or (event == "open" and isinstance(args[2], int) and bool(args[2] & os.O_CREAT))
        renames = event == "os.rename" and args[2] == -1  # not relative to a folder that is open
        if not (writes or renames) or not isinstance(args[0], NAMES):
            return
        with contextlib.suppress(OSError, ValueError):  # an exception here would be the script's
            path = os.path.abspath(os.fsdecode(args[0]))
            if path.startswith(folders) or path.endswith(OF_RUNNING) or is_a_cache(path):
                return
            if writes and not os.path.lexists(path):
                made.add(path)
            elif is_older(path) and writes:
                written.add(path)
            elif is_older(path) and not by_a_tracker():
                end(path)

    sys.addaudithook(noticed)
