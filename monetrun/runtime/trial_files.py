"""Files that a trial run must not leave: trackers' logs, locks and temporary files. They are removed after it.

Without this a logger that numbers its runs would give the run itself the second number, and a lock whose owner was
ended would never be released. Nor does an empty folder stay that the script may demand to be new, as by
``os.makedirs(out)``. All else that a script writes before its first step stays, as after a run that was stopped there:
data sets that it downloads, caches, folders for its results.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# What is added to the path of a trial's record, for the file that lists these.
LIST = ".files"

NAMES = (str, bytes, os.PathLike)
"""Types of a file's name."""

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
    created with the demand that they do not exist yet, as locks are; and folders of which that is demanded, without
    what is in them. What code outside of Python creates is not seen.

    Args:
        record_file: of the trial run.
    """

    def __init__(self, record_file: str) -> None:
        self._list = os.open(record_file + LIST, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._folders: set[str] = set()

    def watch(self) -> None:
        """Begin; there is no end but the process's."""
        sys.addaudithook(self._noticed)

    def _noticed(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if not isinstance(flags, int) or not flags & os.O_CREAT:
                return
        elif event == "os.mkdir":
            path, flags = args[0], 0
        elif event == "os.rename":
            self._renamed(args[1])
            return
        else:
            return
        if not isinstance(path, NAMES):
            return  # a file that is open already
        with contextlib.suppress(OSError, ValueError):  # an exception here would be the script's
            full = os.path.abspath(os.fsdecode(path))
            if os.path.lexists(full):
                return
            left = flags & os.O_EXCL or os.path.dirname(full) in self._folders or by_a_tracker()
            if left and event == "os.mkdir":
                self._folders.add(full)
            if left or (event == "os.mkdir" and _is_to_be_new()):
                self._add(full)

    def _renamed(self, target: Any) -> None:
        """A temporary file gets its name: those of a tuner's checkpoints."""
        if isinstance(target, NAMES):
            with contextlib.suppress(OSError, ValueError):
                new = os.path.abspath(os.fsdecode(target))
                if os.path.basename(new).startswith(_OF_TUNERS) and not os.path.lexists(new):
                    self._add(new)

    def _add(self, path: str) -> None:
        os.write(self._list, (json.dumps(path) + "\n").encode())


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


def remove(record_file: str) -> None:
    """Remove what a trial run's processes have listed, the last first; folders only if nothing else is in them."""
    with contextlib.suppress(FileNotFoundError):
        listed = Path(record_file + LIST).read_text().splitlines()
        for path in reversed([json.loads(line) for line in listed]):
            with contextlib.suppress(OSError):
                os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
