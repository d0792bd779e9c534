"""``monetrun explain``: what a plan does, on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.markup import escape

from monetrun.core.budget import format_bytes
from monetrun.launcher import report
from monetrun.planning.explain import Explanation

_ROWS = 20


_BARS = "▁▂▃▄▅▆▇█"


_WIDTH = 72


def show(found: Explanation, title: str, console: Console) -> None:
    """Print the explanation: the ledger of the peak, who pays, who lies there."""
    plain, planned, seconds = found.plain_peak_bytes, found.planned_peak_bytes, found.plain_seconds
    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(
        f"  plain peak {format_bytes(plain)} | budget {format_bytes(found.budget_bytes)} | planned "
        f"{format_bytes(planned)} ({report.share(planned, plain)}) | overhead {found.overhead:+.1%} "
        f"(bound {found.bound:.1%}, gap {found.gap:.1%}) of {_milliseconds(seconds)}"
    )
    console.print("\n[bold]Memory over the step[/bold]")
    highest = max([plain, *found.plain_profile, 1])
    for name, profile in (("plain", found.plain_profile), ("planned", found.planned_profile)):
        console.print(f"  {name:8}{_chart(profile, highest)}  {format_bytes(max(profile, default=0))}")

    console.print(f"\n[bold]At the peak[/bold], {format_bytes(planned)}: {escape(found.peak_name)}")
    console.print("  " + " + ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in found.at_peak.items()))
    rows = report.table("<  alive there, of module", "tensors", "bytes")
    for row in found.alive[:_ROWS]:
        rows.add_row(f"  {escape(row.module)}", str(row.tensors), format_bytes(row.nbytes))
    if rest := found.alive[_ROWS:]:
        left = sum(r.nbytes for r in rest)
        rows.add_row(f"  {len(rest)} more modules", str(sum(r.tensors for r in rest)), format_bytes(left))
    console.print(rows)

    again = sum(row.again for row in found.modules)
    console.print(
        f"\n[bold]Run again[/bold]: {again} operators, {_milliseconds(sum(r.seconds for r in found.modules))}"
    )
    rows = report.table("<  module", "runs again", "pays", "of the step", "saves")
    of_note = [m for m in found.modules if m.again or abs(m.seconds) > 1e-3 * seconds or m.saved_bytes > 0]
    for cost in of_note[:_ROWS]:
        rows.add_row(f"  {escape(cost.module)}", *_cost_cells(cost.again, cost.seconds, cost.saved_bytes, seconds))
    if more := [m for m in found.modules if m not in of_note[:_ROWS]]:
        totals = (sum(r.again for r in more), sum(r.seconds for r in more), sum(r.saved_bytes for r in more))
        rows.add_row(f"  {len(more)} more modules", *_cost_cells(*totals, seconds))
    totals = (again, sum(r.seconds for r in found.modules), sum(r.saved_bytes for r in found.modules))
    rows.add_row("  all", *_cost_cells(*totals, seconds), style="bold")
    console.print(rows)
    console.print("  saves: held from forward to backward by the plain step, and no longer")

    if found.implementations:
        console.print("\n[bold]Other implementations[/bold]")
        rows = report.table("<  implementation", "<operator", "runs")
        for used in found.implementations:
            rows.add_row(f"  {escape(used.implementation)}", used.target.removeprefix("aten."), str(used.count))
        console.print(rows)


def _cost_cells(again: int, seconds: float, saved_bytes: int, whole_seconds: float) -> tuple[str, str, str, str]:
    share = f"{seconds / whole_seconds:+.1%}" if whole_seconds else ""
    return str(again), _milliseconds(seconds), share, format_bytes(saved_bytes)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _chart(profile: Sequence[int], highest: int) -> str:
    """The profile as a line of bars; each is the highest of its stretch."""
    width = min(_WIDTH, len(profile))
    cuts = [i * len(profile) // width for i in range(width + 1)] if width else []
    highs = [max(profile[a:b]) for a, b in pairwise(cuts)]
    return "".join(_BARS[min(len(_BARS) - 1, len(_BARS) * high // highest)] for high in highs)
