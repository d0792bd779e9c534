"""``monetrun explain``: what a plan does, and what was measured in a step under it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from monetrun.commands import SUMMARIES, explain_measured
from monetrun.commands.click_command import run_click
from monetrun.core import codec
from monetrun.core.budget import format_bytes, format_overhead
from monetrun.core.errors import UsageError
from monetrun.core.keeping import as_planned
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.launcher import report
from monetrun.launcher.keys import frontier_key, measured_key
from monetrun.launcher.page import page_of
from monetrun.launcher.plan_file import read_plan
from monetrun.machine.named_file import STDOUT, writing_option
from monetrun.machine.store import Store, default_root
from monetrun.planning import explain as explanation
from monetrun.planning.explain import Explanation
from monetrun.planning.frontier import Frontier
from monetrun.planning.intervals import MeasuredStep, as_plain
from monetrun.planning.snapshot import snapshot

_MOST_ROWS = 20
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"  # the second where the terminal has no others
_CHART_WIDTH = 72


_HELP = f"""{SUMMARIES["explain"]}

monetrun plan writes PLAN_FILE. The trial run and the measurements are read from the cache (monetrun cache list).
"""


@click.command("explain", help=_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option(
    "--measured", is_flag=True, help="Show planned and measured bytes of a step instead, from the last launch."
)
@click.option("--html", "page_file", metavar="FILE", help="Write a page for a browser, with all of it; - is stdout.")
@click.option(
    "--snapshot",
    "snapshot_file",
    metavar="FILE",
    help="Write the planned step for pytorch.org/memory_viz; - is stdout.",
)
@click.argument("plan_file")
def command(plan_file: str, as_json: bool, measured: bool, page_file: str | None, snapshot_file: str | None) -> None:
    """Explain a plan, from what the cache has of it."""
    _check_options(as_json, measured, page_file, snapshot_file)
    plan = read_plan(plan_file)
    store = Store(default_root())
    if measured:
        step = explain_measured.find_measured_step(plan, store, plan_file)
        if as_json:
            peaks = {"budget_bytes": plan.budget_bytes, "planned_peak_bytes": plan.planned_peak_bytes}
            if plan.pool is not None:
                peaks["planned_reserved_bytes"] = plan.pool.planned_bytes
            print(json.dumps({**peaks, "ranks": as_plain(step)}))
        else:
            explain_measured.show(plan, step, plan_file, report.stdout_console())
        return
    key, record = _find_record(plan, store, plan_file)
    if page_file is not None:
        seen = store.get("measured", measured_key(plan), MeasuredStep)
        frontier = store.get("frontier", frontier_key(key), Frontier)
        _write("--html", page_file, page_of(plan, record, seen, Path(plan_file).name, frontier).encode())
    if snapshot_file is not None:
        seen_by_torch = snapshot(as_planned(record, plan.keeps_parameters), [graph.schedule for graph in plan.graphs])
        _write("--snapshot", snapshot_file, pickle.dumps(seen_by_torch, protocol=4))
    if page_file is not None or snapshot_file is not None:
        return
    found = explanation.explain(plan, record)
    if as_json:
        print(codec.dumps(found))
    else:
        show(found, plan_file, report.stdout_console())


def _find_record(plan: Plan, store: Store, plan_file: str) -> tuple[str, StepRecord]:
    """The record that the plan was made from, and its key in the cache."""
    keys: list[str] = []

    def records() -> Iterator[StepRecord]:
        for entry in store.entries():
            if entry.kind == "probe" and not entry.problem:
                record = store.get("probe", entry.key, StepRecord)
                if record is not None:
                    keys.append(entry.key)
                    yield record

    found = explanation.find_record(plan, records(), plan_file)
    return keys[-1], found


def run(words: Sequence[str]) -> int:
    """Explain a plan."""
    return run_click(command, words)


def _check_options(as_json: bool, measured: bool, page_file: str | None, snapshot_file: str | None) -> None:
    files = {"--html": page_file, "--snapshot": snapshot_file}
    for option, file in files.items():
        others = ["--json"] * as_json + ["--measured"] * measured
        if file is not None and others:
            hint = "leave one out; the page of --html has what was measured, too"
            raise UsageError(f"{option} writes a file in place of what {' and '.join(others)} would print", hint)
    if [*files.values()] == [STDOUT, STDOUT]:
        raise UsageError("--html - and --snapshot - both go to stdout", "name a file for one")


def _write(option: str, file: str, content: bytes) -> None:
    with writing_option(option, file) as stream:
        stream.write(content)
    if file != STDOUT:
        print(file)


def show(found: Explanation, title: str, console: Console) -> None:
    """Print what the peak consists of, and what each module adds in compute and saves in memory."""
    plain, planned, seconds = found.plain_peak_bytes, found.planned_peak_bytes, found.plain_seconds
    console.print(f"[bold]{escape(title)}[/bold]")
    for line in _peak_lines(found):
        console.print(line)
    console.print("\n[bold]Memory over the step[/bold]" + ", allocated" * (found.planned_reserved_bytes is not None))
    profiles = {"plain": found.plain_profile, "planned": found.planned_profile}
    highest = max([plain, *found.plain_profile, 1])
    bars = _ASCII_BARS if console.options.ascii_only else _BARS
    width = min(_CHART_WIDTH, max(map(len, profiles.values())))
    for name, profile in profiles.items():
        console.print(f"  {name:8}{_chart(profile, width, highest, bars)}  {format_bytes(max(profile, default=0))}")

    console.print(f"\n[bold]At the peak[/bold], {format_bytes(planned)}: {escape(found.peak_name)}")
    console.print("  " + " + ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in found.at_peak.items()))
    rows = report.table("<  alive then, by module", "tensors", "bytes")
    for row in found.alive[:_MOST_ROWS]:
        rows.add_row(f"  {escape(row.module)}", str(row.tensors), format_bytes(row.nbytes))
    if rest := found.alive[_MOST_ROWS:]:
        left = sum(r.nbytes for r in rest)
        rows.add_row(f"  {len(rest)} more modules", str(sum(r.tensors for r in rest)), format_bytes(left))
    console.print(rows)

    again = sum(row.again for row in found.modules)
    runs = f" ({again} runs)" if again != found.operators_again else ""
    added = _milliseconds(sum(r.seconds for r in found.modules))
    console.print(
        f"\n[bold]By module[/bold]: {found.operators_again} operators run again{runs}; with other implementations "
        f"the plan adds {added}"
    )
    rows = report.table("<  module", "runs again", "adds", "of the step", "saves")
    of_note = [m for m in found.modules if m.again or abs(m.seconds) > 1e-3 * seconds or m.saved_bytes > 0]
    for cost in of_note[:_MOST_ROWS]:
        rows.add_row(f"  {escape(cost.module)}", *_cost_cells(cost.again, cost.seconds, cost.saved_bytes, seconds))
    if more := [m for m in found.modules if m not in of_note[:_MOST_ROWS]]:
        totals = (sum(r.again for r in more), sum(r.seconds for r in more), sum(r.saved_bytes for r in more))
        rows.add_row(f"  {len(more)} more modules", *_cost_cells(*totals, seconds))
    totals = (again, sum(r.seconds for r in found.modules), sum(r.saved_bytes for r in found.modules))
    rows.add_row("  all", *_cost_cells(*totals, seconds), style="bold")
    console.print(rows)
    console.print("  saves: what the plain step holds from forward to backward and the plan does not")

    if found.implementations:
        console.print("\n[bold]Other implementations[/bold]")
        rows = report.table("<  implementation", "<operator", "runs")
        for used in found.implementations:
            rows.add_row(f"  {escape(used.implementation)}", used.target.removeprefix("aten."), str(used.count))
        console.print(rows)


def _peak_lines(found: Explanation) -> list[str]:
    """Peaks in the bytes that the budget bounds; on CUDA also the allocated ones, which all that follows is of."""
    plain, planned = found.plain_peak_bytes, found.planned_peak_bytes
    of_it = []
    if found.plain_reserved_bytes is not None and found.planned_reserved_bytes is not None:
        of_it = [report.allocated_line(plain, planned)]
        plain, planned = found.plain_reserved_bytes, found.planned_reserved_bytes
    return [
        f"  plain peak {format_bytes(plain)} | budget {format_bytes(found.budget_bytes)} | planned "
        f"{format_bytes(planned)} ({report.share(planned, plain)}) | overhead "
        f"{format_overhead(found.overhead, found.bound)} of {_milliseconds(found.plain_seconds)}",
        *of_it,
    ]


def _cost_cells(again: int, seconds: float, saved_bytes: int, whole_seconds: float) -> tuple[str, str, str, str]:
    share = f"{seconds / whole_seconds:+.1%}" if whole_seconds else ""
    return str(again or "-"), _milliseconds(seconds), share, format_bytes(saved_bytes) if saved_bytes else "-"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _chart(profile: Sequence[int], width: int, highest: int, bars: str) -> str:
    """The profile as a line of ``width`` bars, each as high as the maximum of its interval; none of an empty one."""
    cuts = [i * len(profile) // width for i in range(width + 1)] if profile else []
    highs = [max(profile[a : max(a + 1, b)]) for a, b in pairwise(cuts)]
    return "".join(bars[min(len(bars) - 1, len(bars) * high // highest)] for high in highs)
