"""A document of measured cells that survives a kill: each cell has a deadline, and is written when it ends.

A cell is a dict: what it measures (network, precision, method, share), its ``status`` (``ok``, ``skipped``,
``infeasible`` or ``failed``) and either what was measured or the reason.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from monetrun.core.errors import InfeasibleBudget, MonetrunError
from step_pairs import first_line


class OutOfTime(Exception):
    """A cell reached the deadline."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTime`` when the body takes longer."""

    def expired(number: int, frame: object) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s, when time was out (--resume goes on)")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Results:
    """The document, written after each cell.

    Args:
        header: fields that describe the run.
        path: of the document; None writes nothing.
        resume: keep the measured cells that the file at ``path`` has.
    """

    def __init__(self, header: dict[str, Any], path: Path | None, resume: bool) -> None:
        self.path = path
        known: dict[str, Any] = {"commands": [], "cells": []}
        if resume and path is not None and path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
        self.document = {
            **known,
            **header,
            "commands": [*known["commands"], shlex.join(["python", *sys.argv])],
            "cells": [c for c in known["cells"] if c["status"] == "ok"],
        }

    def has(self, key: dict[str, Any]) -> bool:
        """Whether the cell has been measured."""
        return any(all(c[k] == v for k, v in key.items()) for c in self.document["cells"])

    def note(self, name: str, value: Any) -> None:
        """Add a field and write."""
        self.document[name] = value
        self.write()

    def write(self) -> None:
        """Replace the file atomically."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)

    def cell(self, key: dict[str, Any], run: Callable[[float], dict[str, Any]], deadline: float) -> None:
        """Run one cell, until ``deadline`` at most; add it to the document and print its row."""
        if self.has(key):
            return
        started = time.monotonic()
        left = deadline - started
        if left <= 0:
            found = {"status": "skipped", "reason": "no time was left (--resume goes on)"}
        else:
            try:
                with at_most(left):
                    found = {"status": "ok", **run(key["share"])}
            except OutOfTime as error:
                found = {"status": "skipped", "reason": str(error)}
            except InfeasibleBudget as error:
                found = {"status": "infeasible", "reason": first_line(error), "smallest_bytes": error.smallest_bytes}
            except (RuntimeError, AssertionError, ImportError, MonetrunError) as error:
                found = {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
            found["cell_seconds"] = time.monotonic() - started
        self.document["cells"].append({**key, **found})
        self.write()
        print(row(self.document["cells"][-1]), flush=True)


HEADINGS = f"{'network':13}{'':5} {'method':11}{'share':>5}   {'peak: planned, allocated, reserved (MiB)':40} step"


def row(cell: dict[str, Any]) -> str:
    """A line of the printed table: peaks in MiB, the share of the activation peak, the step's time beside eager's."""
    share = "" if cell["share"] is None else f"{cell['share']:.2f}"
    name = f"{cell['network']:13}{cell['precision']:5} {cell['method']:11}{share:>5}   "
    if cell["status"] != "ok":
        return f"{name}{cell['status']}: {cell['reason']}"

    def mib(field: str) -> str:
        return f"{cell[field] / 2**20:9.1f}" if cell.get(field) is not None else f"{'-':>9}"

    ratio = f"x{cell['planned_ratio']:.3f} planned, " if "planned_ratio" in cell else ""
    cap = ", the cap refused it" if cell.get("refused_by_the_cap") else ""
    return (
        f"{name}{mib('planned_peak_bytes')}{mib('allocated_bytes')}{mib('reserved_bytes')}  "
        f"({cell['measured_share']:.3f})  {cell['seconds'] * 1e3:8.1f} ms  {ratio}x{cell['ratio']:.3f}{cap}"
    )
