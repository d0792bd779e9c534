"""What a trial run has imported beside the script; what it found holds for these files and packages as they were."""

from __future__ import annotations

from dataclasses import dataclass

SUFFIX = ".sources"
"""What is added to the path of a trial's record, for the file that has its ``Sources``."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a process has imported.

    Attributes:
        files: of modules that belong to no installed package.
        packages: the installed ones that define modules of models.
    """

    files: tuple[str, ...]
    packages: tuple[str, ...]
