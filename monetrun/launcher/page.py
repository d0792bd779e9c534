"""The page of ``monetrun explain --html`` and ``monetrun --report``: one file for a browser, without a network."""

from __future__ import annotations

import html
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from monetrun.core import codec
from monetrun.core.errors import UsageError
from monetrun.core.keeping import as_planned
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Plan
from monetrun.core.step import OUTSIDE, Event, StepRecord
from monetrun.launcher import rank_figures
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.report import Outcome, outcome_json
from monetrun.launcher.surroundings import surroundings
from monetrun.machine.named_file import replace_file
from monetrun.planning.explain import describes, explain
from monetrun.planning.frontier import Frontier
from monetrun.planning.intervals import MeasuredStep, as_plain
from monetrun.planning.moments import Moment, moments

_STRETCH_WIDTH = 3  # as many operators as what the script does between two calls is wide


def page_of(
    plan: Plan,
    record: StepRecord,
    measured: MeasuredStep | None,
    title: str,
    frontier: Frontier | None = None,
    *,
    notes: Sequence[str] = (),
    around: Mapping[str, str] | None = None,
) -> str:
    """The page, as HTML with its data, style and script.

    Args:
        plan: to be shown.
        record: of the step that it was made for.
        measured: what the last launch with it has measured, if anything.
        title: of the page, as text.
        frontier: what other budgets cost, if known.
        notes: on the launch, a line each.
        around: where it ran, by name.

    Raises:
        PlanMismatch: ``record`` is of another step.
    """
    found, record = explain(plan, record), as_planned(record, plan.keeps_parameters)
    plain = moments(*plain_step(record), found.plain_profile)
    planned = moments(record, [g.schedule for g in plan.graphs], found.planned_profile)
    data = {
        "title": title,
        "environment": f"{plan.device}, torch {plan.torch_version}, {plan.solver}: {plan.status}",
        "notes": list(notes),
        "surroundings": list((around or {}).items()),
        "explanation": codec.to_plain(found),
        "reserved": plan.pool is not None,  # the budget is of reserved bytes then, and the chart shows allocated ones
        "parts": [_part_name(event, record) for event in record.events],
        "cuts": _cuts(planned, record),
        "plain": _columns(plain, record),
        "planned": _columns(planned, record),
        "intervals": [] if measured is None else as_plain(measured),
        "frontier": None if frontier is None else codec.to_plain(frontier),
    }
    template = files("monetrun.launcher").joinpath("page.html").read_text(encoding="utf-8")
    # "</script>" in a module's name must not end the data
    filled = template.replace("/*DATA*/", json.dumps(data).replace("<", "\\u003c"))
    return filled.replace("<title>monetrun</title>", f"<title>{html.escape(data['title'])} - monetrun</title>", 1)


def _columns(found: Sequence[Moment], record: StepRecord) -> dict[str, Any]:
    """The moments by field, and where each event of the step begins and ends among them."""
    count = Counter(moment.event for moment in found)
    ends = list(accumulate(count[i] for i in range(len(record.events))))
    columns = {field.name: [getattr(moment, field.name) for moment in found] for field in fields(Moment)}
    return {**columns, "spans": [[end - count[i], end] for i, end in enumerate(ends)]}


def _part_name(event: Event, record: StepRecord) -> str:
    return event.name if event.kind == OUTSIDE else f"{record.graphs[event.graph].name} {event.kind}"


def _cuts(planned: Sequence[Moment], record: StepRecord) -> list[float]:
    """Where events begin on the time axis, from 0 to 1: a planned operator is as wide as the next."""
    count = Counter(moment.event for moment in planned)
    widths = [_STRETCH_WIDTH if e.kind == OUTSIDE else count[i] for i, e in enumerate(record.events)]
    return [end / max(1, sum(widths)) for end in accumulate(widths, initial=0)]


def check_tensorboard(folder: str) -> None:
    """Check that ``--tensorboard`` can be followed, and make its folder, before anything else is done.

    Raises:
        UsageError: the package is not installed, or the folder cannot be made, or not written to.
    """
    if find_spec("tensorboard") is None:
        raise UsageError(f"--tensorboard {folder} needs tensorboard", "pip install 'monetrun[report]'")
    check_folder(folder, "--tensorboard")


def check_folder(folder: str, option: str = "--report") -> None:
    """Make the folder that an option names before anything else is done.

    Raises:
        UsageError: it cannot be made, or not written to.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _unwritable(option, folder, error) from error


def check_log_folder(options: LaunchOptions) -> None:
    """``check_folder`` of torchrun's ``--log-dir``, which it makes when it starts the workers."""
    folder, specs = options.torchrun.log_dir, options.torchrun.logs_specs
    if folder and not specs and folder != os.devnull:
        check_folder(folder, "--log-dir")


def write_report(
    options: LaunchOptions, outcome: Outcome, record: StepRecord | None, node: int, frontier: Frontier | None = None
) -> None:
    """Write ``report.json``, and ``report.html`` where the plan's trial run is known, into the folder of ``--report``.

    On several nodes, which may share the folder, their names have the rank of this ``node``.

    Raises:
        UsageError: they cannot be written.
    """
    folder, name = Path(options.report_folder), f"report.node{node}" if options.several_nodes else "report"
    page = folder / f"{name}.html"
    found = {
        "command": [options.script, *options.script_args],
        "launch": ["monetrun", *sys.argv[1:]],
        **outcome_json(outcome),
    }
    found["intervals"] = [] if outcome.measured_step is None else as_plain(outcome.measured_step)
    found["environment"] = around = surroundings()
    unlike = () if record is None else record.unlike_eager
    notes = [*(line.strip() for line in rank_figures.lines(outcome.ranks, outcome.steps)), *unlike, *outcome.warnings]
    title = " ".join(found["command"])
    try:
        replace_file(folder / f"{name}.json", json.dumps(found, indent=1))
        if outcome.plan is not None and record is not None and describes(record, outcome.plan):
            made = page_of(outcome.plan, record, outcome.measured_step, title, frontier, notes=notes, around=around)
            replace_file(page, made)
        else:  # an older launch's page is not this one's
            page.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable("--report", options.report_folder, error) from error


def _unwritable(option: str, folder: str, error: OSError) -> UsageError:
    return UsageError(f"{option} {folder}: {error.strerror}", "name a folder that can be written")
