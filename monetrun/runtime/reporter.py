"""What one rank reports: warnings on stderr, and a file for the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from monetrun.core.errors import CaptureFailed, worded
from monetrun.core.overdue import if_longer_than
from monetrun.core.plan import Plan
from monetrun.runtime.settings import TRIALS, Settings

_SLOW_SECONDS = 2.0  # what takes longer is told
_EVERY_SECONDS, _SELDOM_SECONDS = 120.0, 3600.0  # a report is left so often while training goes on, in the end


WARNING = "warning: "
"""How a line begins that is printed under ``--quiet``, too."""


class Reporter:
    """Of one rank.

    Attributes:
        warned: all warnings so far, each once.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.warned: set[str] = set()
        self._noted: set[str] = set()  # warnings about this rank's memory
        self._began = self._written = time.monotonic()
        self._settled = False

    def warn(self, message: str) -> None:
        """Print a line on stderr, once, in rank 0. A trial run prints nothing: the run itself warns again."""
        if message not in self.warned:
            self.warned.add(message)
            self.tell(f"{WARNING}{message}")

    def tell(self, message: str) -> None:
        """As ``warn``, of what needs no attention; the caller sees to it that this is done once."""
        if self.settings.rank == 0:
            self._print("monetrun", message)

    def note(self, message: str) -> None:
        """Print a line on stderr about this rank's memory, or a warning. A trial run prints nothing."""
        if message.startswith(WARNING):
            self._noted.add(message.removeprefix(WARNING))
        self._print(f"monetrun (rank {self.settings.rank})" if self.settings.world_size > 1 else "monetrun", message)

    def _print(self, who: str, message: str) -> None:
        hidden = self.settings.quiet and not message.startswith(WARNING)
        if self.settings.mode not in TRIALS and not hidden:
            with contextlib.suppress(OSError, ValueError):  # no reader, the disk is full, the script has closed it
                print(f"{who}: {worded(message)}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def if_slow(self, what: str) -> Iterator[None]:
        """Tell what is going on in this context once that takes 2 s, and at its end how long it took."""
        started = time.monotonic()
        try:
            with if_longer_than(_SLOW_SECONDS, self.tell, f"{what} ..."):
                yield
        finally:
            if (seconds := time.monotonic() - started) >= _SLOW_SECONDS:
                self.tell(f"{what}: {seconds:.1f} s")

    def give_up(self, message: str) -> None:
        """Warn that something runs unmodified.

        Raises:
            CaptureFailed: with ``strict``, instead of the warning.
        """
        if self.settings.strict:
            raise CaptureFailed(message, "without --strict it runs as it is, outside the plan")
        self.warn(message)

    def write_now_and_then(self, findings: Callable[[], Mapping[str, Any]], settled: bool = False) -> None:
        """``write``, if that was long ago: a process that is killed, or ends by ``os._exit``, leaves what it had found.

        The longer it has run, the less often, since the other ranks wait meanwhile. Once the first steps have
        ``settled``, it is written in any case.
        """
        ran, first = min(self._written - self._began, _SELDOM_SECONDS), settled and not self._settled
        late = time.monotonic() - self._written > max(_EVERY_SECONDS, ran)
        if self.settings.report_folder and (first or late):
            self._settled |= settled
            self.write({**findings(), "interim": True})

    def write(self, findings: Mapping[str, Any]) -> None:
        """Leave ``findings`` and the warnings in the report folder, if the launcher named one."""
        self._written = time.monotonic()
        if not self.settings.report_folder:
            return
        report = {"rank": self.settings.rank, "warnings": sorted(self.warned | self._noted), **findings}
        path = Path(self.settings.report_folder) / f"rank{self.settings.rank}.json"
        part = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # the system clears temporary folders after some days
            part.write_text(json.dumps(report))
            part.replace(path)
        except OSError as error:  # no space is left: training goes on
            self.warn(f"the report cannot be written: {error}")
            with contextlib.suppress(OSError):
                part.unlink()


def in_short(plan: Plan, findings: Mapping[str, Any]) -> dict[str, Any]:
    """What ``monetrun.close`` gives: the plan's figures beside those of a rank's ``findings``."""
    most_allocated, most_bounded = findings["most_planned"]
    found = {
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "planned_peak_bytes": max(plan.planned_peak_bytes, most_allocated),
        "planned_overhead": plan.overhead,
        "measured_peak_bytes": findings["measured_peak_bytes"] if findings["exact"] else None,
        "steps": findings["steps"],
    }
    if plan.pool is not None:
        found["plain_reserved_bytes"] = plan.pool.plain_bytes
        found["planned_reserved_bytes"] = max(plan.pool.planned_bytes, most_bounded)
        found["measured_reserved_bytes"] = findings["measured_reserved_bytes"]
    return found
