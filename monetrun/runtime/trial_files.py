"""Files that a trial run must not leave: trackers' logs, locks and temporary files. They are removed after it.

Without this a logger that numbers its runs would give the run itself the second number, and a lock whose owner was
ended would never be released. Nor does a folder stay that the script may demand to be new, as by ``os.makedirs(out)``,
if it is empty, or holds only what the trial has written into it, and little: ``out/args.json``. All else that a script
writes before its first step stays, as after a run that was stopped there: data sets that it downloads, caches, folders
for its results.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

# What is added to the path of a trial's record, for the file that lists these.
LIST = ".files"
BEGAN = ".began"

# A new folder that holds more than this stays, with all that is in it: it may have been downloaded.
_LITTLE_BYTES = 1 << 20

# How a path is listed: to be removed; a folder that had to be new; what was made in such a folder, and goes with it.
_Kind = Literal["left", "new", "within"]

NAMES = (str, bytes, os.PathLike)
"""Types of a file's name."""

OF_RUNNING = (".lock", ".lck", ".pid")
"""Endings of files that tell others that something runs."""

# What makes a name that must be new, or a database that remembers: the event, and which of its arguments is the name.
_NEW_NAMES = {"os.link": 1, "os.symlink": 1, "socket.bind": 1, "sqlite3.connect": 0}

# Files that lie beside a database while it is open.
_OF_DATABASES = ("-journal", "-wal", "-shm")

NO_FILES = ("/dev/", "/proc/")
"""Folders of what is written, and not kept."""

# Where torch.compile keeps what it has compiled.
_COMPILED, _COMPILED_IN = "torchinductor_", ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

# Checkpoints that Lightning's tuners write before the first step, and remove at their end.
_OF_TUNERS = (".lr_find_", ".scale_batch_size_")

# Modules that call ``os.mkdir`` for those who call them.
_MAKERS = ("os", "pathlib", "pathlib._local")

# What these modules create is not to be left.
_MODULES = (
    *("aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "tempfile", "tensorboard", "trackio"),
    *("tensorboardX", "torch.utils.tensorboard", "wandb", "lightning.pytorch.loggers", "lightning.fabric.loggers"),
    *("pytorch_lightning.loggers", "lightning_fabric.loggers"),
)


class TrialFiles:
    """Lists what this process creates and has to be removed.

    These are files and folders that a tracker or ``tempfile`` creates, files within such folders, and files that are
    created with the demand that they do not exist yet, as locks, links and sockets are, or that tell that something
    runs; new databases; and folders of which that is demanded, with what this process creates in them. What code
    outside of Python creates is not seen.

    Args:
        record_file: of the trial run.

    Attributes:
        began_ns: when the trial run began: then the launcher has made the list.
    """

    def __init__(self, record_file: str) -> None:
        self._list = os.open(record_file + LIST, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # of several processes, one after the other, the first one's: the list's own times go on with what is listed
        began = os.open(record_file + BEGAN, os.O_WRONLY | os.O_CREAT)
        self.began_ns = os.fstat(began).st_mtime_ns
        os.close(began)
        self._folders: set[str] = set()
        self._new: set[str] = set()  # folders that had to be new, and are in no other one
        self._listed: set[str] = set()

    def watch(self) -> int:
        """Begin; there is no end but the process's. Gives ``began_ns``."""
        sys.addaudithook(self._noticed)
        return self.began_ns

    def _noticed(self, event: str, args: tuple[Any, ...]) -> None:
        flags = 0
        if event == "open":
            path, _, flags = args
            if not isinstance(flags, int) or not flags & os.O_CREAT:
                return
        elif event == "os.mkdir":
            path = args[0]
        elif event in _NEW_NAMES:
            path, flags = args[_NEW_NAMES[event]], os.O_EXCL
        elif event == "os.rename":
            self._renamed(args[0], args[1])
            return
        else:
            return
        if not isinstance(path, NAMES) or "\0" in os.fsdecode(path):
            return  # a file that is open already, or an address that is no file
        with contextlib.suppress(OSError, ValueError):  # an exception here would be the script's
            full = os.path.abspath(os.fsdecode(path))
            if os.path.lexists(full):
                return
            left = flags & os.O_EXCL or os.path.dirname(full) in self._folders or by_a_tracker()
            left = left or full.endswith(OF_RUNNING)
            if event == "sqlite3.connect":
                for ending in _OF_DATABASES:
                    self._add("left", full + ending)
            if left and event == "os.mkdir":
                self._folders.add(full)
            is_new = event == "os.mkdir" and _is_to_be_new()
            if left or (is_new and is_a_cache(full)):
                self._add("left", full)
            elif is_new:
                self._new.update(() if self._is_within(full) else (full,))
                self._add("new", full)
            elif self._is_within(full):
                self._add("within", full)

    def _renamed(self, source: Any, target: Any) -> None:
        """A temporary file gets its name: those of a tuner's checkpoints, and this process's own in a new folder."""
        if isinstance(source, NAMES) and isinstance(target, NAMES):
            with contextlib.suppress(OSError, ValueError):
                old, new = (os.path.abspath(os.fsdecode(name)) for name in (source, target))
                if os.path.lexists(new):
                    return
                if os.path.basename(new).startswith(_OF_TUNERS):
                    self._add("left", new)
                elif old in self._listed and self._is_within(new):
                    self._add("within", new)

    def _is_within(self, path: str) -> bool:
        return any(path.startswith(folder + os.sep) for folder in self._new)

    def _add(self, kind: _Kind, path: str) -> None:
        self._listed.add(path)
        os.write(self._list, (json.dumps([kind, path]) + "\n").encode())


def _is_to_be_new() -> bool:
    """Whether the folder that is about to be made must not be there: by ``os.mkdir``, or without ``exist_ok``."""
    frame = sys._getframe(2)  # of the call of os.mkdir
    given = frame.f_locals.get("exist_ok") if frame.f_globals.get("__name__") in _MAKERS else None
    return not given


def by_a_tracker() -> bool:
    """Whether one of ``_MODULES`` is among this thread's callers."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if any(name == module or name.startswith(f"{module}.") for module in _MODULES):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def begin(record_file: str) -> None:
    """Make the empty list, before the trial's process starts."""
    for ending in (LIST, BEGAN):
        Path(record_file + ending).touch()


def is_a_cache(path: str) -> bool:
    """Whether a library keeps something there, such as what it has compiled."""
    if any(path.startswith(os.path.join(folder, "")) for name in _COMPILED_IN if (folder := os.environ.get(name))):
        return True
    return any("cache" in part.lower() or part.startswith(_COMPILED) for part in path.split(os.sep))


def remove(record_file: str) -> None:
    """Remove what a trial run's processes have listed, the last first.

    Folders are removed if nothing else is in them; one that had to be new, with what was made in it, if all of that is
    listed and little. It goes or stays as a whole: a script that finds it does not make what is missing in it.
    """
    try:
        lines = Path(record_file + LIST).read_text().splitlines()
    except FileNotFoundError:
        return
    entries: list[tuple[_Kind, str]] = [(kind, path) for kind, path in map(json.loads, lines)]
    for kind, path in reversed(entries):
        if kind == "left" or (kind == "new" and not os.path.islink(path)):
            _remove(path)
    listed, new = {path for _, path in entries}, {path for kind, path in entries if kind == "new"}
    for folder in new:
        if new.isdisjoint(map(str, Path(folder).parents)) and (found := _own_and_little(folder, listed)) is not None:
            for path in found:
                _remove(path)


def _own_and_little(folder: str, listed: set[str]) -> list[str] | None:
    """All that is in a folder, and at last itself; None where something is not ``listed``, or is much."""
    found: list[str] = []
    nbytes = 0
    if os.path.islink(folder):
        return None
    for parent, folders, files in os.walk(folder, topdown=False):
        paths = [os.path.join(parent, name) for name in (*files, *folders)]
        if not listed.issuperset(paths) or any(map(os.path.islink, paths)):
            return None
        with contextlib.suppress(FileNotFoundError):  # the process that is ended removes it itself
            nbytes += sum(os.lstat(path).st_size for path in paths[: len(files)])
        if nbytes > _LITTLE_BYTES:
            return None
        found += [*paths[: len(files)], parent]
    return found


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
