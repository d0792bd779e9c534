"""The results of gpu_check.py as lines and as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from lib.sections import FAILED, OK, SKIPPED, TIMEOUT

_EXCEPTION = re.compile(  # an exception's last line, or monetrun's own, which says more than that the script failed
    r"(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b:.*|monetrun: (?!error: .* failed in its).+)"
)
_COLUMNS = (
    *("plain", "of\neager", "planned", "measured", "of\neager", "budget"),
    *("plain\nreserved", "of\neager", "planned\nreserved", "measured\nreserved"),
    *("retries", "step\nms", "of\neager", "loss"),
)
SEGMENT_BYTES = 2 << 20  # CUDA's caching allocator reserves whole multiples of this
COLORS = {OK: "green", FAILED: "red", TIMEOUT: "red", SKIPPED: "yellow"}


def line(entry: Mapping[str, Any]) -> str:
    """What is printed when a section has ended."""
    status = entry["status"]
    text = f"[{COLORS[status]}]{status:8}[/] {entry['name']:24} {entry['seconds']:6.1f} s"
    return f"{text}  {escape(note(entry))}"


def note(entry: Mapping[str, Any]) -> str:
    """Why a section failed or was skipped, else the kind of figures that it has."""
    failures = entry.get("failures", [])
    if failures:
        cause = cause_in(failures[0].get("traceback") or "")
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return failures[0]["what"] + (f": {cause[:140]}" if cause else "") + more
    if entry["status"] == SKIPPED:
        return str(entry.get("reason", ""))
    figures = entry.get("figures", {})
    if "rows" in figures:
        return f"{len(figures['rows'])} rows"
    if "tests" in figures:
        return str(figures["summary"]).strip("= ")
    if "checks" in figures:
        return ", ".join(f"{c['name']} {c['state']}" for c in figures["checks"] if c["state"] != "ok") or "all is there"
    report = figures.get("report", {})
    if report and report.get("planned_peak_bytes") is None:
        return "nothing was planned"
    unchecked = [c["name"] for c in entry.get("checks", []) if c["holds"] is None]
    return f"not reported: {'; '.join(unchecked)}" if unchecked else ""


def cause_in(traceback: str) -> str:
    """The line that names the last exception; without one, the last line."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip()]
    named = [found.group(1) for line in lines if (found := _EXCEPTION.match(line))]
    return (named or lines or [""])[-1]


def table(document: Mapping[str, Any]) -> Table:
    """Peaks in MiB, retries in settled steps, the step's milliseconds; ratios are to the eager run of that training.

    The last column is the last loss's difference from the eager run's, as a share of it.
    """
    of = "a stand-in: no figure is a GPU's" if document["stand_in"] else document["device"]
    made = Table(title=f"peaks in MiB, {of}", box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    made.add_column("section", no_wrap=True)
    made.add_column("status", no_wrap=True)
    for name in _COLUMNS:
        made.add_column(name, justify="right", no_wrap=True)
    for entry in document["sections"]:
        if "training" in entry.get("figures", {}):
            status = f"[{COLORS[entry['status']]}]{entry['status']}[/]"
            made.add_row(entry["name"], status, *cells(entry, eager_of(document, entry)))
    return made


def eager_of(document: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The eager training that a training is compared with: the same network, batch and precision; {} without one."""
    own = entry["figures"]["training"]
    for other in document["sections"]:
        found = other.get("figures", {}).get("training", {})
        same = own and all(found.get(name) == own[name] for name in ("network", "batch", "precision"))
        if other["name"].endswith(":eager") and same:
            return found
    return {}


def is_estimate(reserved_bytes: int) -> bool:
    """Whether so many bytes were estimated: no allocator has reserved a part of a segment."""
    return reserved_bytes % SEGMENT_BYTES != 0


def bad_ends(document: Mapping[str, Any]) -> list[str]:
    """A line of Markdown for each section that failed or was stopped, with the reason."""
    ends = {FAILED: "failed", TIMEOUT: "ran out of time"}
    bad = [e for e in document["sections"] if e["status"] in ends]
    return [f"`{e['name']}` {ends[e['status']]}: {note(e)}" for e in bad]


def cells(entry: Mapping[str, Any], eager: Mapping[str, Any]) -> list[str]:
    """A row of the table, from its third column on."""
    training, report = entry["figures"]["training"], entry["figures"].get("report", {})

    def mib(nbytes: float | None) -> str:
        return "" if nbytes is None else f"{nbytes / 2**20:,.1f}"

    def ratio(value: float | None, name: str) -> str:
        return f"{value / eager[name]:.3f}" if value and eager.get(name) else ""

    plain, plain_reserved = report.get("plain_peak_bytes"), report.get("plain_reserved_bytes")
    measured = report.get("measured_peak_bytes") or training.get("allocated_bytes")
    reserved = report.get("measured_reserved_bytes") or training.get("reserved_bytes")
    peaks = [mib(plain), ratio(plain, "allocated_bytes"), mib(report.get("planned_peak_bytes")), mib(measured)]
    peaks += [ratio(measured, "allocated_bytes"), mib(report.get("budget_bytes"))]
    peaks += [mib(plain_reserved), ratio(plain_reserved, "reserved_bytes")]
    peaks += [mib(report.get("planned_reserved_bytes")), mib(reserved)]
    seconds = training.get("step_seconds")
    step = "" if seconds is None else f"{seconds * 1e3:.1f}"
    retries = str(training.get("settled_allocation_retries", ""))
    return [*peaks, retries, step, ratio(seconds, "step_seconds"), _difference(training, eager)]


def _difference(training: Mapping[str, Any], eager: Mapping[str, Any]) -> str:
    """Of the last losses; empty where one is missing, or zero as on a stand-in."""
    own, other = training.get("losses", [None])[-1], eager.get("losses", [None])[-1]
    return f"{abs(own - other) / abs(other):.1e}" if own is not None and other else ""
