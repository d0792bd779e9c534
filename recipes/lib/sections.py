"""Sections of a check: each is a command in a process of its own; a document of what they gave survives a kill."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from lib.child import Ended, run_child

OK, FAILED, TIMEOUT, SKIPPED = "ok", "failed", "timeout", "skipped"
ROOT = Path(__file__).resolve().parent.parent.parent
LEAST_SECONDS = 5.0  # with less time left, a section is not begun


@dataclass(frozen=True, slots=True)
class Check:
    """``left`` <= ``right``; both in bytes, or both counts.

    Attributes:
        name: what is compared.
        left, right: the figures; None where one was not reported: then nothing is checked.
    """

    name: str
    left: float | None
    right: float | None

    @property
    def holds(self) -> bool | None:
        """Whether it holds; None where a figure is missing."""
        return None if self.left is None or self.right is None else self.left <= self.right


@dataclass(frozen=True, slots=True)
class Found:
    """What a section's output says.

    Attributes:
        figures: measured, by name.
        checks: that must hold.
        failures: each with ``what`` and, where there is one, ``traceback``.
        skipped: why nothing could be done; empty if it could.
    """

    figures: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    failures: tuple[Mapping[str, str], ...] = ()
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A command, and how its output is read.

    Attributes:
        name: of the section.
        group: of sections.
        command: to run.
        limit_seconds: after which it is ended.
        read: what its output says; also called for a command that failed or whose time was up.
        needs: why it cannot run here; empty if it can.
    """

    name: str
    group: str
    command: tuple[str, ...]
    limit_seconds: float
    read: Callable[[Ended], Found]
    needs: str = ""

    def wanted(self, patterns: Sequence[str]) -> bool:
        """Whether one of the patterns matches its name or its group."""
        return any(fnmatch.fnmatchcase(n, p) for n in (self.name, self.group) for p in patterns)


def read_earlier(path: Path, same: Mapping[str, Any]) -> dict[str, Any] | None:
    """The document to go on from; None if there is none yet.

    Raises:
        click.ClickException: it differs in what must be the ``same``: it is of another device, torch or settings.
    """
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in same.items():
        if found.get(name) != value:
            raise click.ClickException(
                f"{path} is of {name} {found.get(name)!r}, this run of {value!r}: give another --out, or no --resume"
            )
    return found


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of an output."""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:  # a line that was cut off, or a script's own
                continue
            if isinstance(value, dict):
                yield value


def run_section(section: Section, environment: Mapping[str, str], seconds: float, work: Path) -> dict[str, Any]:
    """Run a section for ``seconds`` at most, and give its entry of the document."""
    limit = min(section.limit_seconds, seconds)
    base = {"name": section.name, "group": section.group, "command": [_anywhere(w) for w in section.command]}
    if section.needs:
        return {**base, "status": SKIPPED, "reason": section.needs, "seconds": 0.0}
    if seconds < LEAST_SECONDS:
        return {**base, "status": SKIPPED, "reason": "no time was left (--resume goes on)", "seconds": 0.0}
    log = work / "logs" / section.name.replace(":", "-")
    failures: list[Mapping[str, str]] = []
    try:
        ended = run_child(section.command, environment, limit, log, work)
    except OSError as error:
        failed = {"what": f"it cannot be started: {error}", "traceback": traceback.format_exc()}
        return {**base, "status": FAILED, "seconds": 0.0, "failures": [failed]}
    try:
        found = section.read(ended)
    except Exception as error:  # noqa: BLE001  (kept with its traceback; the next section runs)
        failed = {"what": f"its output cannot be read: {error!r}", "traceback": traceback.format_exc()}
        found = Found(failures=(failed,))
    if ended.exit_code is None:
        failures.append({"what": f"stopped after {ended.seconds:.0f} s", "traceback": ended.traceback})
    elif ended.exit_code != 0:
        failures.append({"what": f"exit code {ended.exit_code}", "traceback": ended.traceback})
    failures += [*found.failures, *({"what": failed_check(c)} for c in found.checks if c.holds is False)]
    if ended.exit_code is None:
        status = TIMEOUT
    elif failures:
        status = FAILED
    else:
        status = SKIPPED if found.skipped else OK
    return {
        **base,
        "status": status,
        "seconds": round(ended.seconds, 2),
        "limit_seconds": round(limit, 1),
        **({"reason": found.skipped} if found.skipped else {}),
        "figures": dict(found.figures),
        "checks": [{**asdict(c), "holds": c.holds} for c in found.checks],
        "failures": [dict(f) for f in failures],
        "left_over": list(ended.left_over) if ended.exit_code is not None else [],
    }


def _anywhere(word: str) -> str:
    """A command's word without this machine's folders."""
    return "python" if word == sys.executable else word.removeprefix(f"{ROOT}{os.sep}")


def failed_check(check: Check) -> str:
    """A check that does not hold, in words."""
    return f"{check.name}: {check.left:,.0f} > {check.right:,.0f}"


def finite(value: Any) -> Any:
    """``value`` with None for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


class Document:
    """The results, written after each section.

    Args:
        path: of the file.
        header: fields that describe this run; they replace those of an earlier one.
        earlier: the document to go on from; None for a new one.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> None:
        self.path = path
        known = earlier or {"commands": [], "sections": []}
        self.value = {**known, **header, "commands": [*known["commands"], header["command"]]}
        self.value.pop("command")
        self.value["sections"] = list(known["sections"])

    def entry(self, name: str) -> dict[str, Any] | None:
        """The section of that name, if it has been run."""
        return next((e for e in self.value["sections"] if e["name"] == name), None)

    def add(self, entry: dict[str, Any]) -> None:
        """Add a section, in place of an earlier run of it, and write the file."""
        earlier = self.entry(entry["name"])
        if earlier is None:
            self.value["sections"].append(entry)
        else:
            self.value["sections"][self.value["sections"].index(earlier)] = entry
        self.write()

    def write(self) -> None:
        """Replace the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        text = json.dumps(finite(self.value), indent=1, allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.path)
