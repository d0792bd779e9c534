"""A trial run that makes training steps ends before the script writes a checkpoint, or any file that it may read again.

Its steps are of rank 0 alone: nothing is reduced over the ranks. A checkpoint of them would replace a good one, or the
launch itself would resume from it; as it would leave out steps that a file says are done.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from monetrun.core import native
from monetrun.core.patched import patched
from monetrun.runtime.settings import Settings
from monetrun.runtime.trial_files import NAMES, NO_FILES, by_a_tracker, is_a_cache

_EVENTS = ("open", "os.mkdir", "os.rename", "sqlite3.connect")
_ENDINGS = (".bin", ".ckpt", ".distcp", ".metadata", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar")


def end_before(end: Callable[[], None], undo: contextlib.ExitStack, settings: Settings) -> Callable[[], None]:
    """Have ``end`` called, which ends the process, before the script writes a checkpoint, once training has begun.

    That is ``torch.save`` to a file, a file that is opened for writing (but not to append to it, as logs are), a
    database, a file with a checkpoint's ending that is renamed, and a new folder. Those of trackers, in caches and of
    ``tempfile`` do not count. What libraries write outside of Python into a folder that exists is not seen.

    Args:
        end: ends the process.
        undo: gets what takes it back, but for an audit hook, which does nothing then.
        settings: of the process: name monetrun's own folders, in which everything may be written.

    Returns:
        To be called when training has begun: before, what is saved are weights as the script made them.
    """
    begun, process, own = False, os.getpid(), own_folders(settings)
    save = torch.save
    # an audit hook stays: it must not keep what ``end`` is a method of
    known = weakref.WeakMethod(end) if inspect.ismethod(end) else lambda: end

    def begin(now: bool = True) -> None:
        nonlocal begun
        begun = now

    def written(path: str) -> None:
        if not begun or os.getpid() != process:  # a process that was forked reads data
            return
        if any(Path(path).is_relative_to(folder) for folder in own):
            return
        if not is_a_cache(path) and not by_a_tracker() and (ends := known()) is not None:
            begin(False)  # ``end`` itself writes
            ends()

    @functools.wraps(save)
    def observed_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not _in_memory(f):
            written(_path(f if isinstance(f, NAMES) else getattr(f, "name", "")))
        save(obj, f, *args, **kwargs)

    def noticed(event: str, args: tuple[Any, ...]) -> None:
        if not begun or event not in _EVENTS or not isinstance(args[0], NAMES):
            return
        path = _path(args[1] if event == "os.rename" else args[0])
        if event == "os.mkdir":
            is_one = not os.path.lexists(path)
        elif event == "open":
            is_one = _writes(args[2]) and not path.startswith(NO_FILES)
        else:
            is_one = event == "sqlite3.connect" or path.endswith(_ENDINGS)
        if is_one:
            written(path)

    undo.enter_context(patched(torch, "save", observed_save))
    sys.addaudithook(noticed)
    undo.callback(begin, False)
    return begin


def own_folders(settings: Settings) -> list[Path]:
    """Of the launch, in which the record lies, and of the caches."""
    named = [str(native.cache_folder()), settings.cache_folder]
    named.append(os.path.dirname(settings.record_file))
    return [Path(folder) for folder in named if folder]


def _path(name: Any) -> str:
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, NAMES) else ""


def _writes(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR)) and not flags & os.O_APPEND


def _in_memory(f: Any) -> bool:
    try:
        return not isinstance(f, NAMES) and f.fileno() < 0
    except (OSError, ValueError, AttributeError):  # as of io.BytesIO
        return True
