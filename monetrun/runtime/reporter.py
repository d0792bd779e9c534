"""What one rank reports: warnings on stderr, and at its end a file for the launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monetrun.core.errors import CaptureFailed
from monetrun.runtime.settings import PROBE, Settings


class Reporter:
    """Of one rank.

    Attributes:
        warned: all warnings so far, each once.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.warned: set[str] = set()

    def warn(self, message: str) -> None:
        """Print a line on stderr, once, in rank 0. A trial run prints nothing: the run itself warns again."""
        if message in self.warned:
            return
        self.warned.add(message)
        if self.settings.rank == 0 and self.settings.mode != PROBE and not self.settings.quiet:
            print(f"monetrun: warning: {message}", file=sys.stderr, flush=True)

    def give_up(self, message: str) -> None:
        """Warn that something runs unmodified.

        Raises:
            CaptureFailed: with ``strict``, instead of the warning.
        """
        if self.settings.strict:
            raise CaptureFailed(message, "without --strict it runs as it is, outside the plan")
        self.warn(message)

    def write(self, findings: Mapping[str, Any]) -> None:
        """Leave ``findings`` and the warnings in the report folder, if the launcher named one."""
        if not self.settings.report_folder:
            return
        report = {"rank": self.settings.rank, "warnings": sorted(self.warned), **findings}
        path = Path(self.settings.report_folder) / f"rank{self.settings.rank}.json"
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(report))
        part.replace(path)
