"""``monetrun check``: whether a planned step computes what the plain one does, within its bytes and seconds."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from monetrun.commands.dry_run import parse_dry_run
from monetrun.core import codec
from monetrun.core.budget import format_bytes
from monetrun.core.errors import CheckFailed
from monetrun.launcher import report
from monetrun.launcher.check import check
from monetrun.launcher.job import open_job
from monetrun.launcher.parser import LaunchParser, command_parser
from monetrun.planning.check import FACTOR, GRADIENT, CheckReport, Difference, OperatorTime
from monetrun.planning.summary import MEASURE_AGAIN

_ROWS = 10
# Where operators were planned to take so many times as long as they do, the machine was busy when they were measured.
_FAR_OFF = 2.0


def prepare_parser() -> LaunchParser:
    """A launch's options, and ``--no-float64``."""
    description = (
        "Compare the planned step with the plain one, on the script's own first batch: loss, gradients and buffers, "
        "bytes, and seconds operator by operator. Nothing is trained; the exit code is 86 where the check fails."
    )
    return command_parser("check", description, _add_options)


def _add_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--no-float64", action="store_true", help="do not also compare with the step in float64")


def run(words: Sequence[str]) -> int:
    """Check, and print what was found.

    Raises:
        CheckFailed: the report, which has been printed, has a problem.
    """
    options, args = parse_dry_run("check", prepare_parser(), words, plan_file=True)
    with open_job(options) as job:
        found = check(job, float64=not args.no_float64)
    if options.json:
        print(json.dumps(as_json(found)))
    else:
        show(found, Path(options.script).name, report.stdout_console())
    if found.problems:
        sys.stdout.flush()
        hint = "--implementations exact, or none, and --no-recompute tell which part of the plan does it"
        raise CheckFailed("; ".join(found.problems), hint if found.wrong else "")
    return 0


def as_json(found: CheckReport) -> dict[str, Any]:
    """The report, for ``--json``; a difference that is not finite is null."""
    plain: dict[str, Any] = {"passed": not found.problems, "problems": list(found.problems), **codec.to_plain(found)}
    for row, difference in zip(plain["differences"], found.differences, strict=True):
        row |= {"relative": difference.relative, "within": difference.within, "allowed": max(0.0, difference.allowed)}
        row |= {key: None for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    for row, time in zip(plain["operators"], found.operators, strict=True):
        row["difference"] = time.difference
    return plain


def show(found: CheckReport, script: str, console: Console) -> None:
    """Print the report."""
    console.print(f"[bold]monetrun check  {escape(script)}[/bold]  {'FAILED' if found.problems else 'passed'}")
    for line in (*_bytes_lines(found), *_value_lines(found)):
        console.print(line)
    differing = [d for d in found.differences if not d.bitwise]
    if differing:
        _show_differences(sorted(differing, key=lambda d: (d.within, -d.relative)), console)
    _show_operators(found.operators, console)


def _bytes_lines(found: CheckReport) -> list[str]:
    def counted(nbytes: int | None) -> str:
        return "not counted" if nbytes is None else format_bytes(nbytes)

    lines = [
        f"  budget {format_bytes(found.budget_bytes)} | planned peak {format_bytes(found.planned_peak_bytes)} | "
        f"measured peak {counted(found.measured_peak_bytes)}, in {found.steps} steps"
    ]
    if found.planned_reserved_bytes is not None:
        reserved = counted(found.measured_reserved_bytes)
        lines.append(f"  reserved: planned {format_bytes(found.planned_reserved_bytes)} | measured {reserved}")
    return lines


def _value_lines(found: CheckReport) -> list[str]:
    same = sum(d.bitwise for d in found.differences)
    rule = "the plan promises the plain step's bits"
    if found.not_bitwise:
        rule = f"the plan need not give the plain step's bits: {found.not_bitwise}"
    lines = [f"  {same} of {len(found.differences)} values are bitwise those of the plain step; {escape(rule)}"]
    if varying := sum(not d.repeats for d in found.differences):
        lines.append(f"  {varying} values differ between two plain runs, too: there, rounding is allowed")
    if found.no_float64:
        lines.append(f"  not compared with float64: {escape(found.no_float64)}")
    else:
        plain, planned = (_whole(found.differences, name) for name in ("plain_float64", "planned_float64"))
        lines.append(f"  distance of all gradients from float64's: plain {plain:.3g}, planned {planned:.3g}")
    lines += [f"  warning: {escape(warning)}" for warning in found.warnings]
    return lines


def _whole(differences: Sequence[Difference], name: str) -> float:
    """A distance of all gradients together, as a share of their norm."""
    gradients = [d for d in differences if d.kind == GRADIENT]
    norm = math.hypot(*(d.norm for d in gradients))
    distance = math.hypot(*(getattr(d, name) or 0.0 for d in gradients))
    return distance / norm if norm else distance


def _show_differences(differing: Sequence[Difference], console: Console) -> None:
    columns = ("largest", "relative", "planned to float64", "plain to float64", "allowed", "")
    rows = report.table("<  differs from the plain step", *columns)
    for d in differing[:_ROWS]:
        distances = (d.planned_float64, d.plain_float64)
        rows.add_row(
            f"  {escape(d.kind)} {escape(d.name)}",
            f"{d.max_abs:.3g}",
            f"{d.relative:.3g}",
            *("-" if distance is None else f"{d.share(distance):.3g}" for distance in distances),
            "0" if d.allowed < 0 else f"{d.share(d.allowed):.3g}",
            "" if d.within else "too much",
        )
    console.print(rows)
    more = f"; {len(differing) - _ROWS} more differ" if len(differing) > _ROWS else ""
    console.print(
        "  relative, distances and allowed: 2-norms as shares of the plain value's; rounding may lead "
        f"{FACTOR:.0f} times as far from float64 as the plain step is{more}"
    )
    if alone := sum(d.mostly_rounding and d.within for d in differing):
        console.print(
            f"  of {alone} of them the plain value is mostly rounding, too, as of gradients that are 0 but for that "
            "(a bias before a norm): there a relative difference says little"
        )


def _show_operators(times: Sequence[OperatorTime], console: Console) -> None:
    if not times:
        console.print("  operators were not timed: the script ended before its third step")
        return
    planned, measured = sum(t.planned_seconds for t in times), sum(t.measured_seconds for t in times)
    console.print(f"  operators: planned {1e3 * planned:.3f} ms, measured {1e3 * measured:.3f} ms in the planned step")
    if planned > _FAR_OFF * measured:
        console.print(f"  costs are far off: {MEASURE_AGAIN}")
    elif measured > _FAR_OFF * planned:
        console.print(
            "  that is far longer: the machine is busy now, or has fewer threads than when they were measured"
        )
    rows = report.table("<  farthest from plan", "<module", "<pass", "<implementation", "planned ms", "measured ms")
    for t in times[:_ROWS]:
        name = t.name.removeprefix(f"{t.module}.") + (f" x{t.runs}" if t.runs > 1 else "")
        figures = (f"{1e3 * t.planned_seconds:.3f}", f"{1e3 * t.measured_seconds:.3f}")
        rows.add_row(f"  {escape(name)}", escape(t.module), t.phase, escape(t.implementation), *figures)
    console.print(rows)
