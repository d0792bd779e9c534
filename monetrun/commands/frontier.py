"""``monetrun frontier``: what each budget costs, from the plain peak to the smallest feasible one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from monetrun.commands.dry_run import parse_dry_run
from monetrun.core import budget as budget_grammar
from monetrun.core import codec
from monetrun.core.budget import Budget, format_bytes, format_percent, format_share, resolve
from monetrun.core.errors import UsageError
from monetrun.core.plan import Plan, StepSchedules
from monetrun.launcher import report
from monetrun.launcher.job import Job, open_job
from monetrun.launcher.kept import kept_schedules
from monetrun.launcher.keys import frontier_key, smallest_budget_key
from monetrun.launcher.parser import LaunchParser, command_parser
from monetrun.launcher.progress import SolverProgress
from monetrun.machine.named_file import STDOUT, check_file, write_file, writing_option
from monetrun.planning import kept_parameters, planner
from monetrun.planning.baseline import more_frugal
from monetrun.planning.frontier import DEFAULT_POINTS, DEFAULT_SECONDS, Frontier, frontier, next_budget, spread
from monetrun.planning.summary import ROUNDING, planned_bytes

# The search for the smallest budget, beside the points' own time.
_SMALLEST_SECONDS = 10.0


def prepare_parser() -> LaunchParser:
    """A launch's options, and those of the table."""
    description = (
        "Show what each budget costs, from the plain peak to the smallest feasible one; nothing is trained. "
        f"--solver-seconds is for all points together (default: {DEFAULT_SECONDS:g})."
    )
    # --solver-seconds is for all points here, so the next command, which plans one point and trains, leaves it out.
    return command_parser("frontier", description, _add_options, not_reusable=["solver_seconds", "cost_model"])


def _add_options(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    add(
        "--points",
        type=int,
        default=DEFAULT_POINTS,
        metavar="N",
        help=f"number of budgets, from the plain peak to the smallest feasible (default: {DEFAULT_POINTS})",
    )
    add("--budgets", default="", metavar="B,...", help="these budgets: shares of the plain peak or bytes (0.8x,6GiB)")
    add("--json", dest="json_file", default="", metavar="FILE", help="write the table as JSON; - is stdout")
    add("--plot", default="", metavar="FILE", help="draw the table as a .png, .svg or .pdf (needs matplotlib)")
    parser.set_defaults(solver_seconds=DEFAULT_SECONDS, json=False)


def run(words: Sequence[str]) -> int:
    """Plan all points; print, write and draw the table."""
    options, args = parse_dry_run("frontier", prepare_parser(), words)
    check_options(args)
    with open_job(options) as job:
        title = " ".join([Path(options.script).name, *options.script_args])
        found = _solved(job, parse_budgets(args.budgets) if args.budgets else (), args.points)
        if args.json_file != STDOUT:  # first: what was planned is seen, also where a file can no longer be written
            show(found, title, report.stdout_console())
        if args.json_file:
            write_json(found, args.json_file)
        if args.plot:
            draw(found, title, args.plot)
        if not options.quiet:
            print(f"  next: {options.command_line(next_budget(found))}", file=sys.stderr, flush=True)
    return 0


def _solved(job: Job, budgets: Sequence[Budget], points: int) -> Frontier:
    """Plan for each of ``budgets``; if there are none, for ``points`` from the plain peak to the smallest budget."""
    record = job.trial()
    smallest_key = smallest_budget_key(job.options, job.record_key, record)
    known = kept_schedules(job.store, smallest_key, record.graphs)
    longer = replace(job.options.solver_options(), seconds=min(_SMALLEST_SECONDS, job.options.solver_seconds))
    base = more_frugal(record, planner.baseline(record, known), longer)  # as a launch does before it refuses
    plain, least = planner.plain_bytes(record, base), kept_parameters.smallest_bytes(record, base)
    wanted = [resolve(budget, None, plain) for budget in budgets] or spread(plain, least, points)
    smallest = least

    def keep(plan: Plan) -> None:
        """A launch with the smallest budget that any point has shown to do begins with what does it."""
        nonlocal smallest
        progress.found(plan.overhead, plan.bound)
        if job.store is not None and record.sharding is None and planned_bytes(plan) <= smallest:
            smallest = planned_bytes(plan)
            job.store.put("plan", smallest_key, StepSchedules(plan.graphs))

    with SolverProgress(job.console, base.plain.seconds, shown=not job.options.quiet) as progress:
        options = replace(job.options.solver_options(), on_progress=progress, on_search=progress.search)
        found = frontier(record, wanted, job.options.algorithm, options, base, progress.begin, keep)
    found = replace(found, smallest_bytes=smallest, implementations=job.options.implementations)
    if job.store is not None:
        job.store.put("frontier", frontier_key(job.record_key), found)
    return found


def check_options(args: argparse.Namespace) -> None:
    """Check before planning, which takes minutes, that the command's own options can be used.

    Raises:
        UsageError: one cannot.
    """
    if args.points < 2:
        raise UsageError(
            f"--points {args.points}: a frontier has at least 2", f"--points {DEFAULT_POINTS}, or --budgets 0.8x,0.6x"
        )
    kind = budget_grammar.parse(args.budget).kind
    if kind != budget_grammar.AUTO:
        named = "0.8x,6GiB" if kind == budget_grammar.SHARE_OF_FREE else args.budget
        raise UsageError(
            f"--budget {args.budget}: a frontier goes through many budgets",
            f"leave it out, or name them: --budgets {named}",
        )
    if args.budgets:
        parse_budgets(args.budgets)
    if args.json_file:
        check_file("--json", args.json_file)
    if args.plot:
        _check_plot(args.plot)


def parse_budgets(text: str) -> tuple[budget_grammar.Budget, ...]:
    """The budgets of ``--budgets 0.8x,6GiB``.

    Raises:
        UsageError: one is not a budget, or is a share of the free memory, which a frontier does not know.
    """
    parsed = tuple(budget_grammar.parse(word) for word in text.split(","))
    for one in parsed:
        if one.kind in (budget_grammar.AUTO, budget_grammar.SHARE_OF_FREE):
            raise UsageError(
                f"--budgets {text!r}: {one.text!r} is a share of the free memory",
                "give shares of the plain peak or bytes: --budgets 0.8x,0.65x,6GiB",
            )
    return parsed


def draw(found: Frontier, title: str, path: str) -> None:
    """Draw the table as a PNG, SVG or PDF file; the suffix of ``path`` names the format.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    solved = [p for p in found.points if p.overhead is not None]
    gib = found.plain_peak_bytes >= 2 << 30
    unit, unit_name = (1 << 30, "GiB") if gib else (1 << 20, "MiB")
    x = [p.budget_bytes / unit for p in solved]
    overhead = [100 * (p.overhead or 0.0) for p in solved]
    bound = [100 * p.bound for p in solved]
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(x, bound, overhead, color="#4269d0", alpha=0.13, linewidth=0)
    axes.plot(x, bound, color="#4269d0", linewidth=1.1, linestyle=(0, (4, 3)), label="bound: no plan has less")
    axes.plot(x, overhead, color="#4269d0", linewidth=2.0, marker="o", markersize=5, label="planned", clip_on=False)
    axes.axvline(found.plain_peak_bytes / unit, color="#777777", linewidth=0.9)
    axes.axvline(found.smallest_bytes / unit, color="#c4432b", linewidth=0.9, linestyle=":")
    high = max([*overhead, 1.0])
    low = 1.12 * min([*bound, 0.0])
    axes.set_ylim(low, 1.12 * high)
    for where, text, color in (
        (found.plain_peak_bytes, "plain step ", "#777777"),
        (found.smallest_bytes, "smallest feasible ", "#c4432b"),
    ):
        axes.annotate(
            text,
            (where / unit, 1.12 * high),
            xytext=(-2, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            rotation=90,
            fontsize=8,
            color=color,
        )
    axes.set_xlabel(f"budget per device [{unit_name}]")
    axes.set_ylabel("added compute [% of the plain step]")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)
    plain = found.plain_peak_bytes / unit
    shares = axes.secondary_xaxis("top", functions=(_times(1 / plain), _times(plain)))
    shares.set_xlabel("share of the plain peak", fontsize=8, color="#777777")
    shares.tick_params(labelsize=8, colors="#777777")
    shares.spines["top"].set_visible(False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.93, 1.0), fontsize=9)
    with writing_option("--plot", path) as stream:
        figure.savefig(stream, format=Path(path).suffix[1:].lower())


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda values: values * factor


def _check_plot(path: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--plot {path} needs matplotlib: {error}", "pip install 'monetrun[report]'") from error
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: the suffix must name the format", "name a .png, .svg or .pdf")
    check_file("--plot", path)


def write_json(found: Frontier, path: str) -> None:
    """Write the table as JSON to a file, or to stdout for ``-``.

    Raises:
        UsageError: the file cannot be written.
    """
    write_file("--json", path, codec.dumps(found) + "\n")


def show(found: Frontier, title: str, console: Console) -> None:
    """Print the table."""
    plain, smallest = found.plain_peak_bytes, found.smallest_bytes
    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(
        f"  plain peak {format_bytes(plain)} | smallest feasible {format_bytes(smallest)} "
        f"({format_share(smallest, plain)}) | {found.algorithm}, costs of {found.device}"
    )
    rows = report.table("  budget", "share", "planned", "overhead", "bound", "gap", "<")
    for p in found.points:
        start = (f"  {format_bytes(p.budget_bytes)}", format_share(p.budget_bytes, plain))  # to be typed: rounded up
        if p.planned_peak_bytes is None or p.overhead is None or p.gap is None:
            why = "under the smallest" if p.status == "infeasible" else "no plan in time"
            rows.add_row(*start, "-", "-", "-" if p.bound <= -1 else format_percent(p.bound), "-", why)
            continue
        figures = (format_percent(p.overhead, signed=True), format_percent(p.bound), format_percent(p.gap))
        rows.add_row(*start, format_bytes(p.planned_peak_bytes), *figures, f"{p.rounding} round" if p.rounding else "")
    console.print(rows)
    if any(p.rounding for p in found.points):
        console.print(f"  round: implementations that {ROUNDING}")
