"""What ``monetrun explain --measured`` prints: planned and measured bytes of one settled training step."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from monetrun.core.budget import format_bytes
from monetrun.core.errors import PlanMismatch
from monetrun.core.plan import Plan
from monetrun.launcher import report
from monetrun.launcher.keys import measured_key
from monetrun.machine.store import Store
from monetrun.planning.intervals import Interval, MeasuredStep, RankIntervals


def find_measured_step(plan: Plan, store: Store, plan_file: str) -> MeasuredStep:
    """What the last launch under ``plan`` measured.

    Args:
        plan: to be explained.
        store: the cache.
        plan_file: the plan's file, for the message.

    Raises:
        PlanMismatch: the cache has no measurements for this plan.
    """
    step = store.get("measured", measured_key(plan), MeasuredStep)
    if step is None:
        raise PlanMismatch(
            f"the cache has no measurements of a step under the plan {plan_file}",
            f"monetrun --plan {plan_file} train.py measures the third training step; script and arguments as planned",
        )
    return step


def show(plan: Plan, step: MeasuredStep, title: str, console: Console) -> None:
    """Print the intervals of the first rank (rank 0), and the largest difference of each further rank.

    Args:
        plan: of the step.
        step: has at least one rank.
        title: the first line.
        console: to print to.
    """
    first, *others = step.ranks
    measured_bytes = first.intervals[first.largest_measured_peak].measured_peak_bytes
    console.print(f"[bold]{escape(title)}[/bold]")
    begins = f"  budget {format_bytes(plan.budget_bytes)} | "
    if plan.pool is not None:  # the budget bounds what is reserved on CUDA; what was measured is allocated
        console.print(f"{begins}planned peak {format_bytes(plan.pool.planned_bytes)}, reserved on the device")
        begins = "  of it allocated: "
    console.print(
        f"{begins}planned peak {format_bytes(plan.planned_peak_bytes)} | "
        f"measured peak {format_bytes(measured_bytes)}, in one settled step of rank {first.rank}"
    )
    planned_bytes = max(interval.planned_peak_bytes for interval in first.intervals)
    if planned_bytes != plan.planned_peak_bytes:
        console.print(f"  planned again while training: {format_bytes(planned_bytes)} in the step below")
    columns = ("planned start", "planned peak", "measured start", "measured peak", "difference")
    rows = report.table("<  interval", *columns, "", "<")
    for index, interval in enumerate(first.intervals):
        rows.add_row(
            f"  {escape(interval.label)}",
            format_bytes(interval.planned_start_bytes),
            format_bytes(interval.planned_peak_bytes),
            format_bytes(interval.measured_start_bytes),
            format_bytes(interval.measured_peak_bytes),
            *_difference_cells(interval),
            _mark(first, index),
        )
    console.print(rows)
    console.print("  start: allocated when the interval begins; difference: measured peak minus planned peak")
    for rank in others:
        interval = rank.intervals[rank.largest_difference]
        difference, percent = _difference_cells(interval)
        console.print(f"  rank {rank.rank}: largest difference {difference} ({percent}), {escape(interval.label)}")


def _difference_cells(interval: Interval) -> tuple[str, str]:
    sign = "+" if interval.difference_bytes > 0 else ""
    return f"{sign}{format_bytes(interval.difference_bytes)}", f"{interval.difference:+.2%}"


def _mark(rank: RankIntervals, index: int) -> str:
    marks = []
    if index == rank.largest_measured_peak:
        marks.append("largest measured peak")
    if index == rank.largest_difference and rank.intervals[index].difference_bytes:
        marks.append("largest difference")
    return ", ".join(marks)
