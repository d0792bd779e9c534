"""What a trial run has read beside the script; what it found holds for these files and packages as they were."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".sources"
"""What is added to the path of a trial's record, for the file that has its ``Sources``."""

_LARGE = 1 << 20  # bytes; of larger files (libraries) only size and time are looked at


@dataclass(frozen=True, slots=True)
class Sources:
    """What a process has imported, and the files of settings that it was given and has read.

    Attributes:
        files: the ``content`` of each, by path; modules that belong to no installed package are among them.
        packages: versions of the installed ones that define modules of models, by the names of their distributions.
    """

    files: dict[str, str]
    packages: dict[str, str]


def content(file: str) -> str:
    """A hash of a file's content; empty where it cannot be read."""
    try:
        status = os.stat(file)
        if status.st_size > _LARGE:
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""
