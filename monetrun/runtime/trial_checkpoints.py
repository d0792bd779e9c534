"""A trial run that makes training steps ends before the script writes a checkpoint.

Its steps are of rank 0 alone: nothing is reduced over the ranks. A checkpoint of them would replace a good one, or the
launch itself would resume from it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from monetrun.core.patched import patched
from monetrun.runtime.trial_files import by_a_tracker

_WRITES = os.O_WRONLY | os.O_RDWR
_ENDINGS = (".bin", ".ckpt", ".distcp", ".metadata", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar")


def end_before_the_first(end: Callable[[], None], undo: contextlib.ExitStack) -> Callable[[], None]:
    """Have ``end`` called, which ends the process, before the script writes a checkpoint, once training has begun.

    That is ``torch.save`` to a file, a file that is opened for writing and has a checkpoint's ending, and a new folder.
    Those of trackers do not count. What libraries write outside of Python into a folder that exists is not seen.

    Args:
        end: ends the process.
        undo: gets what takes it back, but for an audit hook, which does nothing then.

    Returns:
        To be called when training has begun: before, what is saved are weights as the script made them.
    """
    begun, process = False, os.getpid()
    save = torch.save

    def begin(now: bool = True) -> None:
        nonlocal begun
        begun = now

    def checkpoint() -> None:
        if begun and os.getpid() == process:  # not of a process that was forked, which reads data
            begin(False)  # ``end`` itself writes
            end()

    def observed_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not _in_memory(f):
            checkpoint()
        save(obj, f, *args, **kwargs)

    def noticed(event: str, args: tuple[Any, ...]) -> None:
        if not begun or event not in ("open", "os.mkdir") or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        path = os.path.abspath(os.fsdecode(args[0]))
        if event == "os.mkdir":
            is_one = not os.path.lexists(path)
        else:
            is_one = path.endswith(_ENDINGS) and isinstance(args[2], int) and bool(args[2] & _WRITES)
        if is_one and not _is_a_cache(path) and not by_a_tracker():
            checkpoint()

    undo.enter_context(patched(torch, "save", observed_save))
    sys.addaudithook(noticed)
    undo.callback(begin, False)
    return begin


def _in_memory(f: Any) -> bool:
    try:
        return not isinstance(f, (str, os.PathLike)) and f.fileno() < 0
    except (OSError, ValueError, AttributeError):  # as of io.BytesIO
        return True


def _is_a_cache(path: str) -> bool:
    """Whether a library keeps something there, such as what it has compiled."""
    return any(part == "__pycache__" or "cache" in part.lower() for part in path.split(os.sep))
