"""Overhead against budget: a step's whole trade-off, from its plain peak down to the smallest feasible budget.

Each point is planned as a launch with that budget would be. What one point shows holds for others too: a plan fits
every larger budget, and a bound holds for every smaller one. So the table is monotone, whatever the solver's time.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from monetrun import budget as budgets_of
from monetrun import planner, report
from monetrun.budget import format_budget, format_bytes
from monetrun.errors import InfeasibleBudget, NoPlanInTime, UsageError
from monetrun.plan import Options, Plan
from monetrun.planner import Baseline
from monetrun.step import StepRecord

DEFAULT_POINTS = 8
DEFAULT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Point:
    """One budget.

    Attributes:
        budget_bytes: of the whole step on one device.
        planned_peak_bytes: of the cheapest plan that was found within it; None where none was.
        overhead: that plan's, over the plain step's seconds, as a fraction; None where none was found.
        bound: no plan within the budget has less.
        gap: overhead less bound, None where none was found.
        status: ``"optimal"``, ``"feasible"``, ``"infeasible"`` (less than the smallest budget) or ``"unknown"``.
    """

    budget_bytes: int
    planned_peak_bytes: int | None
    overhead: float | None
    bound: float
    gap: float | None
    status: str


@dataclass(frozen=True)
class Frontier:
    """The table, the largest budget first, and what it is measured by.

    Attributes:
        plain_peak_bytes: of the step without monetrun.
        smallest_bytes: the smallest budget for which a plan is known.
        algorithm: that planned.
        device: that the costs are of.
        points: of falling budget and rising overhead and bound.
    """

    plain_peak_bytes: int
    smallest_bytes: int
    algorithm: str
    device: str
    points: tuple[Point, ...]


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add those of ``monetrun frontier``."""
    add = parser.add_argument
    add(
        "--points",
        type=int,
        default=DEFAULT_POINTS,
        metavar="N",
        help=f"so many budgets, from the plain peak to the smallest feasible (default: {DEFAULT_POINTS})",
    )
    add("--budgets", default="", metavar="B,...", help="these budgets: shares of the plain peak or bytes (0.8x,6GiB)")
    add("--json", default="", metavar="FILE", help="write the table as JSON; - is stdout")
    add("--plot", default="", metavar="FILE", help="draw it; .png, .svg or .pdf (needs matplotlib)")
    parser.set_defaults(solver_seconds=DEFAULT_SECONDS)


def spread(plain_peak_bytes: int, smallest_bytes: int, points: int) -> tuple[int, ...]:
    """Budgets at equal distances, from the plain peak down to the smallest feasible one, both included."""
    width = plain_peak_bytes - smallest_bytes
    found = (plain_peak_bytes - width * i // (points - 1) for i in range(points))
    return tuple(sorted({*found}, reverse=True))


def parse_budgets(text: str) -> tuple[budgets_of.Budget, ...]:
    """The budgets of ``--budgets 0.8x,6GiB``.

    Raises:
        UsageError: one is not a budget, or is one of free memory, which a frontier does not ask for.
    """
    parsed = tuple(budgets_of.parse(word) for word in text.split(","))
    for one in parsed:
        if one.kind in (budgets_of.AUTO, budgets_of.SHARE_OF_FREE):
            raise UsageError(
                f"--budgets {text!r}: {one.text!r} is a share of what is free",
                "give shares of the plain peak or bytes: --budgets 0.8x,0.65x,6GiB",
            )
    return parsed


def frontier(
    record: StepRecord,
    budgets: Sequence[int],
    algorithm: str = "hierarchical",
    options: Options | None = None,
    known: Baseline | None = None,
    on_point: Callable[[int], None] | None = None,
) -> Frontier:
    """Plan the step for every budget.

    Args:
        record: from a trial run.
        budgets: of the whole step, in bytes, in any order.
        algorithm: a name that ``solve.solver`` knows.
        options: for the solver; its ``seconds`` are for all points together.
        known: the record's baseline, when the caller has it already.
        on_point: told each budget before it is planned.

    Raises:
        InfeasibleBudget: no budget is feasible; names the smallest that is.
    """
    options = options or Options()
    base = known or planner.baseline(record)
    descending = sorted({*budgets}, reverse=True)
    if not descending or descending[0] < base.frugal.peak_bytes:
        raise planner.infeasible(record, max(descending, default=0), base)
    until = time.monotonic() + options.seconds
    plans: dict[int, Plan] = {}
    for i, budget_bytes in enumerate(reversed(descending)):  # the schedules of a smaller one are a start for a larger
        if on_point is not None:
            on_point(budget_bytes)
        share = max(0.1, until - time.monotonic()) / (len(descending) - i)
        starts = [[g.schedule for g in plan.graphs] for plan in plans.values()]
        with contextlib.suppress(InfeasibleBudget, NoPlanInTime):
            plans[budget_bytes] = planner.plan_step(
                record, budget_bytes, algorithm, replace(options, seconds=share), base, starts
            )
    points = _monotone(descending, [plans.get(b) for b in descending], base)
    return Frontier(base.plain.peak_bytes, base.frugal.peak_bytes, algorithm, record.device, points)


def _monotone(budgets: Sequence[int], plans: Sequence[Plan | None], base: Baseline) -> tuple[Point, ...]:
    """The points: at each budget the cheapest of the plans within it, and the highest of the bounds above it."""
    bounds: list[float] = []
    for plan in plans:  # other implementations may cost less than the plain step, but none less than nothing
        bounds.append(max([plan.bound if plan else -1.0, *bounds[-1:]]))
    points: list[Point] = []
    best: Plan | None = None
    for budget_bytes, plan, bound in reversed(list(zip(budgets, plans, bounds, strict=True))):
        if plan is not None and (best is None or plan.overhead <= best.overhead):
            best = plan
        if best is None:
            status = "infeasible" if budget_bytes < base.frugal.peak_bytes else "unknown"
            points.append(Point(budget_bytes, None, None, bound, None, status))
            continue
        proven = min(bound, best.overhead)
        status = "optimal" if best.overhead <= proven else best.status
        points.append(
            Point(budget_bytes, best.planned_peak_bytes, best.overhead, proven, best.overhead - proven, status)
        )
    return tuple(reversed(points))


def draw(found: Frontier, title: str, path: str) -> None:
    """Draw the table, as a PNG, SVG or PDF by the end of ``path``.

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
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--plot {path}: {error}", "name a .png, .svg or .pdf in a folder that can be written"
        ) from error


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda values: values * factor


def check_options(args: argparse.Namespace) -> None:
    """Refuse before minutes of planning what would fail after them.

    Raises:
        UsageError: an option of ``add_options`` cannot be used.
    """
    if args.points < 2:
        raise UsageError(
            f"--points {args.points}: a frontier has at least 2", f"--points {DEFAULT_POINTS}, or --budgets 0.8x,0.6x"
        )
    if args.budgets:
        parse_budgets(args.budgets)
    if args.json and args.json != "-":
        _check_folder("--json", args.json)
    if args.plot:
        _check_plot(args.plot)


def _check_folder(option: str, path: str) -> None:
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no such folder", "name a file in a folder that can be written")


def _check_plot(path: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--plot {path} needs matplotlib: {error}", "pip install 'monetrun[report]'") from error
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: the name's end says the format", "name a .png, .svg or .pdf")
    _check_folder("--plot", path)


def show(found: Frontier, title: str, console: Console) -> None:
    """Print the table."""
    plain, smallest = found.plain_peak_bytes, found.smallest_bytes
    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(
        f"  plain peak {format_bytes(plain)} | smallest feasible {format_bytes(smallest)} "
        f"({report.share(smallest, plain)}) | {found.algorithm}, costs of {found.device}"
    )
    rows = report.table("  budget", "share", "planned", "overhead", "bound", "gap", "<")
    for p in found.points:
        start = (f"  {format_bytes(p.budget_bytes)}", report.share(p.budget_bytes, plain))
        if p.planned_peak_bytes is None or p.overhead is None or p.gap is None:
            why = "under the smallest" if p.status == "infeasible" else "no plan in time"
            rows.add_row(*start, "-", "-", f"{p.bound:.1%}", "-", why)
            continue
        figures = (f"{p.overhead:+.1%}", f"{p.bound:.1%}", f"{p.gap:.1%}")
        rows.add_row(*start, format_bytes(p.planned_peak_bytes), *figures, "")
    console.print(rows)


def next_budget(found: Frontier) -> str:
    """A budget worth typing next, as ``parse`` reads it: that of the point after which overhead rises the fastest.

    The knee: the point farthest under the straight line between the two ends, both axes scaled to 1.
    """
    solved = [p for p in found.points if p.overhead is not None]
    first, last = solved[0], solved[-1]
    width = max(1, first.budget_bytes - last.budget_bytes)
    height = max(1e-9, (last.overhead or 0.0) - (first.overhead or 0.0))

    def under(p: Point) -> float:
        return (first.budget_bytes - p.budget_bytes) / width - ((p.overhead or 0.0) - (first.overhead or 0.0)) / height

    return format_budget(max(solved, key=under).budget_bytes)
